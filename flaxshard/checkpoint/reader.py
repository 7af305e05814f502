"""What lies on disk in one step of a checkpoint, whoever wrote it.

    1200/default/, 1200/state/, 1200/pytree/   Orbax's managers, v0 and v1
    1200/                                      Orbax's StandardCheckpointer
    checkpoint_1200/, checkpoint_1200          Flax's own: Orbax, msgpack

All but the last are read by the same handler: they differ in names only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
import re
from typing import Any

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from flaxshard.core import trees

PyTree = Any
Path = tuple[str, ...]
# A pathlib.Path, or what a manager has in its place for a bucket.
Directory = Any

PLAIN_ITEMS = ("default", "state", "pytree")
_METADATA = "_METADATA"
# Names of steps. Managers can be told of a prefix, and of zeros in front.
ANY = re.compile(r"(?:[A-Za-z]\w*[_-])?(\d+)")
FLAX = re.compile(r"checkpoint_(\d+)")


@dataclasses.dataclass(frozen=True)
class SavedScalar:
  """A Python number on disk: it has a value, but no dtype of its own.

  Attributes:
    dtype: The widest of its kind.
  """

  dtype: Any
  shape: tuple[int, ...] = ()

  def fits(self, wanted: Any) -> bool:
    """Whether a scalar of the wanted dtype may have its value."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return tuple(wanted.shape) == () and any(
      jnp.issubdtype(self.dtype, kind) and jnp.issubdtype(wanted.dtype, kind)
      for kind in kinds
    )


@dataclasses.dataclass(frozen=True)
class SavedTree:
  """A tree on disk.

  Attributes:
    item: The name of the item that it is, or of its file.
    leaves: Arrays and `SavedScalar`s, by path. PRNG keys are
      the integers that lie on disk.
    read: Reads leaves: given shapes, dtypes and shardings of some by path, it
      returns those arrays. It may return them in another dtype than asked for.
  """

  item: str
  leaves: Mapping[Path, Any]
  read: Callable[[Mapping[Path, jax.ShapeDtypeStruct]], dict[Path, Any]]


def as_path(path: Any) -> Directory:
  """Returns a string as a path; a path is one already."""
  return path if hasattr(path, "iterdir") else pathlib.Path(path)


def steps(
  directory: Directory, names: re.Pattern[str] = ANY
) -> dict[int, Directory]:
  """Returns where the steps in a directory lie, in ascending order.

  Args:
    directory: Where to look; only at names. `7` comes before `checkpoint_7`.
    names: Which ones count: `ANY`, or `FLAX`.
  """
  found: dict[int, Directory] = {}
  directory = as_path(directory)
  if directory.is_dir():
    for path in sorted(directory.iterdir()):
      if match := names.fullmatch(path.name):
        found.setdefault(int(match[1]), path)
  return dict(sorted(found.items()))


def is_one(path: Directory) -> bool:
  """Whether a path is one checkpoint, and not a directory of several."""
  path = as_path(path)
  if path.is_file() or (path / _METADATA).exists():
    return True
  return any(not ANY.fullmatch(name) for name in items(path))


def items(where: Directory) -> dict[str, Directory]:
  """Returns the trees that Orbax wrote into a step, by name."""
  where = as_path(where)
  if not where.is_dir():
    return {}
  return {
    path.name: path
    for path in sorted(where.iterdir())
    if (path / _METADATA).exists()
  }


def plain(where: Directory, item: str | None = None) -> SavedTree:
  """Returns the train state of a step.

  Args:
    where: The directory of the step, or the file.
    item: The item that it is in; None looks for one.

  Raises:
    ValueError: There is none, or it cannot be read.
  """
  where = as_path(where)
  if where.is_file():
    return _msgpack_tree(where)
  if item is None and (where / _METADATA).exists():
    return orbax_tree(where, where.name)
  there = items(where)
  names = PLAIN_ITEMS if item is None else (item,)
  for name in names:
    if name in there:
      return orbax_tree(there[name], name)
  raise ValueError(
    f"{where} has no train state in an item {' or '.join(map(repr, names))}; "
    f"there are {sorted(there)}."
  )


def orbax_tree(directory: Directory, item: str) -> SavedTree:
  """Returns a tree that Orbax wrote."""
  saved = metadata(directory)
  leaves = {
    path: SavedScalar(x.dtype) if _is_number(x) else x
    for path, x in trees.leaves_by_path(saved).items()
  }

  def read(
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
  ) -> dict[Path, Any]:
    def one(path: Any, x: Any) -> Any:
      asked = wanted.get(trees.path_strings(path))
      if asked is None:
        return ocp.PLACEHOLDER
      return x.dtype.type(0).item() if _is_number(x) else asked

    tree = jax.tree_util.tree_map_with_path(one, saved)
    found = trees.leaves_by_path(read_item(directory, tree))
    return {
      path: _placed("/".join(path), found[path], asked)
      for path, asked in wanted.items()
    }

  return SavedTree(item, leaves, read)


def metadata(directory: Directory) -> PyTree:
  """Returns shapes and dtypes of what lies in an item."""
  handler = ocp.PyTreeCheckpointHandler()
  return handler.metadata(as_path(directory)).tree


def read_item(directory: Directory, item: PyTree) -> PyTree:
  """Reads what an item asks for; `ocp.PLACEHOLDER` is left out."""
  if all(x is ocp.PLACEHOLDER for x in jax.tree.leaves(item)):
    return item
  return ocp.PyTreeCheckpointHandler().restore(
    as_path(directory),
    args=ocp.args.PyTreeRestore(
      item=item,
      restore_args=ocp.checkpoint_utils.construct_restore_args(item),
    ),
  )


def _is_number(x: Any) -> bool:
  return isinstance(x, ocp.metadata.value.ScalarMetadata)


def _msgpack_tree(file: Directory) -> SavedTree:
  try:
    saved = serialization.msgpack_restore(file.read_bytes())
    found = trees.leaves_by_path(saved)
  except Exception as e:  # whatever msgpack makes of another kind of file
    raise ValueError(f"{file} is no checkpoint of Flax: {e}") from e
  leaves: dict[Path, Any] = {}
  for path, x in found.items():
    if isinstance(x, (bool, int, float, complex)):
      leaves[path] = SavedScalar(np.result_type(type(x)))
    elif isinstance(x, (np.ndarray, np.generic)):
      leaves[path] = jax.ShapeDtypeStruct(np.shape(x), x.dtype)
    else:
      raise ValueError(
        f"{file}: {'/'.join(path)} must be an array, got {x!r}: what Flax "
        "wrote from several processes cannot be read."
      )

  def read(
    wanted: Mapping[Path, jax.ShapeDtypeStruct],
  ) -> dict[Path, Any]:
    return {
      path: _placed("/".join(path), found[path], asked)
      for path, asked in wanted.items()
    }

  return SavedTree(file.name, leaves, read)


def _placed(name: str, x: Any, asked: jax.ShapeDtypeStruct) -> Any:
  """Returns what was read as an array that lies as asked for."""
  if isinstance(x, jax.Array):
    return x
  if not isinstance(x, (np.ndarray, np.generic)):
    number = np.asarray(x).astype(asked.dtype)
    if number.item() != x:
      raise ValueError(f"{name}: {x!r} is not exact in {asked.dtype}.")
    x = number
  if asked.sharding is None:
    return jnp.asarray(x)
  # Each device is handed its own part.
  return jax.make_array_from_callback(
    np.shape(x), asked.sharding, lambda index: x[index]
  )
