"""Reads the leaves of one step, written by any program.

    1200/default/, 1200/state/, 1200/pytree/   Orbax's managers, v0 and v1
    1200/                                      Orbax's StandardCheckpointer
    checkpoint_1200/, checkpoint_1200          Flax's own: Orbax, msgpack
    ckpt-3.flax                                clu's checkpoint: msgpack

One Orbax handler reads the directories: they differ only in names.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Mapping
import dataclasses
from typing import Any, TypeVar

from flax import serialization
import jax
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import step_files
from flaxshard.core import multihost
from flaxshard.core import trees

Path = tuple[str, ...]
Asked = jax.ShapeDtypeStruct
_Name = TypeVar("_Name", bound=Hashable)
_Leaf = TypeVar("_Leaf")

# The first key of the paths of wrapper states.
WRAPPER_STATES = "wrapper_states"

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
  with multihost.raise_on_all_processes(step_files.Damaged, ValueError):
    for read_leaves, keys in by_tree.items():
      found[read_leaves] = read_leaves(keys)
    for name, (leaf, asked) in wanted.items():
      placed[name] = _place(where, leaf, found[leaf.read][leaf.key], asked)
  return placed


def _place(where: Any, leaf: SavedLeaf, x: Any, asked: Asked) -> jax.Array:
  """Returns a leaf that was read as an array with the wanted sharding."""
  path = (leaf.tree, *leaf.key)
  if leaf.is_number and not isinstance(x, jax.Array):
    # astype wraps numbers around without an error.
    number, x = x, np.asarray(x).astype(asked.dtype)
    if x.item() != number:
      name = "/".join(path)
      raise ValueError(f"{where}: {name}: {number} is not exact in {x.dtype}.")
  if not isinstance(x, jax.Array):
    # Each device gets only its part.
    x = jax.make_array_from_callback(
      leaf.shape, asked.sharding, lambda index: x[index]
    )
  # Orbax casts dtypes and leaves gaps without an error. The kind of a PRNG key
  # is known only once it is read.
  if difference := trees.difference_by_path({path: x}, {path: asked}):
    raise ValueError(f"{where} was not restored faithfully: {difference}.")
  return x


def open_step(
  where: Any, plain_item: str | None = None
) -> dict[Path, SavedLeaf]:
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
  with multihost.raise_on_all_processes(
    step_files.Damaged, OSError, ValueError
  ):
    step_files.verify(where, jax.process_index(), jax.process_count())
  with multihost.raise_on_all_processes(step_files.Damaged, ValueError):
    return open_unverified(where, plain_item)


def open_unverified(
  where: Any, plain_item: str | None = None
) -> dict[Path, SavedLeaf]:
  """Returns `open_step` without a comparison with the digests."""
  if where.is_file():
    return _msgpack_leaves(where)
  there = step_files.trees_in(where)
  names = step_files.PLAIN if plain_item is None else (plain_item,)
  plain = next((there[name] for name in names if name in there), None)
  if plain_item is None and step_files.is_tree(where):
    plain = where
  if plain is None:
    others = sorted(there.keys() - {step_files.WRAPPERS})
    # Another program names its items as it likes: nothing is lost.
    raise (ValueError if others else step_files.Damaged)(
      f"{where} has no train state in an item {' or '.join(map(repr, names))}, "
      f"only {', '.join(map(repr, others)) or 'no items'}: plain_item is the "
      "name of the item to restore."
    )
  leaves = _orbax_leaves(plain)
  if step_files.WRAPPERS in there:
    leaves |= _orbax_leaves(there[step_files.WRAPPERS], WRAPPER_STATES)
  return leaves


def unboxed(path: Path) -> Path:
  """Returns the path of a leaf without that of its array in a box.

  Boxes are an `nnx.Variable` and a `nn.Partitioned`, saved as objects.
  """
  return path[:-1] if len(path) > 1 and path[-1] == "value" else path


def below(leaves: Mapping[Path, _Leaf], at: Path) -> dict[Path, _Leaf]:
  """Returns the leaves whose path begins with `at`, by the rest of it."""
  found = {}
  for path, x in leaves.items():
    if path[: len(at)] == at:
      found[path[len(at) :]] = x
  return found


def part(leaves: Mapping[Path, SavedLeaf], name: str) -> dict[Path, SavedLeaf]:
  """Returns the leaves of one of several states; `""` is the only one."""
  if not name:
    return dict(leaves)
  states = below(leaves, (WRAPPER_STATES, name))
  return below(leaves, (name,)) | {
    (WRAPPER_STATES, *path): leaf for path, leaf in states.items()
  }


def _orbax_leaves(directory: Any, *at: str) -> dict[Path, SavedLeaf]:
  """Returns the leaves of a tree that Orbax wrote, by their path below `at`."""
  # The metadata alone: the shapes are compared before any array is read.
  saved = ocp.PyTreeCheckpointHandler().metadata(directory).tree
  metadata = trees.leaves_by_path(saved)

  def read_leaves(wanted: Mapping[Path, Asked]) -> Mapping[Path, Any]:
    def request(path: Any, x: Any) -> Any:
      key = trees.path_strings(path)
      if key not in wanted:
        return ocp.PLACEHOLDER
      # In the saved dtype, so that `_place` notices a cast that changes it.
      if isinstance(x, ocp.metadata.value.ScalarMetadata):
        return x.dtype.type(0).item()
      is_number = leaves[(*at, *key)].is_number
      return np.zeros((), x.dtype) if is_number else wanted[key]

    item = jax.tree_util.tree_map_with_path(request, saved)
    # Each leaf is in memory twice while it is read: as it was read, and as it
    # is placed. So the bytes in flight are limited to those of the largest one;
    # Orbax wants more than the largest request.
    largest = max(_bytes_to_read(metadata[key]) for key in wanted)
    handler = ocp.PyTreeCheckpointHandler(
      handler_impl=ocp.BasePyTreeCheckpointHandler(
        restore_concurrent_bytes=max(largest, _BYTES_AT_ONCE) + 1
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


def _msgpack_leaves(file: Any) -> dict[Path, SavedLeaf]:
  """Returns the leaves in a msgpack file of Flax."""
  content = file.read_bytes()
  try:
    found = trees.leaves_by_path(serialization.msgpack_restore(content))
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
