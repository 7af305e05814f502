"""Checks of the leaves of a state: before a save, and around a restore."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees

PyTree = Any
Path = tuple[str, ...]

_KINDS = (jnp.number, jnp.bool_, jax.dtypes.prng_key)


def check_savable(argument: str, tree: PyTree) -> None:
  """Raises an error at the first leaf that Orbax cannot save and restore.

  Orbax notices some of these leaves in the middle of a save, and others never.
  A Python number, for example, is saved but not restored as a number.

  Args:
    argument: Name of the tree, for the error message.
    tree: A tree of arrays.

  Raises:
    TypeError: A leaf is not an array of numbers, booleans or random keys, or
      JAX would change its dtype.
    ValueError: An array has no elements or was deleted, for example by
      donating it.

  Example:
    >>> check_savable("state", {"a": jnp.ones(2), "b": jnp.zeros((0, 3))})
    Traceback (most recent call last):
    ValueError: state[b] has no elements, shape (0, 3): Orbax cannot save that.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = f"{argument}[{trees.path_string(path)}]"
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    if not is_array or isinstance(leaf, jax.core.Tracer):
      raise TypeError(f"{name} must be an array, got {leaf!r}.")
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in _KINDS):
      raise TypeError(
        f"{name} must be an array of numbers, booleans or random keys, got "
        f"dtype {leaf.dtype}."
      )
    if isinstance(leaf, jax.Array):
      if leaf.is_deleted():
        raise ValueError(
          f"{name} was deleted: save the state before you donate it, or save "
          "the result of the step that it was donated to."
        )
    # NumPy has 64 bits by default, JAX 32.
    elif jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
      raise TypeError(
        f"{name} is {leaf.dtype}, which JAX supports only with jax_enable_x64: "
        "it would be restored as another dtype."
      )
    if 0 in np.shape(leaf):
      raise ValueError(
        f"{name} has no elements, shape {np.shape(leaf)}: Orbax cannot save "
        "that."
      )


def abstract(tree: PyTree) -> PyTree:
  """Returns the shape, dtype and sharding to restore each leaf with.

  Args:
    tree: A tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings.

  Returns:
    A tree of `jax.ShapeDtypeStruct`s. Each has a sharding. A leaf that is not
    placed on a mesh is replicated over the mesh of the other leaves.
  """
  replicated = replicated_sharding(tree)

  def describe_leaf(x: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None)
    placed = isinstance(sharding, jax.sharding.NamedSharding) or (
      isinstance(x, jax.Array) and x.committed
    )
    # Restored arrays are committed, and jit refuses arrays that are committed
    # to different devices: an optimizer's count must not stay on device 0.
    if replicated is not None and not placed:
      sharding = replicated
    if sharding is None:
      sharding = jax.device_put(0).sharding  # of the default device
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

  return jax.tree.map(describe_leaf, tree)


def replicated_sharding(tree: PyTree) -> jax.sharding.NamedSharding | None:
  """Returns the replicated sharding on the mesh of a tree; None without one."""
  for x in jax.tree.leaves(tree):
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec()
      )
  return None


def check_saved(
  where: str,
  item: str,
  saved: Mapping[Path, Any],
  wanted: Mapping[Path, Any],
) -> None:
  """Raises a ValueError if an item of a checkpoint has other leaves.

  Args:
    where: The directory of the checkpoint, for the error message.
    item: The item, for the error message.
    saved: Metadata of the saved leaves, by path. PRNG keys are saved as
      integers.
    wanted: Shape and dtype of the leaves that it must have, by path.
  """
  difference = trees.difference_by_path(
    saved, {path: as_saved(x) for path, x in wanted.items()}
  )
  if difference:
    raise ValueError(
      f"{where} was written by another model or optimizer: in its item "
      f"{item!r}, {difference}."
    )


def as_saved(x: Any) -> Any:
  """Returns the shape and dtype with which Orbax saves a leaf."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.eval_shape(jax.random.key_data, x)
  return x


def check_restored(
  where: str, restored: Mapping[Path, Any], wanted: Mapping[Path, Any]
) -> None:
  """Raises a ValueError unless each leaf was restored as requested.

  Args:
    where: The directory of the checkpoint, for the error message.
    restored: The restored arrays, by path.
    wanted: The requested shapes and dtypes, by path.
  """
  # Orbax casts dtypes and leaves gaps without an error. The kind of a PRNG key
  # is known only once it is read.
  difference = trees.difference_by_path(restored, wanted)
  if difference:
    raise ValueError(f"{where} was not restored faithfully: {difference}.")
