"""Reads the train state in one step of a checkpoint, written by any program.

    1200/default/, 1200/state/, 1200/pytree/   Orbax's managers, v0 and v1
    1200/                                      Orbax's StandardCheckpointer
    checkpoint_1200/, checkpoint_1200          Flax's own: Orbax, msgpack
    ckpt-3.flax                                clu's checkpoint: msgpack

One Orbax handler reads the directories: they differ only in names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import math
from typing import Any

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.checkpoint import digests
from flaxshard.checkpoint import step_names
from flaxshard.core import trees

PyTree = Any
Path = tuple[str, ...]
PLAIN_ITEMS = ("default", "state", "pytree")
WRAPPERS_ITEM = "wrappers"
_METADATA = "_METADATA"

# Least number of bytes that are read at once, so that many small leaves are
# read together.
_BYTES_AT_ONCE = 16 << 20


class NotRestorableError(ValueError):
  """A step is not damaged, but cannot be restored as it was asked for."""


@dataclasses.dataclass(frozen=True)
class SavedScalar:
  """A saved number that may be restored with another dtype of its kind.

  It is a Python number, which has no dtype of its own, or the step, an integer
  that other programs save with 64 bits.

  Attributes:
    dtype: The widest dtype of its kind, or that of the step.
    is_python: Whether it is a Python number.
    shape: `()`.
  """

  dtype: Any
  is_python: bool
  shape: tuple[int, ...] = ()

  def fits(self, wanted: Any) -> bool:
    """Returns whether it may be restored as the wanted shape and dtype."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return tuple(wanted.shape) == () and any(
      jnp.issubdtype(self.dtype, kind) and jnp.issubdtype(wanted.dtype, kind)
      for kind in kinds
    )


@dataclasses.dataclass(frozen=True)
class SavedTree:
  """A tree on disk.

  Attributes:
    item: The name of its item, or of its file.
    leaves: Metadata of arrays and `SavedScalar`s, by path. PRNG keys appear as
      the integers on disk.
    read: Reads some leaves, given the shape, dtype and sharding to restore
      each with, by path. An array may have another dtype than was asked for.
  """

  item: str
  leaves: Mapping[Path, Any]
  read: Callable[[Mapping[Path, jax.ShapeDtypeStruct]], dict[Path, Any]]

  def part(self, name: str, at: int) -> SavedTree:
    """Returns the part of a tree below a key.

    Args:
      name: The key.
      at: Its index in the paths, which lack it in the part.
    """
    sources = {
      (*path[:at], *path[at + 1 :]): path
      for path in self.leaves
      if path[at] == name
    }

    def read(
      wanted: Mapping[Path, jax.ShapeDtypeStruct],
    ) -> dict[Path, Any]:
      found = self.read({sources[path]: x for path, x in wanted.items()})
      return {path: found[sources[path]] for path in wanted}

    leaves = {path: self.leaves[source] for path, source in sources.items()}
    return SavedTree(self.item, leaves, read)


def is_step(path: step_names.Directory) -> bool:
  """Returns whether a path is one checkpoint, not a directory of several."""
  path = step_names.as_path(path)
  if path.is_file() or (path / _METADATA).exists():
    return True
  return any(not step_names.ANY.fullmatch(name) for name in items(path))


def items(where: step_names.Directory) -> dict[str, step_names.Directory]:
  """Returns the path of each tree that Orbax wrote into a step, by name."""
  where = step_names.as_path(where)
  if not where.is_dir():
    return {}
  return {
    path.name: path
    for path in sorted(where.iterdir())
    if (path / _METADATA).exists()
  }


def plain(where: step_names.Directory, item: str | None = None) -> SavedTree:
  """Returns the train state of a step.

  Args:
    where: The directory of the step, or the file.
    item: The name of its item; None looks for one of `PLAIN_ITEMS`.

  Raises:
    Damaged: The step has no item of a train state.
    NotRestorableError: It only has items of other names.
    ValueError: Flax wrote the file from several processes.
  """
  where = step_names.as_path(where)
  if where.is_file():
    return _msgpack_tree(where)
  if item is None and (where / _METADATA).exists():
    return orbax_tree(where, where.name)
  there = items(where)
  names = PLAIN_ITEMS if item is None else (item,)
  for name in names:
    if name in there:
      return orbax_tree(there[name], name)
  wanted = " or ".join(map(repr, names))
  message = f"{where} has no train state in an item {wanted}"
  # Another program names its items as it likes: nothing is lost.
  if others := sorted(there.keys() - {WRAPPERS_ITEM}):
    raise NotRestorableError(
      f"{message}, only {', '.join(map(repr, others))}: plain_item is the name "
      "of the item to restore."
    )
  raise digests.Damaged(f"{message}.")


def orbax_tree(
  directory: step_names.Directory, item: str, *prefix: str
) -> SavedTree:
  """Returns a tree that Orbax wrote.

  Args:
    directory: The directory of the item.
    item: The name of the item.
    *prefix: Keys to put before the path of each leaf.
  """
  # The metadata alone: the shapes are compared before any array is read.
  handler = ocp.PyTreeCheckpointHandler()
  saved = handler.metadata(step_names.as_path(directory)).tree
  metadata = {
    (*prefix, *path): x for path, x in trees.leaves_by_path(saved).items()
  }

  def read_leaves(
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
  ) -> dict[Path, Any]:
    def request(path: Any, x: Any) -> Any:
      full_path = (*prefix, *trees.path_strings(path))
      asked = wanted.get(full_path)
      if asked is None:
        return ocp.PLACEHOLDER
      # In the saved dtype, so that `_place` notices a cast that changes it.
      if _is_number(x):
        return x.dtype.type(0).item()
      is_cast = _is_step(full_path, x) and x.dtype != asked.dtype
      return np.zeros((), x.dtype) if is_cast else asked

    if not wanted:
      return {}
    tree = jax.tree_util.tree_map_with_path(request, saved)
    found = trees.leaves_by_path(
      read_item(directory, tree, map(metadata.__getitem__, wanted))
    )
    return {
      path: _place(directory, path, found[path[len(prefix) :]], asked)
      for path, asked in wanted.items()
    }

  leaves = {
    path: SavedScalar(x.dtype, _is_number(x))
    if _is_number(x) or _is_step(path, x)
    else x
    for path, x in metadata.items()
  }
  return SavedTree(item, leaves, read_leaves)


def read_item(
  directory: step_names.Directory, item: PyTree, leaves: Iterable[Any]
) -> PyTree:
  """Reads leaves of an item, few at a time.

  Each leaf is in memory twice while it is read: as it was read, and as it is
  placed. So the bytes in flight are limited to those of the largest leaf.

  Args:
    directory: The directory of the item.
    item: What to restore each leaf with; `ocp.PLACEHOLDER` leaves one out.
    leaves: Metadata of the leaves to read.
  """
  largest = max((_bytes_to_read(x) for x in leaves), default=0)
  handler = ocp.PyTreeCheckpointHandler(
    handler_impl=ocp.BasePyTreeCheckpointHandler(
      # Orbax wants more than the largest request.
      restore_concurrent_bytes=max(largest, _BYTES_AT_ONCE) + 1,
    )
  )
  return handler.restore(
    step_names.as_path(directory),
    args=ocp.args.PyTreeRestore(
      item=item,
      restore_args=ocp.checkpoint_utils.construct_restore_args(item),
    ),
  )


def _bytes_to_read(x: Any) -> int:
  """Returns at most how many bytes Orbax reserves to read an array."""
  chunk = x.storage.chunk_shape if getattr(x, "storage", None) else None
  # Chunks are read whole, also those that stick out of the array.
  size = [
    -(-n // c) * c for n, c in zip(x.shape, chunk or x.shape, strict=True)
  ]
  return math.prod(size) * np.dtype(x.dtype).itemsize


def _is_number(x: Any) -> bool:
  """Returns whether metadata is that of a Python number."""
  return isinstance(x, ocp.metadata.value.ScalarMetadata)


def _is_step(path: Path, x: Any) -> bool:
  """Returns whether a leaf is the step, as an array."""
  return (
    path == ("step",) and x.shape == () and jnp.issubdtype(x.dtype, jnp.integer)
  )


def _msgpack_tree(file: step_names.Directory) -> SavedTree:
  """Returns the tree in a msgpack file of Flax."""
  content = file.read_bytes()
  try:
    found = trees.leaves_by_path(serialization.msgpack_restore(content))
  except Exception as e:  # msgpack has no one type of error for a wrong file
    raise digests.Damaged(f"{file} is no checkpoint of Flax: {e}") from e
  leaves: dict[Path, Any] = {}
  for path, x in found.items():
    if isinstance(x, (bool, int, float, complex)):
      leaves[path] = SavedScalar(np.result_type(type(x)), is_python=True)
    elif isinstance(x, (np.ndarray, np.generic)) and _is_step(path, x):
      leaves[path] = SavedScalar(x.dtype, is_python=False)
    elif isinstance(x, (np.ndarray, np.generic)):
      leaves[path] = jax.ShapeDtypeStruct(np.shape(x), x.dtype)
    else:
      raise ValueError(
        f"{file}: {'/'.join(path)} must be an array, got {x!r}. Files that "
        "Flax wrote from several processes cannot be read."
      )

  def read_leaves(
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
  ) -> dict[Path, Any]:
    return {
      path: _place(file, path, found[path], asked)
      for path, asked in wanted.items()
    }

  return SavedTree(file.name, leaves, read_leaves)


def _place(
  where: step_names.Directory, path: Path, x: Any, asked: jax.ShapeDtypeStruct
) -> Any:
  """Returns a leaf that was read as an array with the wanted sharding."""
  if isinstance(x, jax.Array):
    return x
  if not isinstance(x, (np.ndarray, np.generic)) or path == ("step",):
    # astype wraps numbers around without an error.
    number = np.asarray(x).astype(asked.dtype)
    if number.item() != x:
      raise NotRestorableError(
        f"{where}: {'/'.join(path)}: {x} is not exact in {asked.dtype}."
      )
    x = number
  # Each device gets only its part.
  return jax.make_array_from_callback(
    np.shape(x), asked.sharding, lambda index: x[index]
  )
