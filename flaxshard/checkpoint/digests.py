"""Digests of a step's files: takes them, and compares the files with them.

`metadata_item` writes them into the step when it is saved. On a file system a
digest has the crc32 of a file, and all files are read to take and to compare
it. In a bucket it has the checksum that the bucket keeps of an object, which a
listing returns: nothing is read.
"""

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

from flaxshard.checkpoint import step_names
from flaxshard.core import files
from flaxshard.core import multihost

_log = logging.getLogger(__name__)

ITEM = "flaxshard"
DIGESTS = "digests.json"
METADATA = "metadata"  # what wrote the step; it names the step
STEP_METADATA = "_CHECKPOINT_METADATA"  # Orbax's file of a step's items

# Errors that a disk reports for a damaged file, rather than for this process.
_DAMAGE = {
  errno.EIO,
  errno.EBADMSG,
  errno.ENODATA,
  errno.EISDIR,
  errno.ENOTDIR,
  errno.ELOOP,
}
_CHUNK_BYTES = 1 << 20
_THREADS = 4

# Size and crc32 of a file. In a bucket, a checksum such as "crc32c:r0nCJg==" or
# "ETag:..." is in place of the crc32. It is None if only the size was recorded.
Digest = list[int | str | None]

# What Google Cloud Storage and S3 tell of the content of an object.
_CHECKSUMS = ("crc32c", "ETag")


class Damaged(ValueError):
  """A step differs from what was saved; the message names the file."""


def read_json(path: str) -> dict[str, Any]:
  """Returns the object in a JSON file.

  Args:
    path: Path of the file.

  Raises:
    Damaged: The file is missing, or is not a JSON object.
    ValueError: The file exists, but this process cannot read it.
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
    Damaged: The file is missing, or the disk cannot read it.
    ValueError: The file exists, but this process cannot read it.
  """
  try:
    return files.read_bytes(path)
  except OSError as e:
    raise Damaged(f"{_describe_damage(os.fspath(path), e)}.") from e


def is_empty(step_dir: str | os.PathLike[str]) -> bool:
  """Returns whether the directory of a step exists and is empty.

  A process that is killed while it deletes a step can leave one behind.
  """
  return files.is_dir(step_dir) and not files.list_names(step_dir)


def other_step(step_dir: str | os.PathLike[str]) -> int | None:
  """Returns the step that was saved, if a directory is named after another.

  Such a directory was copied or renamed. The position of the data, the metrics
  and a schedule are then those of another step than the name says.

  Args:
    step_dir: Path of the directory of the step.

  Raises:
    Damaged: The metadata of the step cannot be read.
  """
  where = files.absolute(step_dir)
  path = os.path.join(where, ITEM, METADATA)
  name = os.path.basename(where)
  match = step_names.ANY.fullmatch(name)
  if match is None or not files.exists(path):
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
    was saved with `digests=False`, of which only the sizes are compared.

  Raises:
    Damaged: A file or an item is missing, or a file differs from what was
      saved, or the step is empty; the message names the first such file. Or the
      directory was saved as another step.
    ValueError: A file exists, but this process cannot read it.

  Example:
    >>> import pathlib, tempfile
    >>> step = pathlib.Path(tempfile.mkdtemp()) / "3"
    >>> (step / "default").mkdir(parents=True)
    >>> verify(step)  # a step without digests
    False
  """
  where = os.fspath(step_dir)
  try:
    return _verify(where, part, parts, contents)
  except OSError as e:
    raise Damaged(f"{_describe_damage(e.filename or where, e)}.") from e


def _verify(where: str, part: int, parts: int, contents: bool) -> bool:
  if files.is_file(where):
    return False  # Flax writes a state as one file
  if not files.is_dir(where):
    raise Damaged(f"{where} is missing, or no directory.")
  if is_empty(where):
    raise Damaged(f"{where} is empty.")
  step_metadata = _check_items(where)
  if not files.is_dir(os.path.join(where, ITEM)):
    if step_metadata is None and _is_half_deleted(where):
      raise Damaged(
        f"{os.path.join(where, ITEM)} is missing, and {STEP_METADATA}, which "
        "later steps have: half deleted."
      )
    _log.info("%s has no digests: it is read without a check", where)
    return False
  digests = _read_digests(os.path.join(where, ITEM, DIGESTS))
  saved_metadata = digests["step_metadata"]
  if saved_metadata is not None:
    path = os.path.join(where, STEP_METADATA)
    if step_metadata is None:
      raise Damaged(f"{path} is missing.")
    # Orbax adds the time of the commit after the digests are taken.
    if any(
      key not in step_metadata or step_metadata[key] != value
      for key, value in saved_metadata.items()
    ):
      raise Damaged(f"{path} is not what was written.")
  names = sorted(digests["files"])[part::parts]
  expected = {name: digests["files"][name] for name in names}
  compare = _compare_in_bucket if files.is_bucket(where) else _compare
  damages = compare(where, expected, contents)
  if damages:
    others = len(damages) - 1
    more = f" ({others} more files are damaged)" if others else ""
    raise Damaged(f"{damages[0]}{more}.")
  saved_step = other_step(where)
  if saved_step is not None:
    raise Damaged(
      f"{where} was saved as step {saved_step}: it was copied or renamed to "
      f"{os.path.basename(files.absolute(where))}. Give it the name "
      f"{saved_step} to restore it."
    )
  # All processes must agree, so this does not depend on the part.
  return all(crc is not None for _, crc in digests["files"].values())


def _check_items(where: str) -> dict[str, Any] | None:
  """Returns Orbax's metadata of a step, or None if it has none.

  Raises:
    Damaged: An item is missing that the metadata list.
  """
  path = os.path.join(where, STEP_METADATA)
  if not files.exists(path):
    return None
  step_metadata = read_json(path)
  items = step_metadata.get("item_handlers")
  for item in sorted(items) if isinstance(items, dict) else ():
    if not files.is_dir(os.path.join(where, item)):
      raise Damaged(
        f"{os.path.join(where, item)} is missing; {STEP_METADATA} has it."
      )
  return step_metadata


def _is_half_deleted(where: str) -> bool:
  """Returns whether a process was killed while it deleted this step.

  Orbax deletes a step's files in any order. Once the digests and the list of
  items are gone, only later steps, which have digests, show that this step had
  some too.
  """
  folder, name = os.path.split(files.absolute(where))
  is_single_item = files.exists(os.path.join(where, "_METADATA"))
  if is_single_item or not name.isdecimal():
    return False  # no `Checkpointer` has written it
  return any(
    other.isdecimal()
    and int(other) > int(name)
    and files.is_dir(os.path.join(folder, other, ITEM))
    for other in files.list_names(folder)
  )


def verify_together(step_dir: str | os.PathLike[str]) -> bool:
  """Verifies a step, each process a part of it, with one result for all.

  Args:
    step_dir: Path of the directory of the step.

  Returns:
    As `verify`.

  Raises:
    Damaged: As `verify`, with the number of the process that found the damage.
  """
  with multihost.raise_on_all_processes(Damaged, ValueError):
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
  count = 1
  while files.lexists(new_path):
    count += 1
    new_path = f"{step_dir}.damaged_{count}"
  files.rename(step_dir, new_path)
  return new_path


def _read_digests(path: str) -> dict[str, Any]:
  digests = read_json(path)
  if digests.get("crc32") != crc_of_digests(digests):
    raise Damaged(f"{path} is not what was written: its own crc32 differs.")
  return digests


def crc_of_digests(digests: Mapping[str, Any]) -> int:
  """Returns the crc32 of the content of `digests.json`.

  Args:
    digests: The content, with or without its own crc32.
  """
  rest = {key: value for key, value in digests.items() if key != "crc32"}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _describe_damage(path: str, error: OSError) -> str:
  """Returns what is wrong with a file that cannot be opened or read.

  Raises:
    ValueError: The file may be intact: this process may not read it, or cannot
      read it now.
  """
  if isinstance(error, FileNotFoundError):
    return f"{path} is missing"
  message = f"{path} cannot be read: {error.strerror or error}"
  if error.errno not in _DAMAGE:
    raise ValueError(f"{message}.") from error
  return message


def take(paths: Mapping[str, str]) -> dict[str, Digest]:
  """Returns the size and the crc32 of files.

  Args:
    paths: Paths of the files, by name.
  """
  # crc32 releases the GIL, so threads speed it up.
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    found = pool.map(_digest, paths.values())
    return dict(zip(paths, map(list, found), strict=True))


def take_sizes(paths: Mapping[str, str]) -> dict[str, Digest]:
  """Returns the size of files, and None for the crc32.

  Args:
    paths: Paths of the files, by name.
  """
  return {name: [files.size(path), None] for name, path in paths.items()}


def take_from_bucket(step_dir: str) -> dict[str, Digest]:
  """Returns the size and the checksum of each object of a step in a bucket.

  Args:
    step_dir: Path of the directory of the step.

  Returns:
    The digests by the full path of the object.
  """
  return {
    path: [int(info["size"]), _checksum(info)]
    for path, info in files.find(step_dir).items()
  }


def _checksum(info: Mapping[str, Any]) -> str | None:
  """Returns the checksum of an object, with the name of its kind."""
  return next((f"{k}:{info[k]}" for k in _CHECKSUMS if info.get(k)), None)


def _digest(path: str) -> tuple[int, int]:
  """Returns the size and the crc32 of a file."""
  size, crc = 0, 0
  buffer = memoryview(bytearray(_CHUNK_BYTES))
  with files.open_to_read(path) as f:
    while count := f.readinto(buffer):  # type: ignore[attr-defined]
      crc = zlib.crc32(buffer[:count], crc)
      size += count
  return size, crc


def _compare_in_bucket(
  step_dir: str, expected: Mapping[str, Digest], contents: bool
) -> list[str]:
  """Returns a description of each object that differs from its digest."""
  found = take_from_bucket(step_dir)
  damages = []
  copied: dict[str, Digest] = {}
  for name, (size, checksum) in expected.items():
    path = os.path.join(step_dir, name)
    if path not in found:
      damages.append(f"{path} is missing")
      continue
    found_size, found_checksum = found[path]
    if found_size != size:
      damages.append(f"{path} has {found_size:,} bytes, {size:,} were written")
    elif isinstance(checksum, int):
      copied[name] = [size, checksum]  # from a file system
    elif (
      checksum is not None
      and found_checksum is not None
      # A bucket of another kind, to which the step was copied, has others.
      and _kind(found_checksum) == _kind(checksum)
      and found_checksum != checksum
    ):
      damages.append(f"{path} has {found_checksum}, {checksum} was written")
  return damages + _compare(step_dir, copied, contents)


def _kind(checksum: Any) -> str:
  return str(checksum).partition(":")[0]


def _compare(
  step_dir: str, expected: Mapping[str, Digest], contents: bool
) -> list[str]:
  """Returns a description of each file that differs from its digest."""

  def describe_difference(name: str) -> str | None:
    path = os.path.join(step_dir, name)
    size, crc = expected[name]
    try:
      found_size = files.size(path)
      if found_size != size:
        return f"{path} has {found_size:,} bytes, {size:,} were written"
      # A step that was copied from a bucket has the checksums of its objects.
      if contents and isinstance(crc, int):
        found_crc = _digest(path)[1]
        if found_crc != crc:
          return f"{path} has crc32 {found_crc:08x}, {crc:08x} was written"
    except OSError as e:
      return _describe_damage(path, e)
    return None

  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return [d for d in pool.map(describe_difference, expected) if d]
