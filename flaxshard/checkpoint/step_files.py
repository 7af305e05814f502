"""The files of one step: the names of its items, and digests of all files.

    checkpoints/1200/default/, wrappers/      trees of arrays
                     flaxshard/metadata       versions, wrappers, config (JSON)
                               digests.json   size and crc32 of every file

Orbax has no checksum of its data: it returns wrong values for a flipped bit. So
the last file of a step has the size and the crc32 of all others. In a bucket,
which has checksums of its own, only sizes are compared.
"""

from __future__ import annotations

from concurrent import futures
import contextlib
import json
import logging
import os
import re
from typing import Any
import zlib

from etils import epath
import jax

from flaxshard.core import files as files_lib

_log = logging.getLogger(__name__)

# An epath.Path, for whose methods there are no types.
Directory = Any

# The name of a step. A manager may use a prefix and leading zeros.
NAME = re.compile(r"(?:[A-Za-z]\w*[_-])?(\d+)(?:\.flax)?", re.ASCII)

# The items of a step. Without one called `state`, Orbax v1 takes the first for
# the train state, so the others sort after `default`.
PLAIN = ("default", "state", "pytree")  # the train state, by any program
WRAPPERS = "wrappers"
FLAXSHARD = "flaxshard"  # what wrote the step, and its digests
POSITION = "input_iterator"  # where the data stands
METRICS = "metrics"  # Orbax's name of the item and of the file in it
JSON = "metadata"  # Orbax's name of the file in other items of JSON

# A bucket cannot rename a step once it is complete: it has its final name from
# the start, and Orbax writes this file into it last.
COMMIT_MARK = "commit_success.txt"
# Elsewhere, a step has this after its number until it is complete.
_UNFINISHED = ".orbax-checkpoint-tmp"

_DIGESTS = "digests.json"
_TREE_METADATA = "_METADATA"  # Orbax's file in each tree of arrays
_STEP_METADATA = "_CHECKPOINT_METADATA"  # its file of a step's items
_ARRAYS = "array_metadatas"  # its directory in a tree, newer than that file

_CHUNK_BYTES = 1 << 20
_THREADS = 4
# Files without a digest. Orbax writes its own metadata and the marks, of which
# nothing is read, once more. TensorStore writes a file under a name with the
# second suffix, and renames it.
_UNCOMPARED = (_STEP_METADATA, ".__lock", COMMIT_MARK)

# Errors of a file that is not what was saved. Others, such as too many open
# files, no permission or no network, say nothing of the file, and are raised as
# they are.
_MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class Damaged(ValueError):
  """A step differs from what was saved; the message names the file."""


def names_in(directory: Directory) -> set[str]:
  """Returns the names in a directory; none if it is missing, or a file.

  `exists` and `is_dir` are False also if the path cannot be looked at.

  Raises:
    OSError: This process cannot read it.
  """
  try:
    return {path.name for path in directory.iterdir()}
  except _MISSING:
    return set()


def is_complete(path: Directory) -> bool:
  """Returns whether what has the final name of a step is no unfinished save.

  Args:
    path: An existing path whose name is a number.
  """
  if files_lib.is_bucket(path):
    return COMMIT_MARK in names_in(path)
  # Not `is_dir`: a step that cannot be looked at must not be passed over.
  return not path.is_file()


def unfinished(directory: Directory, step: int) -> Directory:
  """Returns the path of a step of `Checkpointer` while it is written."""
  suffix = "" if files_lib.is_bucket(directory) else _UNFINISHED
  return directory / f"{step}{suffix}"


def trees_in(step_dir: Directory) -> dict[str, Directory]:
  """Returns the path of each tree that Orbax wrote into a step, by name.

  The name of the directory itself is `""`.
  """
  found = {}
  for name in ("", *names_in(step_dir)):
    with contextlib.suppress(*_MISSING):
      # `exists` would hide other errors.
      (step_dir / name / _TREE_METADATA).open("rb").close()
      found[name] = step_dir / name
  return found


def read_json(path: Directory) -> dict[str, Any]:
  """Returns the object in a JSON file.

  Raises:
    Damaged: The file is missing, or has no object.
    OSError: This process cannot read it.
  """
  try:
    return dict(json.loads(path.read_bytes()))
  except _MISSING as e:
    raise Damaged(f"{path} is missing.") from e
  # The last one if it is nested too deep.
  except (ValueError, TypeError, RecursionError) as e:
    raise Damaged(f"{path} is not a JSON object: {e}.") from e


# -- Writing.


def write_digests(step_dir: Directory, *, contents: bool) -> None:
  """Writes the digests of a step as its last file, in process 0.

  Args:
    step_dir: Path of the unfinished step.
    contents: Whether to read all files for their crc32. Otherwise only the
      small ones are read that may have one size in two steps.
  """
  small = (f"{FLAXSHARD}/", f"{POSITION}/")

  def digest(name: str) -> list[int | None]:
    return _digest(step_dir / name, contents or name.startswith(small))

  paths = files_lib.files_in(step_dir)
  names = [str(path.relative_to(step_dir)) for path in paths]
  names = [name for name in names if not name.endswith(_UNCOMPARED)]
  # crc32 releases the GIL, so threads speed it up.
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    digests = dict(zip(names, pool.map(digest, names), strict=True))
  text = json.dumps({"files": digests, "crc32": _crc_of(digests)}, indent=1)
  (step_dir / FLAXSHARD / _DIGESTS).write_text(text)


def _digest(path: Directory, contents: bool) -> list[int | None]:
  """Returns the size of a file, and its crc32, or None without reading it."""
  crc = 0
  # The `stat` of epath fails for an owner without a name, as in containers.
  with path.open("rb") as f:
    if not contents:
      return [f.seek(0, os.SEEK_END), None]
    while chunk := f.read(_CHUNK_BYTES):
      crc = zlib.crc32(chunk, crc)
    return [f.tell(), crc]


def _crc_of(digests: Any) -> int:
  """Returns the crc32 of the digests of all files."""
  text = json.dumps({"files": digests}, sort_keys=True)
  return zlib.crc32(text.encode())


# -- Comparing.


def check(where: Directory) -> dict[str, Any] | None:
  """Compares what is read of every step, without its digests.

  Orbax's manager reads the metrics and the metadata of all steps, and raises
  without naming the file if one is damaged.

  Args:
    where: Path of the directory of the step, or of a file of Flax.

  Returns:
    The metadata of the step; None if flaxshard did not write it.

  Raises:
    Damaged: The step is missing, empty or was saved under another number, an
      item is missing, or one of these files cannot be read.
    OSError: This process cannot read a file.
  """
  if where.is_file():
    return None
  names = names_in(where)
  if not names:
    # A process that is killed while it deletes a step can leave an empty one.
    raise Damaged(f"{where} is {'empty' if where.exists() else 'missing'}.")
  is_newer = not names.isdisjoint((_STEP_METADATA, FLAXSHARD))
  # A deletion that was killed can leave a whole item alone.
  if is_newer or any(_is_newer_item(where / name) for name in PLAIN):
    path = where / _STEP_METADATA
    # The handlers by item, or the only one; None in a step of an older Orbax.
    items = read_json(path).get("item_handlers")
    for item in sorted(items) if isinstance(items, dict) else ():
      if item not in names:
        raise Damaged(f"{where / item} is missing; {_STEP_METADATA} has it.")
  if METRICS in names and METRICS in names_in(where / METRICS):
    read_json(where / METRICS / METRICS)
  if FLAXSHARD not in names:
    return None
  metadata = read_json(where / FLAXSHARD / JSON)
  match = NAME.fullmatch(where.name)
  # The position of the data, the metrics and a schedule are those of its step.
  if match and metadata.get("step") not in (None, int(match[1])):
    saved = metadata["step"]
    raise Damaged(
      f"{where} was saved as step {saved}: it was copied or renamed. Give it "
      f"the name {saved} to restore it."
    )
  return metadata


def _is_newer_item(tree: Directory) -> bool:
  """Returns whether a tree was saved as an item, by no old Orbax."""
  names = names_in(tree)
  return _ARRAYS in names and _STEP_METADATA not in names


def verify(step_dir: Directory, *, contents: bool = True) -> bool:
  """Compares the files of a step with their digests, each process a part.

  Orbax's marks `commit_success.txt`, of which nothing is read, do not count.

  Args:
    step_dir: Path of the directory of the step, or of an item of it.
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
  where: Directory = epath.Path(step_dir)
  if (where.parent / FLAXSHARD / _DIGESTS).exists():
    where = where.parent  # of an item
  path = where / FLAXSHARD / _DIGESTS
  if check(where) is None:
    _log.info("%s has no digests: it is read without a check", where)
    return False
  content = read_json(path)
  digests = content.get("files", {})
  if content.get("crc32") != _crc_of(digests):
    raise Damaged(f"{path} is not what was written: its own crc32 differs.")

  def compare(name: str) -> int | None:
    """Returns the crc32 that a file has, and had."""
    (size, crc), path = digests[name], where / name
    try:
      found = _digest(path, contents and crc is not None)
    except _MISSING as e:
      raise Damaged(f"{path} is missing.") from e
    if found[0] != size:
      raise Damaged(f"{path} has {found[0]:,} bytes, {size:,} were written.")
    if found[1] not in (None, crc):
      raise Damaged(f"{path} has crc32 {found[1]:08x}, {crc:08x} was written.")
    return crc

  part = sorted(digests)[jax.process_index() :: jax.process_count()]
  with futures.ThreadPoolExecutor(_THREADS) as pool:
    return None not in list(pool.map(compare, part))
