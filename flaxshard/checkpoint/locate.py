"""Finds the steps below a path that a user gives."""

from __future__ import annotations

import difflib
import os
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
  """Returns why a path has no steps, and which similar path there is.

  Args:
    path: A path without steps.

  Example:
    >>> import pathlib, tempfile
    >>> runs = pathlib.Path(tempfile.mkdtemp())
    >>> (runs / "digits").mkdir()
    >>> describe_missing(runs / "digitz").replace(str(runs), "runs")
    "there is no such path. Did you mean 'runs/digits'?"
    >>> describe_missing(runs / "digits")
    'it has no steps: it is empty.'
  """
  directory = step_names.as_path(path)
  if not directory.exists():
    if os.path.islink(directory):
      return "it is a link that leads nowhere."
    return f"there is no such path.{_suggest_path(directory)}"
  if not directory.is_dir():
    return "it is a file, not a directory of steps."
  if reader.is_step(directory):
    number = step_of(directory)
    name = "one checkpoint" if number is None else f"step {number}"
    return f"it is {name}: flaxshard.checkpoint.restore(path, state) reads it."
  names = sorted(p.name for p in directory.iterdir())
  if not names:
    return "it has no steps: it is empty."
  others = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
  hints = [
    repr(str(child)) for child in directory.iterdir() if _has_steps(child)
  ]
  hint = f" Did you mean {' or '.join(sorted(hints)[:2])}?" if hints else ""
  return (
    f"it has no steps, only {', '.join(names[:_LISTED])}{others}. The "
    f"directory of a step is called 1200 or checkpoint_1200.{hint}"
  )


def _has_steps(path: Any) -> bool:
  """Returns whether a path is a step, a directory of steps or a workdir."""
  try:
    steps = step_names.steps(directory_of_steps(path))
    return bool(steps) or step_of(path) is not None
  except OSError:
    return False  # no permission to list it


def _suggest_path(missing: Any) -> str:
  """Returns a hint at an existing path like one that does not exist."""
  parent = missing.parent
  while not parent.is_dir() and parent != parent.parent:
    missing, parent = parent, parent.parent
  try:
    names = [p.name for p in parent.iterdir()]
  except OSError:
    return ""  # no permission to list it
  similar = difflib.get_close_matches(missing.name, names, n=2)
  if not similar:
    return ""
  return f" Did you mean {' or '.join(repr(str(parent / s)) for s in similar)}?"
