"""The user's source line of an instruction or an equation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import os
from typing import Any

from flaxshard.compiled import frames as frames_lib
from flaxshard.compiled import hlo

# Frames in these packages are not the user's. The models of this package count
# as the user's: a line in them says more than the line that calls the model.
_LIBRARIES = (
  "chex",
  "contextlib.py",
  "flax",
  "flaxshard",
  "functools.py",
  "jax",
  "jaxlib",
  "optax",
)

# How far to look for a name stack: a transfer between slices stands some
# instructions behind what made its operand.
_NAME_DISTANCE = 8
_NEIGHBORS = 8


def nearest_named(
  starts: Sequence[hlo.Instruction],
) -> hlo.Instruction | None:
  """Returns the nearest instruction that has a name stack, or None.

  The compiler drops the names of some instructions that it splits or adds.
  First the given instructions themselves are asked, then what makes their
  operands and what uses their results.
  """
  for start in starts:
    if start.op_name:
      return start
  for start in starts:
    behind, ahead = [start], [start]
    for _ in range(_NAME_DISTANCE):
      behind = [i for b in behind for i in b.operand_instructions][:_NEIGHBORS]
      ahead = [i for a in ahead for i in a.users][:_NEIGHBORS]
      for near in (*behind, *ahead):
        if near.op_name and near.opcode != "parameter":
          return near
  return None


def source_line(program: hlo.Program, instruction: hlo.Instruction) -> str:
  """Returns where the user's code made an instruction, or "".

  This is the innermost frame outside of JAX, Flax, Optax and flaxshard. An
  instruction that only they made has the innermost frame outside of JAX.

  Args:
    program: The program.
    instruction: One of its instructions.

  Returns:
    File and line, such as `models/mlp.py:12`. The file's path is relative to
    the current directory if the file is in it; else only its name.
  """
  return user_line(program.tables.frames(instruction.attributes))


def equation_line(eqn: Any) -> str:
  """Returns where the user's code made an equation of a jaxpr, or "".

  Args:
    eqn: An equation of a traced program.

  Returns:
    File and line, as `source_line` returns them.
  """
  traceback = eqn.source_info.traceback
  if traceback is None:
    return ""
  return user_line(
    frames_lib.Frame(frame.file_name, frame.function_name, frame.line_num)
    for frame in traceback.frames
  )


def user_line(frames: Iterable[frames_lib.Frame]) -> str:
  """Returns the user's line of a traceback, or ""; see `source_line`.

  Args:
    frames: The frames, innermost first.
  """
  fallback = ""
  for frame in frames:
    library = _library(frame.file)
    if not library:
      return _line(frame)
    if not fallback and library not in ("jax", "jaxlib"):
      fallback = _line(frame)
  return fallback


def _library(file: str) -> str:
  """Returns the library that a file belongs to, or "" for the user's."""
  parts = file.split("/")
  if parts[-3:-1] == ["flaxshard", "models"]:
    return ""
  for folder in ("site-packages", "dist-packages"):
    if folder in parts:
      package = parts[len(parts) - parts[::-1].index(folder)]
      return package if package in _LIBRARIES else ""
  if parts[-1] in _LIBRARIES:
    return parts[-1]
  # An editable install of this package.
  root = os.path.dirname(os.path.dirname(__file__))
  return "flaxshard" if file.startswith(root + "/") else ""


def _line(frame: frames_lib.Frame) -> str:
  here = os.getcwd() + "/"
  inside = frame.file.startswith(here)
  file = frame.file[len(here) :] if inside else os.path.basename(frame.file)
  return f"{file}:{frame.line}"
