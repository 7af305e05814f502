"""The user's source line of something that was traced."""

from __future__ import annotations

from collections.abc import Iterable
import os
import re
from typing import Any

# Frames in these packages are not the user's. The models of this package count
# as the user's: a line in them says more than the line that calls the model.
_LIBRARIES = frozenset(
  "chex contextlib.py flax flaxshard functools.py jax jaxlib optax".split()
)
_ROOT = os.path.dirname(os.path.dirname(__file__)) + "/"


def equation_line(eqn: Any) -> str:
  """Returns where the user's code made an equation of a jaxpr, or "".

  Args:
    eqn: An equation of a traced program.

  Returns:
    File and line, as `user_line` returns them.
  """
  traceback = eqn.source_info.traceback
  if traceback is None:
    return ""
  return user_line((f.file_name, f.line_num) for f in traceback.frames)


def user_line(frames: Iterable[tuple[str, int]]) -> str:
  """Returns the user's line of a traceback, or "".

  This is the innermost frame outside of JAX, Flax, Optax and flaxshard. What
  only they made has the innermost frame outside of JAX.

  Args:
    frames: Files and lines, innermost first.

  Returns:
    File and line, such as `models/mlp.py:12`. The file's path is relative to
    the current directory if the file is in it; else only its name.
  """
  fallback = ""
  for file, line in frames:
    package = _package(file)
    if package not in _LIBRARIES:
      return _show(file, line)
    if not fallback and package not in ("jax", "jaxlib"):
      fallback = _show(file, line)
  return fallback


def _package(file: str) -> str:
  """Returns the installed package that a file belongs to, or its own name."""
  if "/flaxshard/models/" in file:
    return "models"
  if file.startswith(_ROOT):  # an editable install
    return "flaxshard"
  found = re.search(r"(?:site|dist)-packages/([^/]+)", file)
  return found[1] if found else os.path.basename(file)


def _show(file: str, line: int) -> str:
  here = os.getcwd() + "/"
  shown = file[len(here) :] if file.startswith(here) else os.path.basename(file)
  return f"{shown}:{line}"
