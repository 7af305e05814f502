"""Finds the steps in a directory, and the items of a step, by their names.

run/checkpoints/1200/default/   an item of a step of an Orbax manager
                checkpoint_7    a step of `flax.training.checkpoints`
                ckpt-3.flax     one of clu
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from etils import epath

from flaxshard.core import checks
from flaxshard.core import files

# An epath.Path, for whose methods there are no types.
Directory = Any

# A manager may use a prefix and leading zeros.
ANY = re.compile(r"(?:[A-Za-z]\w*[_-])?(\d+)(?:\.flax)?", re.ASCII)
# Those of `Checkpointer`, and of Flax.
OURS = re.compile(r"(?:checkpoint_)?(0|[1-9]\d*)", re.ASCII)

# The items of a step. Without one called `state`, Orbax v1 takes the first for
# the train state, so the others sort after `default`.
PLAIN = ("default", "state", "pytree")  # the train state, by any program
WRAPPERS = "wrappers"
FLAXSHARD = "flaxshard"  # what wrote the step, and its digests
POSITION = "input_iterator"  # where the data stands
METRICS = "metrics"  # Orbax's name of the item and of the file in it

# A bucket cannot rename a step once it is complete: it has its final name from
# the start, and Orbax writes this file into it last.
COMMIT_MARK = "commit_success.txt"
# Elsewhere, a step has this after its number until it is complete.
UNFINISHED = ".orbax-checkpoint-tmp"

_TREE_METADATA = "_METADATA"  # Orbax's file in each tree of arrays
_CHECKPOINTS = "checkpoints"  # where a workdir has its steps


def as_path(path: Any) -> Directory:
  """Returns an absolute path, on a file system or in a bucket."""
  return epath.Path(files.absolute(path))  # Orbax takes only absolute paths


def find(directory: Any, names: re.Pattern[str] = ANY) -> dict[int, Directory]:
  """Returns the path of each complete step in a directory, in their order.

  Only the names of entries are looked at. `7` precedes `checkpoint_7`.

  Args:
    directory: The directory to list.
    names: The names that count as steps: `ANY` or `OURS`.
  """
  directory = as_path(directory)
  entries: list[Directory] = []
  if directory.is_dir():
    # Another process may have deleted it meanwhile.
    with contextlib.suppress(FileNotFoundError):
      entries = sorted(directory.iterdir())
  found: dict[int, Directory] = {}
  for path in entries:
    match = names.fullmatch(path.name)
    may_be_unfinished = files.is_bucket(path) and path.name.isdigit()
    if match and (not may_be_unfinished or is_complete(path)):
      found.setdefault(int(match[1]), path)
  return dict(sorted(found.items()))


def is_complete(step_dir: files.Path) -> bool:
  """Returns whether the directory of a step exists and is no unfinished save.

  Args:
    step_dir: Path of the directory with the final name.
  """
  if files.is_bucket(step_dir):
    return epath.Path(os.path.join(step_dir, COMMIT_MARK)).exists()
  return os.path.isdir(step_dir)


def unfinished(directory: str, step: int) -> Directory:
  """Returns the path of a step of `Checkpointer` while it is written."""
  suffix = "" if files.is_bucket(directory) else UNFINISHED
  return epath.Path(os.path.join(directory, f"{step}{suffix}"))


def items(step_dir: Any) -> dict[str, Directory]:
  """Returns the path of each tree that Orbax wrote into a step, by name."""
  where = as_path(step_dir)
  entries = sorted(where.iterdir()) if where.is_dir() else []
  return {path.name: path for path in entries if is_tree(path)}


def is_tree(path: Directory) -> bool:
  """Returns whether a directory is a tree that Orbax wrote."""
  return bool((path / _TREE_METADATA).exists())


def is_step(path: Any) -> bool:
  """Returns whether a path is one checkpoint, not a directory of several."""
  path = as_path(path)
  if path.is_file() or is_tree(path):
    return True
  return any(not ANY.fullmatch(name) for name in items(path))


def number_of(path: Any) -> int | None:
  """Returns the number of a step, if a path is one step, not several."""
  path = as_path(path)
  match = OURS.fullmatch(path.name)
  return int(match[1]) if match and is_step(path) else None


def directory_of_steps(path: Any) -> Directory:
  """Returns a directory of steps: a path itself, or that of a workdir."""
  directory = as_path(path)
  in_workdir = directory / _CHECKPOINTS
  if not find(directory) and in_workdir.is_dir():
    return in_workdir
  return directory


def describe_missing(path: Any) -> str:
  """Returns why a path has no steps.

  Args:
    path: A path without steps.

  Example:
    >>> import pathlib, tempfile
    >>> runs = pathlib.Path(tempfile.mkdtemp())
    >>> (runs / "digits").mkdir()
    >>> describe_missing(runs / "digitz")
    "there is no such path. Did you mean 'digits'?"
    >>> describe_missing(runs / "digits")
    'it has no steps.'
  """
  directory = as_path(path)
  if not directory.exists():
    parent = directory.parent
    names = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    hint = checks.did_you_mean(directory.name, names)
    return f"there is no such path.{hint}"
  if is_step(directory):
    return "it is a file or a step, not a directory of steps."
  return "it has no steps."
