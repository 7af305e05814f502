"""Updates the rows of tables by an optimizer of whole arrays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
  if extra.get("grad") is not None:
    # The gradient may have other rows than the updates.
    grad = indexed_slices.to_dense(extra["grad"])
    extra = {**extra, "grad": _take_rows(grad, params, tables)}
  values = jax.tree_util.tree_map_with_path(
    lambda path, x: tables[path].values if path in tables else x,
    updates,
    is_leaf=is_indexed_slices,
  )
  row_updates, new_rows = tx.update(
    values,
    _take_rows(opt_state, params, tables),
    _take_rows(params, params, tables),
    **extra,
  )
  row_updates = jax.tree_util.tree_map_with_path(
    lambda path, x: (
      tables[path].map_values(lambda _: x) if path in tables else x
    ),
    row_updates,
  )
  return row_updates, _put_rows(opt_state, new_rows, params, tables)


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


def _take_rows(tree: PyTree, params: PyTree, tables: Tables) -> PyTree:
  """Returns a tree with the rows in place of the tables and of their slots."""
  values, treedef = jax.tree.flatten(tree)
  new = [
    x if path is None else tables[path].take_rows(x)
    for x, path in zip(values, slots_of(tree, params, tables), strict=True)
  ]
  return jax.tree.unflatten(treedef, new)


def _put_rows(
  tree: PyTree, new_rows: PyTree, params: PyTree, tables: Tables
) -> PyTree:
  """Returns a tree with new rows in it, in place if XLA may reuse its memory.

  Args:
    tree: The state of an optimizer.
    new_rows: The state of its rows; leaves that are no slots replace those of
      `tree`.
    params: The parameters.
    tables: The rows of each table.
  """
  new_values, treedef = jax.tree.flatten(new_rows)
  new = [
    new if path is None else tables[path].put_rows(old, new)
    for old, new, path in zip(
      jax.tree.leaves(tree),
      new_values,
      slots_of(tree, params, tables),
      strict=True,
    )
  ]
  return jax.tree.unflatten(treedef, new)


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
