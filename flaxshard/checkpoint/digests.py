"""Whether a step is what was saved; `own_item` writes what that is."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
import errno
import json
import logging
import os
from typing import Any
import zlib

import jax

from flaxshard.core import multihost

_log = logging.getLogger(__name__)

ITEM = "flaxshard"
DIGESTS = "digests.json"
STEP_METADATA = "_CHECKPOINT_METADATA"  # Orbax's own, of the step

# What a disk says of a file that is broken, where it sees it.
_DAMAGE = {errno.EIO, errno.EBADMSG, errno.ENODATA, errno.EISDIR, errno.ENOTDIR}
_CHUNK = 1 << 20
_THREADS = 4


class Damaged(ValueError):
  """A step is not what was saved; the message names the file."""


def read_json(path: str) -> dict[str, Any]:
  """Returns the object in a JSON file.

  Raises:
    Damaged: It is missing, or holds something else.
    ValueError: It is there, and this process cannot read it.
  """
  try:
    with open(path, "rb") as f:
      value = json.load(f)
  except OSError as e:
    raise Damaged(f"{_wrong(path, e)}.") from e
  except ValueError as e:
    raise Damaged(f"{path} is not JSON: {e}.") from e
  if not isinstance(value, dict):
    raise Damaged(f"{path} is not a JSON object.")
  return value


def is_empty(step_dir: str | os.PathLike[str]) -> bool:
  """Returns whether this is a directory, and nothing is in it."""
  return os.path.isdir(step_dir) and not os.listdir(step_dir)


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
    step_dir: The directory of the step.
    part: Which of the parts to compare, where several share the work.
    parts: Into how many parts the files are divided.
    contents: Whether to read the files; otherwise only their sizes count.

  Returns:
    False for a step without digests, such as a plain Flax program writes.

  Raises:
    Damaged: A file is missing, or is not what was saved, or the step is empty,
      or an item is missing that it had; the message names the first.
    ValueError: A file is there, and this process cannot read it.

  Example:
    >>> import pathlib, tempfile
    >>> step = pathlib.Path(tempfile.mkdtemp()) / "3"
    >>> (step / "default").mkdir(parents=True)
    >>> verify(step)  # a step of somebody else
    False
  """
  where = os.fspath(step_dir)
  try:
    return _verify(where, part, parts, contents)
  except OSError as e:
    raise Damaged(f"{_wrong(e.filename or where, e)}.") from e


def _verify(where: str, part: int, parts: int, contents: bool) -> bool:
  if os.path.isfile(where) or "://" in where:
    return False  # of Flax, which writes a state as a file; or in a bucket
  if not os.path.isdir(where):
    raise Damaged(f"{where} is missing, or no directory.")
  if is_empty(where):
    raise Damaged(f"{where} is empty.")
  step_metadata = os.path.join(where, STEP_METADATA)
  known = None
  if os.path.exists(step_metadata):
    known = read_json(step_metadata)
    items = known.get("item_handlers")
    for item in sorted(items) if isinstance(items, dict) else ():
      if not os.path.isdir(os.path.join(where, item)):
        raise Damaged(
          f"{os.path.join(where, item)} is missing; {STEP_METADATA} has it."
        )
  if not os.path.isdir(os.path.join(where, ITEM)):
    if known is None and _is_remnant(where):
      raise Damaged(
        f"{os.path.join(where, ITEM)} is missing, and {STEP_METADATA}, which "
        "later steps have: half deleted."
      )
    _log.info("%s has no digests: it is read without a check", where)
    return False
  digests = _read_digests(os.path.join(where, ITEM, DIGESTS))
  wanted = digests["step_metadata"]
  if wanted is not None:
    if known is None:
      raise Damaged(f"{step_metadata} is missing.")
    if any(key not in known or known[key] != wanted[key] for key in wanted):
      raise Damaged(f"{step_metadata} is not what was written.")
  names = sorted(digests["files"])[part::parts]
  files = {name: digests["files"][name] for name in names}
  wrong = _compare(where, files, contents)
  if wrong:
    more = f" ({len(wrong) - 1} more files are damaged)" if wrong[1:] else ""
    raise Damaged(f"{wrong[0]}{more}.")
  return True


def _is_remnant(where: str) -> bool:
  """Whether this is what a process left that was killed while it deleted.

  Orbax deletes in any order. Once the digests are gone, and its own list of the
  items, only the steps that were written since tell that there had been any.
  """
  folder, name = os.path.split(os.path.abspath(where))
  flat = os.path.exists(os.path.join(where, "_METADATA"))
  if flat or not name.isdecimal():
    return False  # no manager of ours has written it
  return any(
    other.isdecimal()
    and int(other) > int(name)
    and os.path.isdir(os.path.join(folder, other, ITEM))
    for other in os.listdir(folder)
  )


def verify_together(step_dir: str | os.PathLike[str]) -> bool:
  """Does `verify`, each process its part; all processes have the same answer.

  Raises:
    Damaged: As `verify`; where another process found it, with its number.
  """
  with multihost.raise_on_all_processes(Damaged, ValueError):
    verified = verify(step_dir, jax.process_index(), jax.process_count())
  return verified


def set_aside(step_dir: str) -> str:
  """Renames a directory, so that a step can be saved anew; returns the name."""
  aside = f"{step_dir}.damaged"
  count = 1
  while os.path.lexists(aside):
    count += 1
    aside = f"{step_dir}.damaged_{count}"
  os.rename(step_dir, aside)
  return aside


def _read_digests(path: str) -> dict[str, Any]:
  digests = read_json(path)
  if digests.get("crc32") != own_crc(digests):
    raise Damaged(f"{path} is not what was written: its own crc32 differs.")
  return digests


def own_crc(digests: Mapping[str, Any]) -> int:
  """Returns the crc32 of the digests themselves."""
  rest = {key: value for key, value in digests.items() if key != "crc32"}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _wrong(path: str, error: OSError) -> str:
  """Returns what is wrong with a file.

  Raises:
    ValueError: It is not the file: this process may not read it, or cannot now.
  """
  if isinstance(error, FileNotFoundError):
    return f"{path} is missing"
  told = f"{path} cannot be read: {error.strerror or error}"
  if error.errno not in _DAMAGE:
    raise ValueError(f"{told}.") from error
  return told


def digests_of(paths: Mapping[str, str]) -> dict[str, list[int]]:
  """Returns the size and the crc32 of each of some files."""
  with futures.ThreadPoolExecutor(_THREADS) as pool:  # crc32 leaves the GIL
    found = pool.map(_digest, paths.values())
    return dict(zip(paths, map(list, found), strict=True))


def _digest(path: str) -> tuple[int, int]:
  """Returns the size and the crc32 of a file."""
  size, crc = 0, 0
  buffer = memoryview(bytearray(_CHUNK))
  with open(path, "rb", buffering=0) as f:
    while count := f.readinto(buffer):
      crc = zlib.crc32(buffer[:count], crc)
      size += count
  return size, crc


def _compare(
  step_dir: str, files: Mapping[str, Any], contents: bool
) -> list[str]:
  """Returns what is wrong with each of some files."""

  def one(name: str) -> str | None:
    path = os.path.join(step_dir, name)
    size, crc = files[name]
    try:
      if (found := os.path.getsize(path)) != size:
        return f"{path} has {found:,} bytes, {size:,} were written"
      if contents and (now := _digest(path)[1]) != crc:
        return f"{path} has crc32 {now:08x}, {crc:08x} was written"
    except OSError as e:
      return _wrong(path, e)
    return None

  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return [wrong for wrong in pool.map(one, files) if wrong]
