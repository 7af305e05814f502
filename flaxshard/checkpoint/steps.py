"""The steps of a directory: finds them, and reads the newest whole one.

run/checkpoints/1200/default/   an item of a step of an Orbax manager
                checkpoint_7    a step of `flax.training.checkpoints`
                ckpt-3.flax     one of clu
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import logging
import re
import sys
import time
from typing import Any, TypeVar

from etils import epath
import jax
import numpy as np

from flaxshard.checkpoint import step_files
from flaxshard.checkpoint.step_files import Directory
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

# The names of the steps of `Checkpointer`, and of Flax.
OURS = re.compile(r"(?:checkpoint_)?(0|[1-9]\d*)", re.ASCII)

_CHECKPOINTS = "checkpoints"  # where a workdir has its steps

# A step that another program is deleting is gone after so many seconds.
_DELETION_SECONDS = 0.5


def as_path(path: files.Path) -> Directory:
  """Returns an absolute path, on a file system or in a bucket."""
  return epath.Path(files.absolute(path))  # Orbax takes only absolute paths


def find(
  directory: Directory, names: re.Pattern[str] = step_files.NAME
) -> dict[int, Directory]:
  """Returns the path of each complete step in a directory, in their order.

  A file whose name is a number is no step, as for Orbax's managers. `7`
  precedes `checkpoint_7`.

  Args:
    directory: The directory to list.
    names: The names that count as steps: `step_files.NAME` or `OURS`.
  """
  found: dict[int, Directory] = {}
  for name in sorted(step_files.names_in(directory)):
    match, where = names.fullmatch(name), directory / name
    if match and (not name.isdigit() or step_files.is_complete(where)):
      found.setdefault(int(match[1]), where)
  return dict(sorted(found.items()))


def is_step(path: Directory) -> bool:
  """Returns whether a path is one checkpoint, not a directory of several."""
  # Beside its steps, a directory may have what this process cannot read.
  with contextlib.suppress(PermissionError):
    trees = step_files.trees_in(path)
    has_items = any(not step_files.NAME.fullmatch(name) for name in trees)
    return path.is_file() or has_items
  return False


def number_of(path: Directory) -> int | None:
  """Returns the number of a step, if a path is one step, not several."""
  match = OURS.fullmatch(path.name)
  return int(match[1]) if match and is_step(path) else None


def directory_of_steps(path: Directory) -> Directory:
  """Returns a directory of steps: a path itself, or that of a workdir."""
  in_workdir = path / _CHECKPOINTS
  # A workdir may have more whose name could be that of a step: slurm-1234.
  if in_workdir.is_dir() and (find(in_workdir) or not find(path, OURS)):
    return in_workdir
  return path


def no_steps(path: Directory) -> ValueError:
  """Returns the error of a path that has no steps; it says why."""
  why = "it has no steps"
  if not path.exists():
    why = "there is no such path"
  elif is_step(path):
    why = "it is a file or a step, not a directory of steps"
  return ValueError(f"no checkpoint in {path}: {why}.")


def look(directory: Directory) -> tuple[dict[int, Directory], set[int]]:
  """Returns the path of each step, and which steps are visibly damaged.

  They are the steps of `Checkpointer` and of `flax.training.checkpoints`.

  Args:
    directory: Path of the directory of the steps.
  """
  found, damaged = find(directory, OURS), set()
  for number, path in found.items():
    try:
      step_files.check(path)
    except step_files.Damaged:
      damaged.add(number)
  return found, damaged


def read(
  path: files.Path, step: int | None, read_step: Callable[[Directory], _T]
) -> tuple[Any, _T]:
  """Reads the step at a path, or the newest of a directory that is not damaged.

  Args:
    path: A step, a directory of steps, or a workdir.
    step: The only step to read; None means the newest.
    read_step: Reads the step at a path, or raises `Damaged`.

  Returns:
    The number of the step, None for a file without one, and what `read_step`
    returned.

  Raises:
    ValueError: See `read_newest`.
  """
  where = as_path(path)
  number = number_of(where)
  if is_step(where) and step in (None, number):
    return number, read_step(where)
  directory = directory_of_steps(where)
  return read_newest(
    directory, step, read_step, lambda: find(directory), damaged=set()
  )


def read_newest(
  directory: Directory,
  step: int | None,
  read_step: Callable[[Directory], _T],
  list_steps: Callable[[], Mapping[int, Directory]],
  damaged: set[int],
) -> tuple[int, _T]:
  """Reads a step of a directory, or the newest one that is not damaged.

  Another program may save in the directory at the same time, and delete steps
  that are being read. Then the steps are listed again.

  Args:
    directory: The directory of the steps, for error messages.
    step: As for `read`.
    read_step: As for `read`.
    list_steps: Returns the path of each step.
    damaged: Gets the numbers of the steps that were found to be damaged.

  Returns:
    The number of the step, and what `read_step` returned.

  Raises:
    ValueError: There is no such step, or it is damaged, or all are, or the
      processes find different steps.
  """
  if step is not None:
    # An array too, such as `state.step`.
    step = checks.integer("step", np.asarray(step).item(), maximum=sys.maxsize)
  found = list_steps()
  multihost.check_agreement(
    {"the steps that they find": sorted(found)},
    f"All processes must read the same directory; this one reads {directory}.",
  )
  if not found:
    raise no_steps(directory)
  if step is not None and step not in found:
    raise ValueError(
      f"no checkpoint of step {step} in {directory}; there are {sorted(found)}."
    )
  failures: dict[int, str] = {}
  while remaining := found.keys() - failures.keys():
    number = max(remaining) if step is None else step
    try:
      return number, read_step(found[number])
    except Exception as e:
      error = find_damage(found[number], e)
      if error is None:
        raise
      failures[number] = str(error)
      damaged.add(number)
      if step is not None:
        raise error from e
      _log.warning("step %d is damaged, passed over: %s", number, error)
    # All processes must read the same step, so they list the steps once.
    if jax.process_count() == 1:
      found = list_steps()
  raise ValueError(
    f"{directory} has no checkpoint that is complete: "
    + " ".join(failures.values())
  )


def find_damage(where: Any, error: Exception) -> step_files.Damaged | None:
  """Returns the damage of a step that caused an error, if there is any.

  Another program may delete a step while it is read, file by file: what Orbax
  then raises depends on the file. So a step that lacks files, or has no digests
  that say so, is looked at again once it would be gone.

  Args:
    where: Path of the directory of the step, or of its file.
    error: What reading it raised.
  """
  damage = error if isinstance(error, step_files.Damaged) else None
  # The processes of one program may see different moments of a deletion.
  if jax.process_count() > 1:
    return damage
  # If this process cannot read the files, the first error says why.
  with contextlib.suppress(OSError, step_files.Damaged):
    if step_files.verify(where, contents=False):
      return damage
  time.sleep(_DELETION_SECONDS)
  with contextlib.suppress(OSError):
    try:
      step_files.verify(where, contents=False)
    except step_files.Damaged as e:
      return e
  return damage
