"""Digests of a step's files: writes them, and compares the files with them.

    checkpoints/1200/flaxshard/metadata       versions, wrappers, config (JSON)
                               digests.json   size and crc32 of every file

Orbax has no checksum of its data: it returns wrong values for a flipped bit. So
the last file of a step has the size and the crc32 of all others. In a bucket,
which has checksums of its own, only sizes are compared. The name of the item
sorts after `default`: a program that reads the first item of a step reads the
train state. Without flaxshard, `ocp.args.JsonRestore` reads `metadata`.
"""

from __future__ import annotations

from concurrent import futures
import json
import logging
import os
from typing import Any
import zlib

from etils import epath

from flaxshard.checkpoint import steps
from flaxshard.core import files as files_lib

_log = logging.getLogger(__name__)

METADATA = "metadata"
_DIGESTS = "digests.json"
_STEP_METADATA = "_CHECKPOINT_METADATA"  # Orbax's file of a step's items

_CHUNK_BYTES = 1 << 20
_THREADS = 4
# TensorStore writes a file under a name with the first suffix, and renames it.
# Of the marks nothing is read.
_UNCOMPARED = (".__lock", steps.COMMIT_MARK)

# Errors of a file that is not what was saved. Others, such as too many open
# files or no permission, say nothing of the file, and are raised as they are.
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)

# Size and crc32 of a file; None if only the size was recorded.
Digest = list[int | None]


class Damaged(ValueError):
  """A step differs from what was saved; the message names the file."""


def read_bytes(path: Any) -> bytes:
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


def read_json(path: Any) -> dict[str, Any]:
  """Returns the object in a JSON file; raises `Damaged` if it has none."""
  text = read_bytes(path)
  try:
    return dict(json.loads(text))
  # The last one if it is nested too deep.
  except (ValueError, TypeError, RecursionError) as e:
    raise Damaged(f"{path} is not a JSON object: {e}.") from e


def read_metadata(step_dir: Any) -> dict[str, Any] | None:
  """Returns the metadata of a step; None if flaxshard did not write it."""
  path = steps.as_path(step_dir) / steps.FLAXSHARD / METADATA
  return read_json(path) if path.exists() else None


# -- Writing.


def write(step_dir: Any, *, contents: bool) -> None:
  """Writes the digests of a step as its last file, in process 0.

  Args:
    step_dir: Path of the unfinished step.
    contents: Whether to read all files for their crc32. Otherwise only the
      small ones are read that may have one size in two steps.
  """
  small = (f"{steps.FLAXSHARD}/", f"{steps.POSITION}/")

  def digest(name: str) -> Digest:
    path = os.path.join(step_dir, name)
    return _digest(path, contents or name.startswith(small))

  names = [os.path.relpath(p, step_dir) for p in files_lib.files_in(step_dir)]
  # Orbax writes its own metadata and the marks once more.
  names = [
    n for n in names if n != _STEP_METADATA and not n.endswith(_UNCOMPARED)
  ]
  # crc32 releases the GIL, so threads speed it up.
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    digests = dict(zip(names, pool.map(digest, names), strict=True))
  content = {"files": digests, "crc32": _crc_of(digests)}
  text = json.dumps(content, indent=1)
  (epath.Path(step_dir) / steps.FLAXSHARD / _DIGESTS).write_text(text)


def _digest(path: Any, contents: bool) -> Digest:
  """Returns the size and, if it is to be read, the crc32 of a file."""
  if not contents:
    return [epath.Path(path).stat().length, None]
  size, crc = 0, 0
  with epath.Path(path).open("rb") as f:
    while chunk := f.read(_CHUNK_BYTES):
      crc = zlib.crc32(chunk, crc)
      size += len(chunk)
  return [size, crc]


def _crc_of(digests: Any) -> int:
  """Returns the crc32 of the digests of all files."""
  text = json.dumps({"files": digests}, sort_keys=True)
  return zlib.crc32(text.encode())


# -- Comparing.


def check(step_dir: Any) -> None:
  """Compares what is read of every step, without its digests.

  Orbax's manager reads the metrics and the metadata of all steps, and raises
  without naming the file if one is damaged.

  Args:
    step_dir: Path of the directory of the step.

  Raises:
    Damaged: The step is missing, empty or was saved under another number, an
      item is missing, or one of these files cannot be read.
  """
  where = steps.as_path(step_dir)
  if where.is_file():
    return  # Flax writes a state as one file
  if not where.is_dir():
    raise Damaged(f"{where} is missing.")
  # A process that is killed while it deletes a step can leave one behind.
  if not any(where.iterdir()):
    raise Damaged(f"{where} is empty.")
  metadata, path = read_metadata(where), where / _STEP_METADATA
  if metadata is not None or path.exists():
    # The handlers by item, or the only one; None in a step of an older Orbax.
    items = read_json(path).get("item_handlers")
    for item in sorted(items) if isinstance(items, dict) else ():
      if not (where / item).is_dir():
        raise Damaged(f"{where / item} is missing; {_STEP_METADATA} has it.")
  if (where / steps.METRICS / steps.METRICS).exists():
    read_json(where / steps.METRICS / steps.METRICS)
  match = steps.ANY.fullmatch(where.name)
  saved = (metadata or {}).get("step")
  # The position of the data, the metrics and a schedule are those of its step.
  if match and saved not in (None, int(match[1])):
    raise Damaged(
      f"{where} was saved as step {saved}: it was copied or renamed. Give it "
      f"the name {saved} to restore it."
    )


def verify(
  step_dir: Any, part: int = 0, parts: int = 1, *, contents: bool = True
) -> bool:
  """Compares the files of a step with their digests.

  Orbax's marks `commit_success.txt`, of which nothing is read, do not count.

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
  where = steps.as_path(step_dir)
  check(where)
  path = where / steps.FLAXSHARD / _DIGESTS
  if not path.parent.is_dir():
    _log.info("%s has no digests: it is read without a check", where)
    return False
  content = read_json(path)
  digests = content.get("files", {})
  if content.get("crc32") != _crc_of(digests):
    raise Damaged(f"{path} is not what was written: its own crc32 differs.")

  def compare(name: str) -> None:
    (size, crc), path = digests[name], where / name
    try:
      found = _digest(path, contents and crc is not None)
    except _MISSING as e:
      raise Damaged(f"{path} is missing.") from e
    if found[0] != size:
      raise Damaged(f"{path} has {found[0]:,} bytes, {size:,} were written.")
    if found[1] not in (None, crc):
      raise Damaged(f"{path} has crc32 {found[1]:08x}, {crc:08x} was written.")

  with futures.ThreadPoolExecutor(_THREADS) as pool:
    list(pool.map(compare, sorted(digests)[part::parts]))
  # All processes must agree, so this does not depend on the part.
  return all(crc is not None for _, crc in digests.values())
