"""Chooses which checkpoints to keep, by Orbax's preservation policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np
from orbax.checkpoint import checkpoint_managers

from flaxshard.core import checks

MODES = ("max", "min")


def create_policy(
  max_to_keep: int | None,
  *,
  keep_every: int | None = None,
  best_metric: str | None = None,
  best_mode: str = "max",
  keep_best: int = 1,
) -> checkpoint_managers.PreservationPolicy:
  """Returns a policy for Orbax that keeps the newest, the best and some more.

  A checkpoint is kept if it is one of the newest, its step is a multiple of
  `keep_every`, or it is one of the best. The newest one is always kept. So that
  a run that diverges does not replace its good checkpoints, those with a
  non-finite metric do not count: as many of the newest others are kept, and the
  newest one whose metrics are finite.

  Args:
    max_to_keep: Number of newest checkpoints to keep; None keeps all.
    keep_every: Keep the checkpoints whose step is a multiple of this.
    best_metric: Name of the metric that ranks the checkpoints.
    best_mode: `"max"` if higher values of the metric are better, or `"min"`.
    keep_best: Number of best checkpoints to keep.

  Raises:
    ValueError: An argument has a wrong type or a value that is not allowed.

  References:
    https://orbax.readthedocs.io/en/latest/guides/checkpoint/preservation_policies.html
  """
  if max_to_keep is not None:
    checks.integer("max_to_keep", max_to_keep, minimum=1)
  if keep_every is not None:
    checks.integer("keep_every", keep_every, minimum=1)
  checks.integer("keep_best", keep_best, minimum=1)
  checks.one_of("best_mode", best_mode, MODES)
  if best_metric is not None and not (
    isinstance(best_metric, str) and best_metric
  ):
    raise ValueError(
      f"best_metric must be the name of a metric or None, got {best_metric!r}."
    )
  if best_metric is None and (keep_best, best_mode) != (1, "max"):
    raise ValueError(
      f"keep_best={keep_best} and best_mode={best_mode!r} need best_metric."
    )
  if keep_every is not None and max_to_keep is None:
    raise ValueError(
      f"keep_every={keep_every} adds checkpoints to the newest ones that are "
      "kept, but max_to_keep=None keeps all: set max_to_keep."
    )
  policies: list[checkpoint_managers.PreservationPolicy] = [
    checkpoint_managers.LatestN(max_to_keep)
  ]
  if max_to_keep is not None:
    policies.append(_LatestFinite(max_to_keep))
  if keep_every is not None:
    policies.append(checkpoint_managers.EveryNSteps(keep_every))
  if best_metric is not None:
    policies.append(
      checkpoint_managers.BestN(
        get_metric_fn=lambda metrics: rank(metrics, best_metric, best_mode),
        n=keep_best,
        # Checkpoints saved between evaluations are kept only while new.
        keep_checkpoints_without_metrics=False,
      )
    )
  return checkpoint_managers.AnyPreservationPolicy(policies)


@dataclasses.dataclass(frozen=True)
class _LatestFinite(checkpoint_managers.PreservationPolicy):
  """Keeps the newest checkpoints without a non-finite metric.

  The newest checkpoint that has metrics, all of them finite, is kept even if
  later checkpoints without metrics are more than `n`.

  Attributes:
    n: Number of checkpoints to keep.
  """

  n: int

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    """Returns for each checkpoint, in ascending order, whether it is kept."""
    del context
    finite = [
      i
      for i, info in enumerate(checkpoints)
      if not any(map(_is_nonfinite, (info.metrics or {}).values()))
    ]
    evaluated = [i for i in finite if checkpoints[i].metrics]
    kept = {*finite[-self.n :], *evaluated[-1:]}
    return [i in kept for i in range(len(checkpoints))]


def _is_nonfinite(value: Any) -> bool:
  # `to_json` replaces values that are not finite by None.
  return value is None or (
    isinstance(value, float) and not math.isfinite(value)
  )


def rank(
  metrics: Mapping[str, Any] | None, name: str | None, mode: str
) -> float:
  """Returns a number that is higher for better metrics.

  A missing, None or non-finite value ranks below any number.

  Args:
    metrics: The metrics of a checkpoint, or None if it has none.
    name: Name of the metric that ranks it.
    mode: `"max"` if higher values are better, or `"min"`.

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


def check_has(best_metric: str | None, metrics: Mapping[str, Any]) -> None:
  """Raises a ValueError if metrics lack the one that ranks checkpoints.

  Args:
    best_metric: Name of the metric, or None.
    metrics: The metrics of a checkpoint. Without any, as between evaluations,
      it is not ranked.
  """
  if best_metric is None or not metrics or best_metric in metrics:
    return
  names = ", ".join(map(repr, metrics))
  raise ValueError(
    f"metrics has no {best_metric!r}, the best_metric of the checkpointer, "
    f"only {names}.{checks.did_you_mean(best_metric, metrics)} A step without "
    "an evaluation is saved without metrics."
  )


def to_json(metrics: Mapping[str, Any]) -> dict[str, float | int | None]:
  """Returns metrics with values that JSON can hold.

  Values that are not finite become None.

  Args:
    metrics: Numbers by name: Python numbers, or arrays without dimensions.

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
