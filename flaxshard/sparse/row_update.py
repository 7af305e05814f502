"""Updates the rows of tables by an optimizer of whole arrays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context

PyTree = Any
Path = trees.Path
# Into how many parts a mesh splits the rows of a table: numbers above 1.
Parts = Mapping[Path, int]
Tables = Mapping[Path, IndexedSlices]


def update(
  tx: Any,
  updates: PyTree,
  opt_state: PyTree,
  params: PyTree,
  extra: Mapping[str, Any],
  created: Parts,
) -> tuple[PyTree, PyTree]:
  """Returns the updates and the next state of an optimizer, row by row.

  Args:
    tx: The optax optimizer.
    updates: Gradients, some of which are `IndexedSlices`.
    opt_state: The state of `tx`.
    params: The parameters.
    extra: Extra arguments of the update.
    created: The parts of the parameters when the state was created.

  Returns:
    `(updates, opt_state)`, with rows in `updates` where the gradients have
    rows.
  """
  parts = _current_parts(params, created)
  updates = gradients.deduplicate(updates)
  tables = {
    path: x.split(parts.get(path, 1))
    for path, x in indexed_slices.find(updates).items()
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


def parts_of(params: PyTree) -> Parts:
  """Returns into how many parts the rows of parameters are split.

  Args:
    params: The parameters of a train state: arrays or `jax.ShapeDtypeStruct`s
      with their shardings. The paths are those that the optimizer knows.
  """
  optimized = gradients.optimized_params(params)
  return _parts(
    (path, x.sharding.spec, x.sharding.mesh.shape)
    for path, x in jax.tree_util.tree_leaves_with_path(optimized)
    if isinstance(x.sharding, jax.sharding.NamedSharding)
  )


def _current_parts(params: PyTree, created: Parts) -> Parts:
  """Returns the parts of the parameters that are being updated."""
  # In a trace of the whole batch JAX knows the mesh, but not how its axes of
  # type Auto split an array.
  if replica_context.get_replica_context() is None:
    return created
  # Inside of `run` parameters that are split over replicas are whole.
  specs = replica_context.specs_within(params)
  sizes = jax.sharding.get_abstract_mesh().shape
  return _parts(
    (path, spec, sizes)
    for path, spec in jax.tree_util.tree_leaves_with_path(specs)
  )


def _parts(found: Iterable[tuple[Path, Any, Mapping[str, int]]]) -> Parts:
  parts = {
    path: specs_lib.parts(spec, 1, sizes)[0] for path, spec, sizes in found
  }
  return {path: count for path, count in parts.items() if count > 1}
