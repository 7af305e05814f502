"""Which checkpoints are kept: Orbax's policies, put together."""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import Any

import numpy as np
from orbax.checkpoint import checkpoint_managers

MODES = ("max", "min")


def policy(
  max_to_keep: int | None,
  *,
  keep_every: int | None = None,
  best_metric: str | None = None,
  best_mode: str = "max",
  keep_best: int = 1,
) -> checkpoint_managers.PreservationPolicy:
  """Returns what tells Orbax which checkpoints to keep.

  A checkpoint is kept as long as one of them wants it: the newest, those at
  multiples of a step, the best. The newest is always among them.

  Args:
    max_to_keep: How many of the newest to keep; None keeps all.
    keep_every: The number of steps of which multiples are kept.
    best_metric: The metric that tells which are the best.
    best_mode: `"max"` or `"min"`: which values of it are good.
    keep_best: How many of the best to keep.

  Raises:
    ValueError: An argument has a value that is not allowed.

  References:
    https://orbax.readthedocs.io/en/latest/guides/checkpoint/preservation_policies.html
  """
  counts = dict(max_to_keep=max_to_keep, keep_every=keep_every)
  for name, count in counts.items():
    if count is not None and not _is_count(count):
      raise ValueError(f"{name} must be at least 1, or None, got {count!r}.")
  if not _is_count(keep_best):
    raise ValueError(f"keep_best must be at least 1, got {keep_best!r}.")
  if best_mode not in MODES:
    raise ValueError(f"best_mode must be 'max' or 'min', got {best_mode!r}.")
  if best_metric is not None and not (
    isinstance(best_metric, str) and best_metric
  ):
    raise ValueError(
      f"best_metric must be the name of a metric, or None, got {best_metric!r}."
    )
  if best_metric is None and (keep_best, best_mode) != (1, "max"):
    raise ValueError(
      f"keep_best={keep_best} and best_mode={best_mode!r} need best_metric."
    )
  if keep_every is not None and max_to_keep is None:
    raise ValueError(
      f"keep_every={keep_every} says what to keep besides the newest, but "
      "max_to_keep=None keeps all; max_to_keep must be at least 1 with it."
    )
  policies: list[checkpoint_managers.PreservationPolicy] = [
    checkpoint_managers.LatestN(max_to_keep)
  ]
  if keep_every is not None:
    policies.append(checkpoint_managers.EveryNSteps(keep_every))
  if best_metric is not None:
    policies.append(
      checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: rank(metrics, best_metric, best_mode),
        n=keep_best,
        # Saved between evaluations: what is not the newest may go.
        keep_checkpoints_without_metrics=False,
      )
    )
  return checkpoint_managers.AnyPreservationPolicy(policies)


def _is_count(value: Any) -> bool:
  whole = isinstance(value, int) and not isinstance(value, bool)
  return whole and value >= 1


def rank(
  metrics: Mapping[str, Any] | None, name: str | None, mode: str
) -> float:
  """Returns a number that is higher the better the metrics are.

  A metric that is missing, None, or not finite is worse than any number.

  Example:
    >>> rank({"loss": 0.5}, "loss", "min") > rank({"loss": 0.7}, "loss", "min")
    True
    >>> rank({"loss": float("nan")}, "loss", "min")
    -inf
  """
  value = metrics.get(name) if metrics and name else None
  if not isinstance(value, (int, float)) or not math.isfinite(value):
    return -math.inf
  return float(value) if mode == "max" else -float(value)


def as_json(metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
  """Returns metrics as JSON can hold them: null for what is not finite.

  Raises:
    TypeError: A metric is not a number.
  """
  if not isinstance(metrics, Mapping):
    raise TypeError(f"metrics must be a dict of numbers, got {metrics!r}.")
  values: dict[str, float | int | None] = {}
  for name, value in metrics.items():
    number = value
    if value is not None and not isinstance(value, (int, float)):
      array = np.asarray(value)
      number = array.item() if array.shape == () else value
    if not isinstance(name, str) or not (
      number is None or isinstance(number, (int, float))
    ):
      raise TypeError(f"metrics[{name!r}] must be a number, got {value!r}.")
    finite = number is not None and math.isfinite(number)
    values[name] = number if finite else None
  return values
