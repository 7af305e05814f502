"""Whether a checkpoint is what was saved.

Every step has one more item, `flaxshard/`, after `default` in the alphabet, so
that what takes a step's first item reads on as before:

    checkpoints/1200/flaxshard/metadata       what wrote it, and with what: JSON
                               digests.json   size and crc32 of every file

Who has no flaxshard reads `metadata` with `ocp.args.JsonRestore`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import errno
import json
import logging
import os
from typing import Any
import zlib

import jax
import orbax.checkpoint as ocp

import flaxshard
from flaxshard import processes
from flaxshard import wrappers as wrappers_lib
from flaxshard.checkpoint import templates
from flaxshard.train_state import TrainState

_log = logging.getLogger(__name__)

ITEM = "flaxshard"

_METADATA = "metadata"  # as Orbax names it for JSON
_DIGESTS = "digests.json"
# Orbax's own, of the step: completed, but for the time, before we are called.
_STEP_METADATA = "_CHECKPOINT_METADATA"
_LATER = "commit_timestamp_nsecs"
_TEMPORARY = ".orbax-checkpoint-tmp"

# What a disk says of a file that is broken, where it sees it.
_DAMAGE = {errno.EIO, errno.EBADMSG, errno.ENODATA, errno.EISDIR, errno.ENOTDIR}
_CHUNK = 1 << 20
_THREADS = 4


class Damaged(ValueError):
  """A step is not what was saved; the message names the file."""


def metadata(
  state: TrainState,
  step: int,
  items: Sequence[str],
  config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns what the file `metadata` is to say.

  Args:
    state: The state that is saved.
    step: The number it is saved under.
    items: The names of the step's other items.
    config: The training config, as JSON can hold it.
  """
  everywhere = templates.on_every_device(state)
  mesh = None if everywhere is None else everywhere.mesh
  return {
    "flaxshard": flaxshard.__version__,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "step": int(step),
    "items": sorted(items),
    "wrappers": [_described(w) for w in state.wrappers],
    "processes": jax.process_count(),
    "devices": None if mesh is None else mesh.size,
    "mesh": None if mesh is None else dict(mesh.shape),
    "config": None if config is None else dict(config),
  }


def _described(wrapper: Any) -> Any:
  try:
    config = wrappers_lib.to_config([wrapper])[0]
    json.dumps(config)
  except (TypeError, ValueError):
    return repr(wrapper)  # one of somebody's own, or with a function in it
  return config


def read_metadata(step_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
  """Returns what the file `metadata` of a step says; None if it has none.

  Raises:
    Damaged: It cannot be read.
  """
  path = os.path.join(step_dir, ITEM, _METADATA)
  return read_json(path) if os.path.exists(path) else None


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


class Handler(ocp.AsyncCheckpointHandler):
  """Orbax's handler of the item.

  It must be the last of a manager's. `CompositeCheckpointHandler.finalize`
  calls the handlers in their order, in the background thread of the primary
  process, after the barrier at which all processes have written everything, and
  before the step's directory gets its name: what is digested is complete, and
  the digests are there when the step is.
  """

  def __init__(self) -> None:
    self._metadata: Mapping[str, Any] = {}
    # What the step says its item is: a process without flaxshard finds Orbax's
    # own, where `CheckpointManager.restore(step)` restores every item there is.
    self.typestr = ocp.JsonCheckpointHandler.typestr

  async def async_save(
    self, directory: Any, args: Save
  ) -> list[ocp.future.Future]:
    """Keeps what is to be written when all else is."""
    del directory
    self._metadata = args.metadata
    return []

  def save(self, directory: Any, args: Save) -> None:
    """As `async_save`."""
    del directory
    self._metadata = args.metadata

  def finalize(self, directory: Any) -> None:
    """Writes both files.

    Args:
      directory: That of the item, still with its temporary name.
    """
    item_dir = os.fspath(directory)
    step_dir = os.path.dirname(item_dir)
    text = json.dumps(self._metadata, indent=2)
    with open(os.path.join(item_dir, _METADATA), "w") as f:
      f.write(text)
    files = _digests(_walk(step_dir, besides=item_dir))
    body = text.encode()
    files[f"{ITEM}/{_METADATA}"] = [len(body), zlib.crc32(body)]
    digests: dict[str, Any] = {"files": files, "step_metadata": None}
    step_metadata = os.path.join(step_dir, _STEP_METADATA)
    if os.path.exists(step_metadata):
      known = read_json(step_metadata)
      known.pop(_LATER, None)
      digests["step_metadata"] = known
    digests["crc32"] = _own_crc(digests)
    with open(os.path.join(item_dir, _DIGESTS), "w") as f:
      json.dump(digests, f, indent=1)

  def restore(self, directory: Any, args: Any = None) -> dict[str, Any]:
    """Returns what the file `metadata` says."""
    del args
    return read_json(os.path.join(directory, _METADATA))


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
  """What Orbax hands to `Handler.async_save`.

  Attributes:
    metadata: What `metadata` returned.
  """

  metadata: Mapping[str, Any]


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
  """What Orbax hands to `Handler.restore`: nothing."""


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
  step_metadata = os.path.join(where, _STEP_METADATA)
  known = None
  if os.path.exists(step_metadata):
    known = read_json(step_metadata)
    items = known.get("item_handlers")
    for item in sorted(items) if isinstance(items, dict) else ():
      if not os.path.isdir(os.path.join(where, item)):
        raise Damaged(
          f"{os.path.join(where, item)} is missing; {_STEP_METADATA} has it."
        )
  if not os.path.isdir(os.path.join(where, ITEM)):
    if known is None and _is_remnant(where):
      raise Damaged(
        f"{os.path.join(where, ITEM)} is missing, and {_STEP_METADATA}, which "
        "later steps have: half deleted."
      )
    _log.info("%s has no digests: it is read without a check", where)
    return False
  digests = _read_digests(os.path.join(where, ITEM, _DIGESTS))
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
  with processes.together(Damaged, ValueError):
    verified = verify(step_dir, jax.process_index(), jax.process_count())
  return verified


@contextlib.contextmanager
def reading(step_dir: str, verified: bool) -> Iterator[None]:
  """Takes Orbax's errors at a step without digests for damage.

  A step that was verified is whole, so its errors are something else.
  """
  try:
    yield
  except (MemoryError, PermissionError, jax.errors.JaxRuntimeError, Damaged):
    raise  # what it was read into, or who reads, or named already
  except Exception as e:  # Orbax raises that too, and no kind of it
    if verified:
      raise
    reason = (str(e).splitlines() or [""])[0]
    raise Damaged(
      f"{step_dir} cannot be read: {type(e).__name__}: {reason}"
    ) from e


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
  if digests.get("crc32") != _own_crc(digests):
    raise Damaged(f"{path} is not what was written: its own crc32 differs.")
  return digests


def _own_crc(digests: Mapping[str, Any]) -> int:
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


def _walk(step_dir: str, besides: str) -> dict[str, str]:
  """Returns the files of a step's items but one, by their names to be."""
  paths = {}
  for folder, _, files in os.walk(step_dir):
    if folder == step_dir or f"{folder}/".startswith(f"{besides}/"):
      continue
    for file in files:
      path = os.path.join(folder, file)
      item, _, rest = os.path.relpath(path, step_dir).partition("/")
      # An item of Orbax's own, metrics, is given its name after ours.
      paths[f"{item.partition(_TEMPORARY)[0]}/{rest}"] = path
  return dict(sorted(paths.items()))


def _digests(paths: Mapping[str, str]) -> dict[str, list[int]]:
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
