"""Tracebacks of instructions: the tables at the head of a program's text."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import re

NAMES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclasses.dataclass(frozen=True)
class Frame:
  """One frame of a traceback at which an instruction was traced."""

  file: str
  function: str
  line: int


@dataclasses.dataclass(eq=False)
class Tables:
  """The tables of source locations.

  Attributes:
    rows: For each of `NAMES`, the text of its rows by number.
  """

  rows: dict[str, dict[int, str]]

  def frames(self, attributes: str) -> Iterator[Frame]:
    """Yields the frames of an instruction's traceback, innermost first.

    Args:
      attributes: The instruction's attributes.
    """
    if file := re.search(r'source_file="([^"]*)"', attributes):
      line = re.search(r"source_line=(\d+)", attributes)
      yield Frame(file[1], "", int(line[1]) if line else 0)
      return
    match = re.search(r"stack_frame_id=(\d+)", attributes)
    frame = int(match[1]) if match else 0
    for _ in self._stack_frames:  # a bound, should a frame be its own parent
      if frame not in self._stack_frames:
        return
      location, frame = self._stack_frames[frame]
      if location in self._locations:
        yield self._locations[location]

  @functools.cached_property
  def _stack_frames(self) -> dict[int, tuple[int, int]]:
    frames = {}
    for number, text in self.rows["StackFrames"].items():
      ids = _ids(text)
      frames[number] = (
        ids.get("file_location_id", 0),
        ids.get("parent_frame_id", 0),
      )
    # XLA prints the parent's number plus one: an outermost frame 1 names
    # itself.
    if any(parent == number for number, (_, parent) in frames.items()):
      frames = {k: (location, p - 1) for k, (location, p) in frames.items()}
    return frames

  @functools.cached_property
  def _locations(self) -> dict[int, Frame]:
    files = {k: v.strip('"') for k, v in self.rows["FileNames"].items()}
    names = {k: v.strip('"') for k, v in self.rows["FunctionNames"].items()}
    found = {}
    for number, text in self.rows["FileLocations"].items():
      ids = _ids(text)
      found[number] = Frame(
        files.get(ids.get("file_name_id", 0), ""),
        names.get(ids.get("function_name_id", 0), ""),
        ids.get("line", 0),
      )
    return found


def _ids(text: str) -> dict[str, int]:
  return {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", text)}
