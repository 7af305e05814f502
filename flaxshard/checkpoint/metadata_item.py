"""The item `flaxshard` of a step: what wrote the step, and its digests.

    checkpoints/1200/flaxshard/metadata       versions, wrappers, config (JSON)
                               digests.json   size and crc32 of every file

Its name sorts after `default`: a program that reads the first item of a step
reads the train state. Without flaxshard, `ocp.args.JsonRestore` reads
`metadata`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
import re
import time
from typing import Any
import zlib

from etils import epath
import jax
import orbax.checkpoint as ocp

from flaxshard import wrappers as wrappers_lib
from flaxshard.checkpoint import digests as digests_lib
from flaxshard.checkpoint import iterator_state
from flaxshard.checkpoint import validation
from flaxshard.core import files as files_lib
from flaxshard.core import version
from flaxshard.state.train_state import TrainState

# Orbax adds this to the step's metadata after our handler was called.
_COMMIT_TIME = "commit_timestamp_nsecs"
# Orbax names an item's directory so until the item is complete.
_TEMPORARY_SUFFIX = ".orbax-checkpoint-tmp"
_MANIFEST = "manifest.ocdbt"
# TensorStore writes a file under a name with this suffix, and then renames it.
_LOCK_SUFFIX = ".__lock"
# In the paths of files that each process writes for itself: ocdbt.process_1/d/,
# array_metadatas/process_1, process_1-of-2.json.
_PROCESS = re.compile(r"process_(?:replica_)?(\d+)")


def state_step(state: TrainState | Mapping[str, TrainState]) -> Any:
  """Returns the step of a state, or the steps of states by name."""
  if isinstance(state, Mapping):
    return {name: int(s.step) for name, s in state.items()}
  return int(state.step)


def metadata(
  state: TrainState | Mapping[str, TrainState],
  step: int,
  items: Sequence[str],
  config: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """Returns the content of the file `metadata`.

  Args:
    state: The state that is saved, or states by name.
    step: Number of the step that it is saved under.
    items: Names of the step's other items.
    config: The training config, with values that JSON can hold.
  """
  states = state.values() if isinstance(state, Mapping) else [state]
  replicated = validation.replicated_sharding(state)
  mesh = None if replicated is None else replicated.mesh
  return {
    "flaxshard": version.VERSION,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "step": step,
    "state_step": state_step(state),
    "items": sorted(items),
    "wrappers": [_wrapper_config(w) for s in states for w in s.wrappers],
    "processes": jax.process_count(),
    "devices": None if mesh is None else mesh.size,
    "mesh": None if mesh is None else dict(mesh.shape),
    "config": None if config is None else dict(config),
  }


def _wrapper_config(wrapper: Any) -> Any:
  try:
    config = wrappers_lib.to_config([wrapper])[0]
    json.dumps(config)
  except (TypeError, ValueError):
    return repr(wrapper)  # an unregistered wrapper, or a function in it
  return config


def read_metadata(step_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
  """Returns the content of the file `metadata` of a step, or None without one.

  Args:
    step_dir: Path of the directory of the step.

  Raises:
    Damaged: The file cannot be read.
  """
  path = os.path.join(step_dir, digests_lib.ITEM, digests_lib.METADATA)
  return digests_lib.read_json(path) if epath.Path(path).exists() else None


class Handler(ocp.AsyncCheckpointHandler):
  """Orbax's handler of the item `flaxshard`.

  It must be the last handler of a manager, because Orbax calls handlers in
  their order. Each process digests its own files once it has written them. When
  all processes have written everything, process 0 collects those digests and
  takes the rest, before Orbax gives the step its final name. So a step has its
  digests from the moment it exists, and no process reads back arrays that
  another process has written. In a bucket, process 0
  takes the sizes alone.
  """

  def __init__(self) -> None:
    self._args = Save({})
    self._own_digests = _OwnDigests("")
    # Orbax writes this into the step as the type of the item. A process without
    # flaxshard then restores the item with Orbax's own handler.
    self.typestr = ocp.JsonCheckpointHandler.typestr

  async def async_save(
    self, directory: Any, args: Save
  ) -> list[ocp.future.Future]:
    """Returns a future that digests the files this process has written.

    Args:
      directory: Path of the item, still with its temporary name.
      args: The content of the item.
    """
    self._args = args
    self._own_digests = _OwnDigests(os.fspath(directory))
    # Orbax waits for the futures in order, so this one runs after the writes.
    reads_files = args.digests and not files_lib.is_bucket(directory)
    return [self._own_digests] if reads_files else []

  def save(self, directory: Any, args: Save) -> None:
    """Keeps the content of the item for `finalize`, in a synchronous save.

    Args:
      directory: Path of the item, still with its temporary name.
      args: The content of the item.
    """
    self._args = args
    self._own_digests = _OwnDigests(os.fspath(directory))

  def finalize(self, directory: Any) -> None:
    """Writes the files of the item, in process 0, as the last of the step.

    Args:
      directory: Path of the item, still with its temporary name.
    """
    item_dir = os.fspath(directory)
    step_dir = os.path.dirname(item_dir)
    text = json.dumps(self._args.metadata, indent=2)
    epath.Path(os.path.join(item_dir, digests_lib.METADATA)).write_bytes(
      text.encode()
    )
    if self._args.digests and not files_lib.is_bucket(item_dir):
      files = self._take_digests(item_dir)
    else:
      paths = _files_of_items(item_dir)
      files = digests_lib.take(paths, contents=False)
      # Positions of two steps often have one size, and are small.
      prefix = f"{iterator_state.ITEM}/"
      files |= digests_lib.take(
        {n: path for n, path in paths.items() if n.startswith(prefix)},
        contents=True,
      )
    body = text.encode()
    name = f"{digests_lib.ITEM}/{digests_lib.METADATA}"
    files[name] = [len(body), zlib.crc32(body)]
    step_metadata = _read_step_metadata(step_dir)
    digests: dict[str, Any] = {"files": files, "step_metadata": step_metadata}
    digests["crc32"] = digests_lib.crc_of_digests(digests)
    epath.Path(os.path.join(item_dir, digests_lib.DIGESTS)).write_bytes(
      json.dumps(digests, indent=1).encode()
    )

  def _take_digests(self, item_dir: str) -> dict[str, digests_lib.Digest]:
    """Returns the digests of all files of the other items."""
    known = dict(self._own_digests.files)
    for name in os.listdir(item_dir):
      if name.startswith(_OWN_DIGESTS):
        path = os.path.join(item_dir, name)
        known |= digests_lib.read_json(path)
        os.remove(path)
    paths = _files_of_items(item_dir)
    # Orbax may have merged files of the processes since; take those again.
    rest = {
      name: path
      for name, path in paths.items()
      if name not in known or known[name][0] != os.path.getsize(path)
    }
    known |= digests_lib.take(rest, contents=True)
    return {name: known[name] for name in paths}

  def restore(self, directory: Any, args: Any = None) -> dict[str, Any]:
    """Returns the content of the file `metadata`.

    Args:
      directory: Path of the item.
      args: Not used.
    """
    del args
    return digests_lib.read_json(os.path.join(directory, digests_lib.METADATA))


# Prefix of the files in which the other processes hand process 0 their digests.
_OWN_DIGESTS = "digests_of_process_"


class _OwnDigests:
  """A future of Orbax that digests the files this process has written.

  Attributes:
    files: The digests by name, after `result`.
  """

  def __init__(self, item_dir: str):
    self.files: dict[str, digests_lib.Digest] = {}
    self._item_dir = item_dir

  def result(self, timeout: float | None = None) -> None:
    """Takes the digests; other processes than 0 write them for process 0.

    Args:
      timeout: Not used.
    """
    del timeout
    process = jax.process_index()
    own = {
      name: path
      for name, path in _files_of_items(self._item_dir).items()
      if (match := _PROCESS.search(name))
      and int(match[1]) == process
      # TensorStore may still replace the manifest, a small file.
      and os.path.basename(name) != _MANIFEST
    }
    self.files = digests_lib.take(own, contents=True)
    if process != 0:
      name = f"{_OWN_DIGESTS}{process}.json"
      with open(os.path.join(self._item_dir, name), "w") as f:
        json.dump(self.files, f)

  def cancel(self) -> None:
    """Does nothing: taking digests cannot be interrupted."""


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
  """Arguments of `Handler.async_save`.

  Attributes:
    metadata: The content of the file `metadata`.
    digests: Whether to read the files for their crc32; otherwise only their
      sizes are recorded.
  """

  metadata: Mapping[str, Any]
  digests: bool = True


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
  """Arguments of `Handler.restore`; there are none."""


def _read_step_metadata(step_dir: str) -> dict[str, Any] | None:
  """Returns Orbax's metadata of an unfinished step, or None without them."""
  path = os.path.join(step_dir, digests_lib.STEP_METADATA)
  if not epath.Path(path).exists():
    return None
  # Another thread of Orbax adds the handlers of the items about now.
  for _ in range(100):
    try:
      content = digests_lib.read_json(path)
    except digests_lib.Damaged:  # half written
      content = {}
    if content.get("item_handlers"):
      content.pop(_COMMIT_TIME, None)
      return content
    time.sleep(0.01)
  return None


def _files_of_items(item_dir: str) -> dict[str, str]:
  """Returns the paths of the files in the other items of an unfinished step.

  Args:
    item_dir: Path of this item, still with its temporary name.

  Returns:
    The paths by the names that the files will have in the finished step.
  """
  step_dir = os.path.dirname(item_dir)
  paths = {}
  for path in map(os.fspath, files_lib.files_in(step_dir)):
    if path.startswith(f"{item_dir}/") or path.endswith(_LOCK_SUFFIX):
      continue
    item, _, rest = os.path.relpath(path, step_dir).partition("/")
    if rest:
      # Items get their final names one by one, metrics after this item.
      paths[f"{item.partition(_TEMPORARY_SUFFIX)[0]}/{rest}"] = path
  return dict(sorted(paths.items()))
