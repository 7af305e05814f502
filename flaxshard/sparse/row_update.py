"""Updates the rows of tables by an optimizer of whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import indexed_slices
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context

PyTree = Any
Path = trees.Path
# Of the tables whose rows a mesh splits.
Shardings = Mapping[Path, jax.sharding.NamedSharding]
Tables = Mapping[Path, IndexedSlices]


def update(
  tx: Any,
  updates: PyTree,
  opt_state: PyTree,
  params: PyTree,
  extra: Mapping[str, Any],
  shardings: Shardings,
) -> tuple[PyTree, PyTree]:
  """Returns the updates and the next state of an optimizer, row by row.

  Args:
    tx: The optax optimizer.
    updates: Gradients, some of which are `IndexedSlices`.
    opt_state: The state of `tx`.
    params: The parameters.
    extra: Extra arguments of the update.
    shardings: Those of the tables whose rows a mesh splits. In a trace of the
      whole batch JAX does not know them.

  Returns:
    `(updates, opt_state)`, with rows in `updates` where the gradients have
    rows.
  """
  tables = {
    path: x.split(_num_parts(shardings.get(path)))
    for path, x in gradients.find_rows(updates).items()
  }
  take = functools.partial(_map_rows, IndexedSlices.take_rows, params, tables)
  if extra.get("grad") is not None:
    # The gradient may have other rows than the updates.
    grad = indexed_slices.to_dense(extra["grad"])
    extra = {**extra, "grad": take(grad)}
  values = jax.tree_util.tree_map_with_path(
    lambda path, x: tables[path].values if path in tables else x,
    updates,
    is_leaf=is_indexed_slices,
  )
  row_updates, new_rows = tx.update(
    values, take(opt_state), take(params), **extra
  )
  row_updates = jax.tree_util.tree_map_with_path(
    lambda path, x: (
      tables[path].map_values(lambda _: x) if path in tables else x
    ),
    row_updates,
  )
  # In place, if XLA may reuse the memory of the old state.
  return row_updates, _map_rows(
    IndexedSlices.put_rows, params, tables, opt_state, new_rows
  )


def slots_of(
  tree: PyTree, params: PyTree, tables: Collection[Path]
) -> list[Path | None]:
  """Returns the table of each leaf of a tree that has its shape, else None."""
  shapes = {
    path: jnp.shape(p)
    for path, p in jax.tree_util.tree_leaves_with_path(params)
  }
  return [
    path
    if path is not None and path in tables and jnp.shape(x) == shapes[path]
    else None
    for x, path in zip(
      jax.tree.leaves(tree),
      opt_state_lib.parameters_of(tree, params),
      strict=True,
    )
  ]


def _map_rows(
  fn: Callable[..., Any],
  params: PyTree,
  tables: Tables,
  tree: PyTree,
  *others: PyTree,
) -> PyTree:
  """Maps a function over the tables in a tree, and over their slots.

  Args:
    fn: Takes the rows of a table, and a leaf of each tree.
    params: The parameters.
    tables: The rows of each table.
    tree: The parameters, or the state of an optimizer.
    *others: Trees with the same structure.

  Returns:
    A tree with the results, and with the other leaves of the last tree.
  """
  slots = iter(slots_of(tree, params, tables))

  def map_leaf(*leaves: Any) -> Any:
    path = next(slots)
    return leaves[-1] if path is None else fn(tables[path], *leaves)

  return jax.tree.map(map_leaf, tree, *others)


# -- Tables whose rows a mesh splits.


def split_over_devices(params: PyTree) -> Shardings:
  """Returns the shardings of the parameters whose rows a mesh splits.

  Args:
    params: The parameters of a train state: arrays or `jax.ShapeDtypeStruct`s
      with their shardings. The paths are those that the optimizer knows.
  """
  optimized = opt_state_lib.optimized_params(params)
  return {
    path: x.sharding
    for path, x in jax.tree_util.tree_leaves_with_path(optimized)
    if isinstance(x.sharding, jax.sharding.NamedSharding)
    and any(mesh_lib.dims_of(x.sharding.spec, 1)[0])
  }


def _num_parts(sharding: jax.sharding.NamedSharding | None) -> int:
  """Returns into how many parts the rows of a table are split."""
  if sharding is None:
    return 1
  sizes = dict(sharding.mesh.shape)
  if replica_context.current.get() is not None:
    # Inside of `run` parameters that are split over replicas are whole.
    sizes[mesh_lib.REPLICA] = 1
  return mesh_lib.parts(sharding.spec, 1, sizes)[0]
