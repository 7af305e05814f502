"""Digests of a step's files: takes them, and compares the files with them.

Orbax has no checksum of its data: it returns wrong values for a flipped bit. So
`metadata_item` writes the size and the crc32 of every file into a step when it
is saved. In a bucket, which has checksums of its own, only sizes are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
import json
import logging
import os
from typing import Any
import zlib

from etils import epath
import jax

from flaxshard.checkpoint import step_names
from flaxshard.core import multihost

_log = logging.getLogger(__name__)

ITEM = "flaxshard"
DIGESTS = "digests.json"
METADATA = "metadata"  # what wrote the step; it names the step
STEP_METADATA = "_CHECKPOINT_METADATA"  # Orbax's file of a step's items

_CHUNK_BYTES = 1 << 20
_THREADS = 4

# Size and crc32 of a file; None if only the size was recorded.
Digest = list[int | None]

# Errors of a file that is not what was saved. Others, such as too many open
# files or no permission, say nothing of the file, and are raised as they are.
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class Damaged(ValueError):
  """A step differs from what was saved; the message names the file."""


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the object in a JSON file.

  Args:
    path: Path of the file.

  Raises:
    Damaged: The file is missing, or is not a JSON object.
    OSError: This process cannot read the file.
  """
  text = read_bytes(path)
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as e:  # the latter if nested too deep
    raise Damaged(f"{path} is not JSON: {e}.") from e
  if not isinstance(value, dict):
    raise Damaged(f"{path} is not a JSON object.")
  return value


def read_bytes(path: str | os.PathLike[str]) -> bytes:
  """Returns the content of a file.

  Args:
    path: Path of the file.

  Raises:
    Damaged: The file is missing.
    OSError: This process cannot read the file.
  """
  try:
    return bytes(epath.Path(path).read_bytes())
  except _MISSING as e:
    raise Damaged(f"{path} is missing.") from e


def is_empty(step_dir: str | os.PathLike[str]) -> bool:
  """Returns whether the directory of a step exists and is empty.

  A process that is killed while it deletes a step can leave one behind.
  """
  path = epath.Path(step_dir)
  return path.is_dir() and not any(path.iterdir())


def other_step(step_dir: str | os.PathLike[str]) -> int | None:
  """Returns the step that was saved, if a directory is named after another.

  Such a directory was copied or renamed. The position of the data, the metrics
  and a schedule are then those of another step than the name says.

  Args:
    step_dir: Path of the directory of the step.

  Raises:
    Damaged: The metadata of the step cannot be read.
  """
  where = step_names.as_path(step_dir)
  path = where / ITEM / METADATA
  match = step_names.ANY.fullmatch(where.name)
  if match is None or not path.exists():
    return None
  number = int(match[1])
  saved = read_json(path).get("step", number)
  return saved if saved != number else None


def verify(
  step_dir: str | os.PathLike[str],
  part: int = 0,
  parts: int = 1,
  *,
  contents: bool = True,
) -> bool:
  """Compares the files of a step with their digests.

  Orbax's marks `commit_success.txt` of the step and of the item `flaxshard` are
  not compared: nothing is read from them.

  Args:
    step_dir: Path of the directory of the step.
    part: Index of the part of the files to compare, for several processes.
    parts: Number of parts that the files are divided into.
    contents: Whether to read the files; otherwise only sizes are compared.

  Returns:
    False for a step without digests: one of a plain Flax program, or one that
    was saved with `digests=False` or in a bucket, of which only the sizes are
    compared.

  Raises:
    Damaged: A file or an item is missing, or a file differs from what was
      saved, or the step is empty; the message names the first such file. Or the
      directory was saved as another step.
    OSError: This process cannot read a file.

  Example:
    >>> import pathlib, tempfile
    >>> step = pathlib.Path(tempfile.mkdtemp()) / "3"
    >>> (step / "default").mkdir(parents=True)
    >>> verify(step)  # a step without digests
    False
  """
  where = step_names.as_path(step_dir)
  if where.is_file():
    return False  # Flax writes a state as one file
  if not where.is_dir():
    raise Damaged(f"{where} is missing, or no directory.")
  if is_empty(where):
    raise Damaged(f"{where} is empty.")
  step_metadata = _check_items(where)
  if not (where / ITEM).is_dir():
    _log.info("%s has no digests: it is read without a check", where)
    return False
  path = where / ITEM / DIGESTS
  digests = read_json(path)
  if digests.get("crc32") != crc_of_digests(digests):
    raise Damaged(f"{path} is not what was written: its own crc32 differs.")
  # Orbax adds the time of the commit after the digests are taken.
  for key, value in (digests["step_metadata"] or {}).items():
    if key not in step_metadata or step_metadata[key] != value:
      path = where / STEP_METADATA
      raise Damaged(f"{path} is missing, or is not what was written.")
  names = sorted(digests["files"])[part::parts]

  def find_damage(name: str) -> str | None:
    size, crc = digests["files"][name]
    return _find_damage(where / name, size, crc, contents)

  with futures.ThreadPoolExecutor(_THREADS) as pool:
    damages = [d for d in pool.map(find_damage, names) if d]
  if damages:
    others = len(damages) - 1
    more = f" ({others} more files are damaged)" if others else ""
    raise Damaged(f"{damages[0]}{more}.")
  saved_step = other_step(where)
  if saved_step is not None:
    raise Damaged(
      f"{where} was saved as step {saved_step}: it was copied or renamed. "
      f"Give it the name {saved_step} to restore it."
    )
  # All processes must agree, so this does not depend on the part.
  return all(crc is not None for _, crc in digests["files"].values())


def _check_items(where: step_names.Directory) -> dict[str, Any]:
  """Returns Orbax's metadata of a step; empty if it has none.

  Raises:
    Damaged: An item is missing that the metadata list.
  """
  path = where / STEP_METADATA
  if not path.exists():
    return {}
  step_metadata = read_json(path)
  items = step_metadata.get("item_handlers")
  for item in sorted(items) if isinstance(items, dict) else ():
    if not (where / item).is_dir():
      raise Damaged(f"{where / item} is missing; {STEP_METADATA} has it.")
  return step_metadata


def verify_together(step_dir: str | os.PathLike[str]) -> bool:
  """Verifies a step, each process a part of it, with one result for all.

  Args:
    step_dir: Path of the directory of the step.

  Returns:
    As `verify`.

  Raises:
    Damaged: As `verify`, with the number of the process that found the damage.
  """
  with multihost.raise_on_all_processes(Damaged, OSError, ValueError):
    verified = verify(step_dir, jax.process_index(), jax.process_count())
  return verified


def set_aside(step_dir: str) -> str:
  """Renames a damaged step, so that the step can be saved again.

  Args:
    step_dir: Path of the directory of the step.

  Returns:
    The new path, such as `300.damaged`.
  """
  new_path = f"{step_dir}.damaged"
  epath.Path(step_dir).rename(new_path)
  return new_path


def crc_of_digests(digests: Mapping[str, Any]) -> int:
  """Returns the crc32 of the content of `digests.json`.

  Args:
    digests: The content, with or without its own crc32.
  """
  rest = {key: value for key, value in digests.items() if key != "crc32"}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def take(paths: Mapping[str, str], *, contents: bool) -> dict[str, Digest]:
  """Returns the size and the crc32 of files.

  Args:
    paths: Paths of the files, by name.
    contents: Whether to read them; otherwise the crc32 is None.
  """

  def digest(path: str) -> Digest:
    if contents:
      return _digest(path)
    return [epath.Path(path).stat().length, None]

  # crc32 releases the GIL, so threads speed it up.
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return dict(zip(paths, pool.map(digest, paths.values()), strict=True))


def _digest(path: str | os.PathLike[str]) -> Digest:
  """Returns the size and the crc32 of a file."""
  size, crc = 0, 0
  with epath.Path(path).open("rb") as f:
    while chunk := f.read(_CHUNK_BYTES):
      crc = zlib.crc32(chunk, crc)
      size += len(chunk)
  return [size, crc]


def _find_damage(
  path: step_names.Directory, size: int, crc: int | None, contents: bool
) -> str | None:
  """Returns how a file differs from its digest; None if it does not."""
  try:
    found_size = epath.Path(path).stat().length
    if found_size != size:
      return f"{path} has {found_size:,} bytes, {size:,} were written"
    if contents and crc is not None:
      found_crc = _digest(path)[1]
      if found_crc != crc:
        return f"{path} has crc32 {found_crc:08x}, {crc:08x} was written"
  except _MISSING:
    return f"{path} is missing"
  return None
