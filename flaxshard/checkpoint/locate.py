"""Finds the steps below a path that a user gives."""

from __future__ import annotations

import difflib
from typing import Any

from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_names

_CHECKPOINTS = "checkpoints"  # where a workdir has its steps

# Number of names that a message lists.
_LISTED = 5


def directory_of_steps(path: Any) -> step_names.Directory:
  """Returns the directory of steps: a path itself, or its `checkpoints`.

  Args:
    path: Path of a directory of steps, or of a workdir.
  """
  directory = step_names.as_path(path)
  in_workdir = directory / _CHECKPOINTS
  if not step_names.steps(directory) and in_workdir.is_dir():
    return in_workdir
  return directory


def step_of(path: Any) -> int | None:
  """Returns the number of a step, if a path is one step, not several.

  Args:
    path: Path of a directory or a file. The name of a step of `Checkpointer` or
      `flax.training.checkpoints` has its number.
  """
  directory = step_names.as_path(path)
  match = step_names.FLAX.fullmatch(directory.name)
  is_number = directory.name.isdecimal()
  if not (match or is_number) or not reader.is_step(directory):
    return None
  return int(match[1] if match else directory.name)


def describe_missing(path: Any) -> str:
  """Returns why a path has no steps.

  Args:
    path: A path without steps.

  Example:
    >>> import pathlib, tempfile
    >>> runs = pathlib.Path(tempfile.mkdtemp())
    >>> (runs / "digits").mkdir()
    >>> describe_missing(runs / "digitz").endswith("/digits'?")
    True
    >>> describe_missing(runs / "digits")
    'it has no steps: it is empty.'
  """
  directory = step_names.as_path(path)
  if not directory.exists():
    parent = directory.parent
    names = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    near = difflib.get_close_matches(directory.name, names, n=1)
    hint = f" Did you mean {str(parent / near[0])!r}?" if near else ""
    return f"there is no such path.{hint}"
  if not directory.is_dir():
    return "it is a file, not a directory of steps."
  if reader.is_step(directory):
    return "it is a step: flaxshard.checkpoint.restore(path, state) reads it."
  names = sorted(p.name for p in directory.iterdir())
  if not names:
    return "it has no steps: it is empty."
  others = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
  return f"it has no steps, only {', '.join(names[:_LISTED])}{others}."
