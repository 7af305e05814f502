"""Which steps to keep, and which one is the best."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import contextlib
import dataclasses
import math
from typing import Any

from orbax.checkpoint import checkpoint_managers

from flaxshard.checkpoint import step_files
from flaxshard.checkpoint import steps
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
    for name in ("max_to_keep", "keep_every"):
      if getattr(self, name) is not None:
        checks.integer(name, getattr(self, name), minimum=1)
    checks.integer("keep_best", self.keep_best, minimum=1)
    checks.one_of("best_mode", self.best_mode, ("max", "min"))
    is_default = (self.keep_best, self.best_mode) == (1, "max")
    if self.best_metric is None and not is_default:
      raise ValueError("keep_best and best_mode need best_metric.")

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: Any
  ) -> list[bool]:
    """Returns for each checkpoint, in ascending order, whether it is kept."""
    del context
    if self.max_to_keep is None:
      return [True] * len(checkpoints)
    metrics = {info.step: info.metrics or {} for info in checkpoints}
    finite = [s for s in metrics if all(map(_is_finite, metrics[s].values()))]
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
    value: Any = metrics.get(self.best_metric or "")
    if not _is_finite(value):
      return -math.inf
    return float(value) if self.best_mode == "max" else -float(value)

  def check(self, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns metrics with values that JSON can hold: None if not finite.

    Args:
      metrics: Numbers by name: Python numbers, or arrays without dimensions.

    Raises:
      TypeError, ValueError: A metric is not a number, or there are metrics, but
        not the one that ranks checkpoints.
    """
    numbers: dict[str, float | None] = {}
    for name, value in metrics.items():
      try:
        number = math.nan if value is None else float(value)
      except (TypeError, ValueError) as e:
        raise checks.ArgumentTypeError(
          f"metrics[{name!r}] must be a number, got {value!r}."
        ) from e
      numbers[name] = number if math.isfinite(number) else None
    # Without any, as between evaluations, a checkpoint is not ranked.
    if numbers and self.best_metric and self.best_metric not in numbers:
      raise ValueError(
        f"metrics has no {self.best_metric!r}, the best_metric of the "
        f"checkpointer, only {', '.join(map(repr, numbers))}. A step without "
        "an evaluation is saved without metrics."
      )
    return numbers


def _is_finite(value: Any) -> bool:
  # `Keep.check` replaces values that are not finite by None.
  return isinstance(value, (int, float)) and math.isfinite(value)


def best_step(
  directory: step_files.Directory, keep: Keep, damaged: Collection[int] = ()
) -> int | None:
  """Returns the step with the best metric, the latest of equal ones.

  Nothing is written or locked: the run may be in progress.

  Args:
    directory: Path of a directory of steps, or of a workdir.
    keep: Ranks the steps.
    damaged: More steps that are known to be damaged.

  Returns:
    The step; None if no step has a finite value of the metric.
  """
  found, unreadable = steps.look(steps.directory_of_steps(directory))
  best = -math.inf, -1
  for step in found.keys() - unreadable - {*damaged}:
    # Without metrics, or just deleted.
    with contextlib.suppress(step_files.Damaged):
      file = found[step] / step_files.METRICS / step_files.METRICS
      best = max(best, (keep.rank(step_files.read_json(file)), step))
  rank, step = best
  return None if rank == -math.inf else step
