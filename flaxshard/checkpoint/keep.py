"""Chooses which checkpoints to keep, and ranks them by their metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np
from orbax.checkpoint import checkpoint_managers

from flaxshard.core import checks


@dataclasses.dataclass(frozen=True)
class Keep(checkpoint_managers.PreservationPolicy):
  """Keeps the newest checkpoints, the best ones and some more.

  So that a run that diverges does not replace its good checkpoints, those with
  a non-finite metric do not count as new: as many of the newest others are
  kept, and the newest one whose metrics are finite.

  Attributes:
    max_to_keep: Number of newest checkpoints to keep; None keeps all.
    keep_every: Keep the checkpoints whose step is a multiple of this.
    best_metric: Name of the metric that ranks the checkpoints.
    best_mode: `"max"` if higher values of the metric are better, or `"min"`.
    keep_best: Number of best checkpoints to keep.

  Raises:
    ValueError: An argument has a wrong type or a value that is not allowed.
  """

  max_to_keep: int | None = None
  keep_every: int | None = None
  best_metric: str | None = None
  best_mode: str = "max"
  keep_best: int = 1

  def __post_init__(self) -> None:
    for name in ("max_to_keep", "keep_every", "keep_best"):
      value = getattr(self, name)
      if value is not None:
        checks.integer(name, value, minimum=1)
    checks.one_of("best_mode", self.best_mode, ("max", "min"))
    if self.best_metric is not None:
      checks.string("best_metric", self.best_metric)
    elif (self.keep_best, self.best_mode) != (1, "max"):
      raise ValueError(
        f"keep_best={self.keep_best} and best_mode={self.best_mode!r} need "
        "best_metric."
      )
    if self.keep_every is not None and self.max_to_keep is None:
      raise ValueError(
        f"keep_every={self.keep_every} adds checkpoints to the newest ones "
        "that are kept, but max_to_keep=None keeps all: set max_to_keep."
      )

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    """Returns for each checkpoint, in ascending order, whether it is kept."""
    del context
    if self.max_to_keep is None:
      return [True] * len(checkpoints)
    metrics = {info.step: info.metrics or {} for info in checkpoints}
    finite = [
      step
      for step, values in metrics.items()
      if not any(map(_is_nonfinite, values.values()))
    ]
    # Checkpoints saved between evaluations are kept only while new.
    evaluated = [step for step in finite if metrics[step]]
    best = [s for s in metrics if self.rank(metrics[s]) > -math.inf]
    best.sort(key=lambda step: self.rank(metrics[step]))
    kept = {
      *list(metrics)[-self.max_to_keep :],
      *finite[-self.max_to_keep :],
      *evaluated[-1:],
      *best[-self.keep_best :],
    }
    every = self.keep_every
    return [s in kept or bool(every and s % every == 0) for s in metrics]

  def rank(self, metrics: Mapping[str, Any]) -> float:
    """Returns a number that is higher for better metrics.

    A missing, None or non-finite value ranks below any number.

    Example:
      >>> keep = Keep(best_metric="loss", best_mode="min")
      >>> keep.rank({"loss": 0.5}) > keep.rank({"loss": 0.7})
      True
      >>> keep.rank({"loss": float("nan")})
      -inf
    """
    value = metrics.get(self.best_metric or "")
    if _is_nonfinite(value) or not isinstance(value, (int, float)):
      return -math.inf
    return float(value) if self.best_mode == "max" else -float(value)

  def check(self, metrics: Any) -> dict[str, float | int | None]:
    """Returns metrics with values that JSON can hold: None if not finite.

    Args:
      metrics: Numbers by name: Python numbers, or arrays without dimensions.

    Raises:
      TypeError: A metric is not a number.
      ValueError: There are metrics, but not the one that ranks checkpoints.
    """
    if not isinstance(metrics, Mapping):
      raise TypeError(f"metrics must be a dict of numbers, got {metrics!r}.")
    values: dict[str, float | int | None] = {}
    for name, value in metrics.items():
      number = value
      if hasattr(value, "item") and np.shape(value) == ():
        number = value.item()
      if not isinstance(name, str) or not isinstance(
        number, (int, float, type(None))
      ):
        raise TypeError(f"metrics[{name!r}] must be a number, got {value!r}.")
      values[name] = None if _is_nonfinite(number) else number
    # Without any, as between evaluations, a checkpoint is not ranked.
    if values and self.best_metric and self.best_metric not in values:
      raise ValueError(
        f"metrics has no {self.best_metric!r}, the best_metric of the "
        f"checkpointer, only {', '.join(map(repr, values))}."
        f"{checks.did_you_mean(self.best_metric, values)} A step without an "
        "evaluation is saved without metrics."
      )
    return values


def _is_nonfinite(value: Any) -> bool:
  # `Keep.check` replaces values that are not finite by None.
  return value is None or (
    isinstance(value, float) and not math.isfinite(value)
  )
