"""Finds the steps in a directory, for an Orbax manager."""

from __future__ import annotations

from collections.abc import Iterator
import os
from typing import Any

import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import s3
from flaxshard.checkpoint import step_names
from flaxshard.core import files

METRICS = "metrics"  # Orbax's name of the item and of the file in it


class ReadableSteps:
  """Orbax's standard step names, without steps that its manager cannot read.

  The manager reads the metrics and the metadata of all steps when it is
  created. If one of them is damaged, it raises without naming the file. Steps
  that were copied or renamed are left out too.

  Args:
    directory: Path of the directory of the steps.

  Attributes:
    left_out: The steps that the last `find_all` left out.
  """

  def __init__(self, directory: str) -> None:
    self._names = ocp.path.step.standard_name_format(
      atomicity_options=s3.atomicity(directory)
    )
    self.left_out: set[int] = set()

  def build_name(self, step: int) -> str:
    """Returns the name of the directory of a step."""
    return self._names.build_name(step)

  def find_all(self, base_path: Any) -> Iterator[Any]:
    """Returns Orbax's records of the readable steps in a directory."""
    self.left_out = _unreadable_steps(base_path)
    found = self._names.find_all(base_path)
    return (step for step in found if step.step not in self.left_out)

  def find_step(self, base_path: Any, step: int) -> Any:
    """Returns Orbax's record of a step."""
    return self._names.find_step(base_path, step)


def _unreadable_steps(directory: str | os.PathLike[str]) -> set[int]:
  """Returns the steps in a directory that Orbax's manager cannot read."""
  if not files.is_bucket(directory):
    os.listdir(directory)  # raises if it is gone: Orbax then keeps its list
  return {
    step
    for step, path in step_names.steps(directory, step_names.OURS).items()
    if _is_unreadable(os.fspath(path))
  }


def _is_unreadable(step_dir: str) -> bool:
  if not files.exists(step_dir):
    # A link that leads nowhere; otherwise it was just deleted.
    return os.path.islink(step_dir)
  metadata_path = os.path.join(step_dir, digests.STEP_METADATA)
  metrics_path = os.path.join(step_dir, METRICS, METRICS)
  try:
    if files.exists(metrics_path):
      digests.read_json(metrics_path)
    if digests.other_step(step_dir) is not None:
      return True  # its metrics are those of another step
    if not files.exists(metadata_path):
      return False
    metadata = digests.read_json(metadata_path)
  except digests.Damaged:
    return True
  # The handlers by item, or the only one; None in a step of an older Orbax.
  handlers = metadata.get("item_handlers")
  return not isinstance(handlers, (dict, str, type(None)))
