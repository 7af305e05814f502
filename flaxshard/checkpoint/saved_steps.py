"""Lists the steps in a directory, and which of them are damaged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
import logging
import math
import os
from typing import Any

from etils import epath
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import policies
from flaxshard.checkpoint import step_names

_log = logging.getLogger(__name__)

METRICS = "metrics"  # Orbax's name of the item and of the file in it


class SavedSteps:
  """The steps in a directory, with Orbax's standard names.

  As the `step_name_format` of Orbax's manager it leaves out steps that the
  manager cannot read: it reads the metrics and the metadata of all steps when
  it is created, and raises without naming the file if one is damaged. Empty
  steps, and those that were copied or renamed, are left out too.

  Args:
    directory: Path of the directory of the steps.

  Attributes:
    damaged: The numbers of the steps that are known to be damaged.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self._names = ocp.path.step.standard_name_format()
    self.damaged: set[int] = set()

  def build_name(self, step: int) -> str:
    """Returns the name of the directory of a step."""
    return self._names.build_name(step)

  def find_step(self, base_path: Any, step: int) -> Any:
    """Returns Orbax's record of a step."""
    return self._names.find_step(base_path, step)

  def find_all(self, base_path: Any) -> Iterator[Any]:
    """Returns Orbax's records of the readable steps; notes the damaged ones."""
    there = step_names.steps(self._directory, step_names.OURS)
    flax = step_names.steps(self._directory, step_names.FLAX)
    unreadable = {n for n, path in there.items() if _is_unreadable(path)}
    # Those that were renamed are no longer there.
    self.damaged = (self.damaged & {*there, *flax}) | unreadable
    found = self._names.find_all(base_path)
    return (step for step in found if step.step not in unreadable)

  def path(self, step: int) -> str:
    """Returns the path of the directory of a step."""
    return os.path.join(self._directory, str(step))

  def paths(self, found: Iterable[int]) -> dict[int, str]:
    """Returns the path of each step, the damaged ones and Flax's included.

    Args:
      found: The steps that Orbax's manager has found.
    """
    flax = step_names.steps(self._directory, step_names.FLAX)
    ours = {*found, *(self.damaged - set(flax))}
    return {step: str(path) for step, path in flax.items()} | {
      step: self.path(step) for step in ours
    }

  def set_aside_damaged(self) -> None:
    """Renames the directories of damaged steps; nothing is deleted.

    Raises:
      OSError: A step cannot be renamed.
    """
    for step in sorted(self.damaged):
      path = self.path(step)
      if epath.Path(path).exists():
        new_path = digests.set_aside(path)
        _log.warning("%s is damaged: renamed to %s", path, new_path)


def _is_unreadable(step_dir: step_names.Directory) -> bool:
  metadata_path = step_dir / digests.STEP_METADATA
  metrics_path = step_dir / METRICS / METRICS
  try:
    if metrics_path.exists():
      digests.read_json(metrics_path)
    if digests.is_empty(step_dir) or digests.other_step(step_dir) is not None:
      return True
    metadata = {}
    if metadata_path.exists():
      metadata = digests.read_json(metadata_path)
  except digests.Damaged:
    return step_dir.exists()  # or it was just deleted
  # The handlers by item, or the only one; None in a step of an older Orbax.
  handlers = metadata.get("item_handlers")
  return not isinstance(handlers, (dict, str, type(None)))


def best_step(
  directory: str | os.PathLike[str],
  metric: str,
  mode: str,
  damaged: Collection[int] = (),
) -> int | None:
  """Returns the step with the best metric, the latest of equal ones.

  Nothing is written or locked: the run may be in progress.

  Args:
    directory: Path of a directory of steps, or of a workdir.
    metric: Name of the metric, as it was given to `Checkpointer.save`.
    mode: `"max"` if higher values of the metric are better, or `"min"`.
    damaged: The steps that are known to be damaged.

  Returns:
    The step; None if no step has a finite value of the metric.

  Example:
    >>> best_step("/tmp/digits", "eval_loss", "min")  # doctest: +SKIP
    600
  """
  ranks: dict[float, int] = {}
  where = locate.directory_of_steps(directory)
  for step, path in step_names.steps(where, step_names.OURS).items():
    file = path / METRICS / METRICS
    try:
      # A step that was copied from another one has the metrics of that.
      is_ranked = step not in damaged and file.exists()
      if is_ranked and digests.other_step(path) is None:
        ranks[policies.rank(digests.read_json(file), metric, mode)] = step
    except digests.Damaged as e:
      _log.warning("step %d is damaged, passed over: %s", step, e)
  ranks.pop(-math.inf, None)
  return ranks[max(ranks)] if ranks else None
