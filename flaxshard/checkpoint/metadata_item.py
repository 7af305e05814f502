"""The item of a step that says what wrote it, and what every file is.

It lies after `default` in the alphabet, so that what takes a step's first item
reads on as before:

    checkpoints/1200/flaxshard/metadata       what wrote it, and with what: JSON
                               digests.json   size and crc32 of every file

Who has no flaxshard reads `metadata` with `ocp.args.JsonRestore`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
from typing import Any
import zlib

import jax
import orbax.checkpoint as ocp

import flaxshard
from flaxshard import wrappers as wrappers_lib
from flaxshard.checkpoint import digests as integrity
from flaxshard.checkpoint import validation
from flaxshard.state.train_state import TrainState

_METADATA = "metadata"  # as Orbax names it for JSON
# What Orbax completes in the step's metadata after we were called.
_LATER = "commit_timestamp_nsecs"
_TEMPORARY = ".orbax-checkpoint-tmp"


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
  everywhere = validation.replicated_sharding(state)
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
  path = os.path.join(step_dir, integrity.ITEM, _METADATA)
  return integrity.read_json(path) if os.path.exists(path) else None


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
    files = integrity.digests_of(_walk(step_dir, besides=item_dir))
    body = text.encode()
    files[f"{integrity.ITEM}/{_METADATA}"] = [len(body), zlib.crc32(body)]
    digests: dict[str, Any] = {"files": files, "step_metadata": None}
    step_metadata = os.path.join(step_dir, integrity.STEP_METADATA)
    if os.path.exists(step_metadata):
      known = integrity.read_json(step_metadata)
      known.pop(_LATER, None)
      digests["step_metadata"] = known
    digests["crc32"] = integrity.own_crc(digests)
    with open(os.path.join(item_dir, integrity.DIGESTS), "w") as f:
      json.dump(digests, f, indent=1)

  def restore(self, directory: Any, args: Any = None) -> dict[str, Any]:
    """Returns what the file `metadata` says."""
    del args
    return integrity.read_json(os.path.join(directory, _METADATA))


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
