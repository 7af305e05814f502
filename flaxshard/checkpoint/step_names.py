"""Finds the steps in a directory, for an Orbax manager."""

from __future__ import annotations

from collections.abc import Iterator
import os
from typing import Any

import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests

METRICS = "metrics"  # Orbax's name of the item and of the file in it


class ReadableSteps:
  """Orbax's standard step names, without steps whose metrics are damaged.

  Orbax's manager reads the metrics of all steps when it is created, and raises
  if one of them cannot be read.

  Attributes:
    left_out: The steps that the last `find_all` left out.
  """

  def __init__(self) -> None:
    self._names = ocp.path.step.standard_name_format()
    self.left_out: set[int] = set()

  def build_name(self, step: int) -> str:
    """Returns the name of the directory of a step."""
    return self._names.build_name(step)

  def find_all(self, base_path: Any) -> Iterator[Any]:
    """Returns Orbax's records of the readable steps in a directory."""
    self.left_out = _damaged_metrics(base_path)
    found = self._names.find_all(base_path)
    return (step for step in found if step.step not in self.left_out)

  def find_step(self, base_path: Any, step: int) -> Any:
    """Returns Orbax's record of a step."""
    return self._names.find_step(base_path, step)


def _damaged_metrics(directory: str | os.PathLike[str]) -> set[int]:
  """Returns the steps in a directory whose metrics are not a JSON object."""
  steps = set()
  for name in os.listdir(directory):
    path = os.path.join(directory, name, METRICS, METRICS)
    if name.isdecimal() and os.path.exists(path):
      try:
        digests.read_json(path)
      except digests.Damaged:
        steps.add(int(name))
  return steps
