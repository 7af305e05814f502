"""Names of the directories and files that hold a step."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from etils import epath

from flaxshard.core import files

# An epath.Path, for whose methods there are no types.
Directory = Any

# A manager may use a prefix and leading zeros.
ANY = re.compile(r"(?:[A-Za-z]\w*[_-])?(\d+)(?:\.flax)?")
FLAX = re.compile(r"checkpoint_(\d+)")
OURS = re.compile(r"(0|[1-9]\d*)", re.ASCII)

# A bucket cannot rename a step once it is complete: it has its final name from
# the start, and Orbax writes this file into it last.
COMMIT_MARK = "commit_success.txt"


def as_path(path: Any) -> Directory:
  """Returns an absolute path, on a file system or in a bucket."""
  return epath.Path(files.absolute(path))  # Orbax takes only absolute paths


def steps(
  directory: Directory, names: re.Pattern[str] = ANY
) -> dict[int, Directory]:
  """Returns the path of each step in a directory, in ascending order.

  Only the names of entries are looked at. `7` precedes `checkpoint_7`. In a
  bucket, a step of `Checkpointer` that is not complete is left out.

  Args:
    directory: The directory to list.
    names: The names that count as steps: `ANY`, `FLAX` or `OURS`.
  """
  found: dict[int, Directory] = {}
  directory = as_path(directory)
  entries: list[Directory] = []
  if directory.is_dir():
    # Another process may have deleted it meanwhile.
    with contextlib.suppress(FileNotFoundError):
      entries = sorted(directory.iterdir())
  for path in entries:
    match = names.fullmatch(path.name)
    if match is None or _is_unfinished(path):
      continue
    found.setdefault(int(match[1]), path)
  return dict(sorted(found.items()))


def _is_unfinished(path: Directory) -> bool:
  is_ours = files.is_bucket(path) and OURS.fullmatch(path.name)
  return bool(is_ours) and not is_complete(path)


def is_complete(step_dir: files.Path) -> bool:
  """Returns whether the directory of a step exists and is no unfinished save.

  Args:
    step_dir: Path of the directory with the final name.
  """
  if files.is_bucket(step_dir):
    return epath.Path(os.path.join(step_dir, COMMIT_MARK)).exists()
  return os.path.isdir(step_dir)
