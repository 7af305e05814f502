"""Lists the steps in a directory of checkpoints, and which are damaged."""

from __future__ import annotations

from collections.abc import Iterable
import logging
import os

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import policies
from flaxshard.checkpoint import readable_steps
from flaxshard.checkpoint import step_names
from flaxshard.core import files

_log = logging.getLogger(__name__)


class SavedSteps:
  """The steps in a directory.

  Args:
    directory: Path of the directory of the steps.

  Attributes:
    names: Finds the steps for Orbax's manager.
    damaged: The numbers of the steps that are known to be damaged.
  """

  def __init__(self, directory: str):
    self._directory = directory
    self.names = readable_steps.ReadableSteps(directory)
    self.damaged: set[int] = set()

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

  def has_unknown(self, found: Iterable[int]) -> bool:
    """Returns whether there is a step that is not known, nor damaged.

    Args:
      found: The steps that Orbax's manager has found.
    """
    known = {*found, *self.damaged}
    there = step_names.steps(self._directory, step_names.OURS)
    return not there.keys() <= known

  def note_damaged(self, found: Iterable[int]) -> None:
    """Notes the steps whose damage is visible without reading them.

    Args:
      found: The steps that Orbax's manager has just found.
    """
    self.damaged |= self.names.left_out | {
      step for step in found if digests.is_empty(self.path(step))
    }

  def set_aside_damaged(
    self, new_step: int, policy: policies.KeepUndeletable
  ) -> None:
    """Renames the directories of damaged steps; nothing is deleted.

    Args:
      new_step: The step to save.
      policy: Notes the steps that cannot be renamed.

    Raises:
      OSError: A step that is not older than the new one cannot be renamed.
    """
    for step in sorted(self.damaged - policy.undeletable):
      path = self.path(step)
      if not files.lexists(path):
        continue
      try:
        new_path = digests.set_aside(path)
      except OSError as e:
        if step >= new_step:
          raise
        policy.keep(step, e.strerror or str(e))
      else:
        _log.warning("%s is damaged: renamed to %s", path, new_path)

  def forget_renamed(self) -> None:
    """Forgets the damaged steps that are no longer there."""
    # Flax's checkpoints have other names, which Orbax does not find.
    self.damaged &= {
      *step_names.steps(self._directory, step_names.FLAX),
      *(step for step in self.damaged if files.lexists(self.path(step))),
    }
