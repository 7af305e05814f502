"""What a checkpoint is restored into, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees

PyTree = Any
Path = tuple[str, ...]


def abstract(tree: PyTree, like: PyTree = None) -> PyTree:
  """Returns shapes, dtypes and shardings of arrays, to restore into.

  Leaves that no computation has placed yet (an optimizer's count) are put on
  every device of the mesh that the others lie on: they come back committed,
  and jit refuses arrays committed to different devices.

  Args:
    tree: A tree of arrays.
    like: A larger tree of which one leaf may tell the mesh; None is `tree`.
  """
  replicated = on_every_device(tree if like is None else like)

  def one(x: Any) -> jax.ShapeDtypeStruct:
    sharding = x.sharding if isinstance(x, jax.Array) else replicated
    if replicated is not None and not getattr(x, "committed", False):
      sharding = replicated
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

  return jax.tree.map(one, tree)


def on_every_device(tree: PyTree) -> jax.sharding.NamedSharding | None:
  """Returns the sharding of what is whole on the mesh of a tree, if any."""
  for x in jax.tree.leaves(tree):
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, jax.sharding.NamedSharding):
      return jax.sharding.NamedSharding(
        sharding.mesh, jax.sharding.PartitionSpec()
      )
  return None


def check_same(
  where: str,
  item: str,
  saved: Mapping[Path, Any],
  wanted: Mapping[Path, Any],
) -> None:
  """Raises a ValueError unless an item on disk has the tree that is wanted.

  Args:
    where: The directory of the checkpoint.
    item: The item in it.
    saved: Its metadata, by path; of PRNG keys, the integers that lie on disk.
    wanted: Arrays, or shapes and dtypes of them, by path.
  """
  difference = trees.difference_by_path(
    saved, {path: _as_saved(x) for path, x in wanted.items()}
  )
  if difference:
    raise ValueError(
      f"{where} was written by another model or optimizer: in its item "
      f"{item!r}, {difference}."
    )


def _as_saved(x: Any) -> Any:
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.eval_shape(jax.random.key_data, x)
  return x


def check_restored(
  where: str, restored: Mapping[Path, Any], wanted: Mapping[Path, Any]
) -> None:
  """Raises a ValueError unless all came back, by path, as it was asked for."""
  # Orbax casts dtypes and fills gaps without a word. What kind of PRNG key it
  # is, one sees only now.
  difference = trees.difference_by_path(restored, wanted)
  if difference:
    raise ValueError(f"{where} was not restored faithfully: {difference}.")
