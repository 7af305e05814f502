"""Reads the leaves of one step or file, written by any program.

    1200/default/, 1200/state/, 1200/pytree/   Orbax's managers, v0 and v1
    1200/                                      Orbax's StandardCheckpointer
    checkpoint_1200/, checkpoint_1200          Flax's own: Orbax, msgpack
    ckpt-3.flax                                clu's checkpoint: msgpack
    model.safetensors, ...safetensors.index.json   parameters alone

One Orbax handler reads the directories: they differ only in names. All but
safetensors have the paths of a train state, or those of `LAYOUTS`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Mapping
import dataclasses
import importlib
import json
from typing import Any, TypeVar

from flax import serialization
import jax
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import step_files
from flaxshard.core import checks
from flaxshard.core import files as files_lib
from flaxshard.core import multihost
from flaxshard.core import trees

Path = tuple[str, ...]
Layouts = Mapping[Path, Path]
Asked = jax.ShapeDtypeStruct
_Name = TypeVar("_Name", bound=Hashable)
_Leaf = TypeVar("_Leaf")

# The first key of the paths of wrapper states.
WRAPPER_STATES = "wrapper_states"

# The ends of paths of other programs, and what a train state has in their
# place. An array in a box, an `nnx.Variable` or a `nn.Partitioned`:
BOXES: Layouts = {("value",): ()}
LAYOUTS: Layouts = {
  **BOXES,
  # Flax's `DynamicScale`, a field in its ImageNet and WMT examples.
  ("dynamic_scale", "scale"): (WRAPPER_STATES, "loss_scale", "scale"),
  ("dynamic_scale", "fin_steps"): (WRAPPER_STATES, "loss_scale", "good_steps"),
}

_SAFETENSORS = ".safetensors"
# It lists which file has which tensor, of a model in several files.
_SAFETENSORS_INDEX = ".safetensors.index.json"

# The errors of reading that all processes raise if one has them.
ERRORS = (step_files.Damaged, OSError, ValueError)

# Least number of bytes that are read at once, so that many small leaves are
# read together.
_BYTES_AT_ONCE = 16 << 20


@dataclasses.dataclass(frozen=True)
class SavedLeaf:
  """A leaf on disk.

  Attributes:
    shape: Its shape. PRNG keys appear as the integers on disk.
    dtype: Its dtype; the widest of its kind for a Python number, which has no
      dtype of its own.
    is_number: Whether it is a Python number or the step, which other programs
      save with 64 bits: it may have another dtype with the same value.
    tree: The name of its item, or of its file.
    key: Its path there.
    read: Reads leaves of this tree, given the shape, dtype and sharding to
      restore each with, by key. A leaf may be on the host, or be read when it
      is indexed, or have another dtype than asked for.
  """

  shape: tuple[int, ...]
  dtype: Any
  is_number: bool
  tree: str
  key: Path
  read: Callable[[Mapping[Path, Asked]], Mapping[Path, Any]]


Leaves = dict[Path, SavedLeaf]


def read(
  where: Any, wanted: Mapping[_Name, tuple[SavedLeaf, Asked]]
) -> dict[_Name, jax.Array]:
  """Reads leaves, those of one tree together. All processes must call it.

  Args:
    where: The step or the file that has the leaves, for error messages.
    wanted: Each leaf, and the shape, dtype and sharding to restore it with.

  Raises:
    Damaged: The files are damaged.
    ValueError: A leaf was not restored as it was asked for; the message names
      the first.
  """
  by_tree: Any = collections.defaultdict(dict)
  for leaf, asked in wanted.values():
    by_tree[leaf.read][leaf.key] = asked
  found: Any = {}
  placed: dict[_Name, jax.Array] = {}
  # Reading needs no other process.
  with multihost.raise_on_all_processes(*ERRORS):
    for read_leaves, keys in by_tree.items():
      found[read_leaves] = read_leaves(keys)
    for name, (leaf, asked) in wanted.items():
      placed[name] = _place(where, leaf, found[leaf.read][leaf.key], asked)
  return placed


def _place(where: Any, leaf: SavedLeaf, x: Any, asked: Asked) -> jax.Array:
  """Returns a leaf that was read as an array with the wanted sharding."""
  path = (leaf.tree, *leaf.key)
  label = f"{where}: {'/'.join(path)}"
  if leaf.is_number and not isinstance(x, jax.Array):
    # astype wraps numbers around without an error.
    number, x = x, np.asarray(x).astype(asked.dtype)
    if x.item() != number:
      raise ValueError(f"{label}: {number} is not exact in {x.dtype}.")
  if not isinstance(x, jax.Array):

    def read_part(index: Any) -> Any:
      part = x[index]
      trees.check_integers(label, part)
      return part

    # Each device gets only its part.
    x = jax.make_array_from_callback(leaf.shape, asked.sharding, read_part)
  # Orbax casts dtypes and leaves gaps without an error. The kind of a PRNG key
  # is known only once it is read.
  if difference := trees.difference_by_path({path: x}, {path: asked}):
    raise ValueError(f"{where} was not restored faithfully: {difference}.")
  return x


def open_step(where: Any, plain_item: str | None = None) -> Leaves:
  """Compares a step with its digests; returns its leaves by path.

  Paths begin with the field of the train state, as in a train state.

  Args:
    where: The directory of the step, or its file.
    plain_item: The item that holds the train state; None looks for one of
      `step_files.PLAIN`.

  Raises:
    Damaged: The files differ from those that were saved, or hold no train
      state.
    ValueError: The step only has items of other names: it is not damaged.
  """
  # Before Orbax reads anything: it returns wrong values for flipped bits.
  # Each process compares a part, with one result for all.
  with multihost.raise_on_all_processes(*ERRORS):
    step_files.verify(where)
  with multihost.raise_on_all_processes(*ERRORS):
    return open_unverified(where, plain_item)


def open_unverified(where: Any, plain_item: str | None = None) -> Leaves:
  """Returns `open_step` without a comparison with the digests."""
  if where.is_file():
    return _msgpack_leaves(where)
  there = step_files.trees_in(where)
  names = step_files.PLAIN if plain_item is None else (plain_item,)
  # The directory itself is the train state if it is a tree.
  places = ("", *names) if plain_item is None else names
  plain = next((there[name] for name in places if name in there), None)
  if plain is None:
    others = sorted(there.keys() - {"", step_files.WRAPPERS})
    # Another program names its items as it likes: nothing is lost.
    raise (ValueError if others else step_files.Damaged)(
      f"{where} has no train state in an item {' or '.join(map(repr, names))}, "
      f"only {', '.join(map(repr, others)) or 'no items'}: plain_item of "
      "checkpoint.restore, or item of init_from, names the one to read."
    )
  leaves = _orbax_leaves(plain)
  if step_files.WRAPPERS in there:
    leaves |= _orbax_leaves(there[step_files.WRAPPERS], WRAPPER_STATES)
  return leaves


def in_train_state(path: Path, layouts: Layouts = LAYOUTS) -> Path:
  """Returns the path that a train state has for a leaf of another program.

  Args:
    path: The path of the leaf on disk.
    layouts: The ends to replace.

  Example:
    >>> in_train_state(("params", "w", "value"))
    ('params', 'w')
  """
  for there, here in layouts.items():
    start = path[: -len(there)]
    if start + there == path and start + here:
      return start + here
  return path


def below(leaves: Mapping[Path, _Leaf], at: Path) -> dict[Path, _Leaf]:
  """Returns the leaves whose path begins with `at`, by the rest of it."""
  n = len(at)
  return {path[n:]: x for path, x in leaves.items() if path[:n] == at}


def part(leaves: Leaves, name: str) -> Leaves:
  """Returns the leaves of one of several states; `""` is the only one."""
  if not name:
    return dict(leaves)
  states = below(leaves, (WRAPPER_STATES, name))
  return below(leaves, (name,)) | {
    (WRAPPER_STATES, *path): leaf for path, leaf in states.items()
  }


def _orbax_leaves(directory: Any, *at: str) -> Leaves:
  """Returns the leaves of a tree that Orbax wrote, by their path below `at`."""
  # The metadata alone: the shapes are compared before any array is read.
  saved = ocp.PyTreeCheckpointHandler().metadata(directory).tree
  metadata = trees.leaves_by_path(saved)

  def read_leaves(wanted: Mapping[Path, Asked]) -> Mapping[Path, Any]:
    requests, largest = [], _BYTES_AT_ONCE
    for key, x in metadata.items():
      request = wanted.get(key, ocp.PLACEHOLDER)
      if key in wanted:
        largest = max(largest, _bytes_to_read(x))
        # In the saved dtype, so that `_place` notices a cast that changes it.
        if isinstance(x, ocp.metadata.value.ScalarMetadata):
          request = x.dtype.type(0).item()
        elif leaves[(*at, *key)].is_number or x.dtype in (np.int64, np.uint64):
          # On the host, as Orbax too wraps integers around.
          request = np.zeros(x.shape, x.dtype)
      requests.append(request)
    item = jax.tree.unflatten(jax.tree.structure(saved), requests)
    # Each leaf is in memory twice while it is read: as it was read, and as it
    # is placed. So the bytes in flight are limited to those of the largest one;
    # Orbax wants more than the largest request.
    handler = ocp.PyTreeCheckpointHandler(
      handler_impl=ocp.BasePyTreeCheckpointHandler(
        restore_concurrent_bytes=largest + 1
      )
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
    return trees.leaves_by_path(handler.restore(directory, args=args))

  leaves = {}
  for key, x in metadata.items():
    is_number = isinstance(x, ocp.metadata.value.ScalarMetadata)
    leaves[(*at, *key)] = SavedLeaf(
      shape=tuple(x.shape),
      dtype=x.dtype,
      is_number=is_number or (key == ("step",) and x.shape == ()),
      tree=directory.name,
      key=key,
      read=read_leaves,
    )
  return leaves


def _bytes_to_read(x: Any) -> int:
  """Returns at most how many bytes Orbax reserves to read an array."""
  chunk = x.storage.chunk_shape if getattr(x, "storage", None) else None
  # Chunks are read whole, also those that stick out of the array.
  size = np.dtype(x.dtype).itemsize
  for n, c in zip(x.shape, chunk or x.shape, strict=True):
    size *= -(-n // c) * c
  return size


def _msgpack_leaves(file: Any) -> Leaves:
  """Returns the leaves in a msgpack file of Flax."""
  content = file.read_bytes()
  try:
    found = trees.leaves_by_path(dict(serialization.msgpack_restore(content)))
  except Exception as e:  # msgpack has no one type of error for a wrong file
    raise step_files.Damaged(f"{file} is no checkpoint of Flax: {e}") from e
  read_leaves = lambda wanted: found
  leaves = {}
  for key, x in found.items():
    is_number = isinstance(x, (bool, int, float, complex)) or key == ("step",)
    x = np.asarray(x)
    leaves[key] = SavedLeaf(
      x.shape, x.dtype, is_number and x.shape == (), file.name, key, read_leaves
    )
  return leaves


# -- Safetensors.


def find_safetensors(path: Any) -> Any:
  """Returns the safetensors file or index at a path, or None without one.

  Args:
    path: A file, an index, or a directory with an index or with one file.

  Raises:
    ValueError: A directory has several files and no index.
  """
  if path.is_file():
    is_one = path.name.endswith((_SAFETENSORS, _SAFETENSORS_INDEX))
    return path if is_one else None
  names = sorted(step_files.names_in(path))
  found = [name for name in names if name.endswith(_SAFETENSORS_INDEX)]
  found = found or [name for name in names if name.endswith(_SAFETENSORS)]
  if len(found) > 1:
    raise ValueError(
      f"{path} has several safetensors files or indexes: {', '.join(found)}. "
      "Give the path of one of them."
    )
  return path / found[0] if found else None


def open_safetensors(file: Any) -> Leaves:
  """Returns the tensors of a safetensors file, or of all files of an index.

  A name such as `encoder.0.weight` has the path `encoder/0/weight`; slashes
  separate instead of dots in names that have them.

  Args:
    file: The file or the index.

  Raises:
    ImportError: The package safetensors is not installed.
    ValueError: A file is missing or no safetensors file, the index names a
      tensor that its file lacks, or names differ in dots and slashes alone.
  """
  with checks.extra(str(file), "safetensors"):
    importlib.import_module("safetensors")
  try:
    if file.name.endswith(_SAFETENSORS_INDEX):
      names = dict(json.loads(file.read_bytes())["weight_map"])
      opened = {n: _open_tensors(file.parent / n) for n in set(names.values())}
      tensors = {k: opened[name][k] for k, name in names.items()}
    else:
      tensors = _open_tensors(file)
  except Exception as e:  # the package has an error of its own
    raise ValueError(f"{file} cannot be read: {e!r}.") from e
  found, leaves = dict[Path, Any](), {}
  read_leaves = lambda wanted: found
  for name, (shape, dtype, x) in tensors.items():
    key = tuple(name.split("/" if "/" in name else "."))
    found[key] = x
    leaves[key] = SavedLeaf(shape, dtype, False, file.name, key, read_leaves)
  if len(leaves) < len(tensors):
    raise ValueError(
      f"{file} has tensors whose names differ in dots and slashes alone."
    )
  return leaves


def _open_tensors(file: Any) -> dict[str, tuple[tuple[int, ...], Any, Any]]:
  """Returns shape, dtype and what reads a part when it is indexed, by name."""
  safetensors = importlib.import_module("safetensors")
  tensors = {}
  if files_lib.is_bucket(file):
    # The package opens files on disk alone, so the whole file is read.
    load = importlib.import_module("safetensors.numpy").load
    for name, x in load(file.read_bytes()).items():
      tensors[name] = x.shape, x.dtype, x
    return tensors
  opened = safetensors.safe_open(str(file), framework="numpy")
  for name in opened.keys():
    x = opened.get_slice(name)
    shape = tuple(x.get_shape())
    # A slice of a scalar is an error.
    x = x if shape else opened.get_tensor(name)
    # The header has names of dtypes that NumPy does not know.
    tensors[name] = shape, x[:0].dtype if shape else x.dtype, x
  return tensors
