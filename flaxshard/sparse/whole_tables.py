"""Updates that change all rows of some tables, as TensorFlow's Adam does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import tracing
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.sparse import row_update

PyTree = Any
Path = trees.Path


@jax.tree_util.register_pytree_node_class
class TableUpdate:
  """The update of a whole table, and that of the rows of its gradient.

  One array of both would be a temporary array of the table's size. This is
  added in place.

  Attributes:
    dense: The update of rows without a gradient. On CPUs it has that of the
      others too, elsewhere they are not used.
    rows: The update of the rows of the gradient.
  """

  __array_ufunc__ = None

  def __init__(self, dense: jax.Array, rows: IndexedSlices):
    self.dense, self.rows = dense, rows

  def tree_flatten(self) -> Any:
    """Returns both updates."""
    return (self.dense, self.rows), None

  @classmethod
  def tree_unflatten(cls, _: None, children: Any) -> TableUpdate:
    """Returns the object."""
    return cls(*children)

  def __add__(self, table: Any) -> jax.Array:
    return self.__radd__(table)

  def __radd__(self, table: Any) -> jax.Array:
    """Returns the new table, in place if XLA may reuse its memory."""
    return _by_platform(_add_whole, _add_in_place, table, self.dense, self.rows)


def update(
  tx: Any,
  updates: PyTree,
  opt_state: PyTree,
  params: PyTree,
  extra: Mapping[str, Any],
  whole: Collection[Path],
) -> tuple[PyTree, PyTree]:
  """Returns the updates and the next state of an optimizer.

  Args:
    tx: The optax optimizer.
    updates: Gradients, some of which are `IndexedSlices`.
    opt_state: The state of `tx`.
    params: The parameters.
    extra: Extra arguments of the update.
    whole: The tables that are updated in all rows.
  """
  tables = row_update.find_tables(updates)
  whole = {path for path in whole if path in tables}
  if not whole:
    return row_update.update(tx, updates, opt_state, params, extra)
  row_params = row_update.take_rows(params, params, tables)
  row_state = row_update.take_rows(opt_state, params, tables)
  # The rows must be read before the tables are overwritten.
  row_params, row_state, params, opt_state = jax.lax.optimization_barrier(
    (row_params, row_state, params, opt_state)
  )
  row_grads = row_update.values_of(updates)
  row_updates, new_rows = tx.update(row_grads, row_state, row_params, **extra)
  slots = row_update.slots_of(opt_state, params, tables)

  def to_whole(path: Path, rows: Any, table: Any) -> Any:
    # The rows of float8 tables have the dtype of the gradient.
    return table.astype(rows.dtype) if path in whole else rows

  def to_zeros(path: Path, rows: Any, table: Any) -> Any:
    if path not in whole:
      return rows
    zeros = lambda: jnp.zeros(table.shape, rows.dtype)
    slices = tables[path].map_values(lambda _: rows)
    return _by_platform(slices.to_dense, zeros)

  state_leaves, treedef = jax.tree.flatten(opt_state)
  whole_state = [
    table.astype(rows.dtype) if path in whole else rows
    for rows, table, path in zip(
      jax.tree.leaves(row_state), state_leaves, slots, strict=True
    )
  ]
  map_with_path = jax.tree_util.tree_map_with_path
  if extra.get("grad") is not None:
    extra = {**extra, "grad": map_with_path(to_zeros, extra["grad"], params)}
  # The rows without a gradient do as they do with a gradient of zero.
  dense_updates, dense_state = tx.update(
    map_with_path(to_zeros, row_grads, params),
    jax.tree.unflatten(treedef, whole_state),
    map_with_path(to_whole, row_params, params),
    **extra,
  )
  new_state = [
    rows
    if path is None
    else _by_platform(_keep, _put, dense.astype(old.dtype), rows, tables[path])
    if path in whole
    else tables[path].put_rows(old, rows)
    for old, dense, rows, path in zip(
      state_leaves,
      jax.tree.leaves(dense_state),
      jax.tree.leaves(new_rows),
      slots,
      strict=True,
    )
  ]

  def join(path: Path, dense: Any, rows: Any) -> Any:
    return TableUpdate(dense, rows) if path in whole else rows

  return (
    map_with_path(
      join, dense_updates, row_update.with_rows(row_updates, tables)
    ),
    jax.tree.unflatten(treedef, new_state),
  )


def _by_platform(
  cpu: Callable[..., Any], default: Callable[..., Any], *args: Any
) -> Any:
  """Returns `cpu(*args)` on CPUs, else `default(*args)`.

  XLA's CPU backend cannot update a table in place twice: it would copy the
  parameter and both slots. There a whole gradient takes less memory.
  """
  if not tracing.is_compiling():
    return cpu(*args)
  return jax.lax.platform_dependent(*args, cpu=cpu, default=default)


def _add_whole(table: jax.Array, dense: jax.Array, rows: Any) -> jax.Array:
  return (_widen(table, dense) + dense).astype(table.dtype)


def _widen(x: jax.Array, update: jax.Array) -> jax.Array:
  # JAX does not promote float8 to other dtypes.
  return x.astype(update.dtype) if x.dtype.itemsize == 1 else x


def _add_in_place(table: jax.Array, dense: jax.Array, rows: Any) -> jax.Array:
  old = rows.take_rows(table)
  # The rows must be read before the table is overwritten.
  old, table = jax.lax.optimization_barrier((old, table))
  new = _widen(old, rows.values) + rows.values
  return rows.put_rows(_add_whole(table, dense, rows), new)


def _keep(dense: jax.Array, new: jax.Array, rows: Any) -> jax.Array:
  return dense


def _put(dense: jax.Array, new: jax.Array, rows: IndexedSlices) -> jax.Array:
  return rows.put_rows(dense, new)
