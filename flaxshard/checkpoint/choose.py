"""Chooses the steps to keep, the best one, and the one to restore."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
import contextlib
import dataclasses
import logging
import math
from typing import Any, TypeVar

import jax
from orbax.checkpoint import checkpoint_managers

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import steps
from flaxshard.core import checks
from flaxshard.core import multihost

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


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
      if getattr(self, name) is not None:
        checks.integer(name, getattr(self, name), minimum=1)
    checks.one_of("best_mode", self.best_mode, ("max", "min"))
    if self.best_metric is None and (self.keep_best, self.best_mode) != (
      (1, "max")
    ):
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
      TypeError: A metric is not a number.
      ValueError: There are metrics, but not the one that ranks checkpoints.
    """
    numbers: dict[str, float | None] = {}
    for name, value in metrics.items():
      try:
        number = math.nan if value is None else float(value)
      except (TypeError, ValueError) as e:
        message = f"metrics[{name!r}] must be a number, got {value!r}."
        raise TypeError(message) from e
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


def look(directory: Any) -> tuple[dict[int, Any], set[int]]:
  """Returns the path of each step, and which steps are visibly damaged.

  They are the steps of `Checkpointer` and of `flax.training.checkpoints`.

  Args:
    directory: Path of the directory of the steps.
  """
  found, damaged = steps.find(directory, steps.OURS), set()
  for number, path in found.items():
    try:
      digests.check(path)
    except digests.Damaged:
      damaged.add(number)
  return found, damaged


def best_step(
  directory: Any, keep: Keep, damaged: Collection[int] = ()
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
  found, unreadable = look(steps.directory_of_steps(directory))
  best = -math.inf, -1
  for step in found.keys() - unreadable - {*damaged}:
    # Without metrics, or just deleted.
    with contextlib.suppress(digests.Damaged):
      metrics = digests.read_json(found[step] / steps.METRICS / steps.METRICS)
      best = max(best, (keep.rank(metrics), step))
  rank, step = best
  return None if rank == -math.inf else step


def read(
  path: Any,
  step: int | None,
  read_step: Callable[[Any], _T],
  list_steps: Callable[[], Mapping[int, Any]] | None = None,
  damaged: set[int] | None = None,
) -> tuple[Any, _T]:
  """Reads the step at a path, or the newest of a directory that is not damaged.

  Another program may save in the directory at the same time, and delete steps
  that are being read. Then the steps are listed again.

  Args:
    path: A step, a directory of steps, or a workdir.
    step: The only step to read; None means the newest.
    read_step: Reads the step at a path, or raises `digests.Damaged`.
    list_steps: Returns the path of each step in the directory `path`; None
      finds them.
    damaged: Gets the numbers of the steps that were found to be damaged.

  Returns:
    The number of the step, None for a file without one, and what `read_step`
    returned.

  Raises:
    ValueError: There is no such step, or it is damaged, or all are, or the
      processes find different steps.
  """
  directory = steps.as_path(path)
  if list_steps is None:
    number = steps.number_of(path)
    if steps.is_step(path) and step in (None, number):
      return number, read_step(directory)
    directory = steps.directory_of_steps(path)
    list_steps = lambda: steps.find(directory)
  found = list_steps()
  multihost.check_agreement(
    {"the steps that they find": sorted(found)},
    f"All processes must read the same directory; this one reads {directory}.",
  )
  if not found:
    missing = steps.describe_missing(directory)
    raise ValueError(f"no checkpoint in {directory}: {missing}")
  if step is not None and step not in found:
    raise ValueError(
      f"no checkpoint of step {step} in {directory}; there are {sorted(found)}."
    )
  failures: dict[int, str] = {}
  while remaining := found.keys() - failures.keys():
    number = max(remaining) if step is None else step
    try:
      return number, read_step(found[number])
    except Exception as e:
      error = _find_damage(found[number], e)
      if error is None:
        raise
      failures[number] = str(error)
      if damaged is not None:
        damaged.add(number)
      if step is not None:
        raise error from e
      _log.warning("step %d is damaged, passed over: %s", number, error)
    # All processes must read the same step, so they list the steps once.
    if jax.process_count() == 1:
      found = list_steps()
  raise ValueError(
    f"{directory} has no checkpoint that is complete: "
    + " ".join(failures.values())
  )


def _find_damage(where: Any, error: Exception) -> digests.Damaged | None:
  """Returns the damage of a step that caused an error, if there is any.

  Another program may delete a step while it is read, file by file: what Orbax
  then raises depends on the file.
  """
  if isinstance(error, digests.Damaged):
    return error
  # The processes of one program may see different moments of it. If this
  # process cannot read the files, the first error says why.
  if jax.process_count() == 1:
    with contextlib.suppress(OSError):
      try:
        digests.verify(where, contents=False)
      except digests.Damaged as e:
        return e
  return None
