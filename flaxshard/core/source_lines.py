"""The user's source line of something that was traced."""

from __future__ import annotations

from collections.abc import Iterable
import os
from typing import Any

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
    library = _library(file)
    if not library:
      return _show(file, line)
    if not fallback and library not in ("jax", "jaxlib"):
      fallback = _show(file, line)
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


def _show(file: str, line: int) -> str:
  here = os.getcwd() + "/"
  shown = file[len(here) :] if file.startswith(here) else os.path.basename(file)
  return f"{shown}:{line}"
