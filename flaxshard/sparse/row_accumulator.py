"""Sums of the gradients of tables, over several steps, by rows.

The sum of a table is an array like the table, as that of any parameter is.
Beside it stands `touched`, bool `[rows]`: the rows that gradients were added to
since the sum was last taken. With it, a step reads and writes its own rows of
the sum alone, and the rows of a whole period are found without reading it.

`touched` is a tree like the parameters, with None for all but tables. It is
`{}` if there are no tables.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import parameter_groups
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices

PyTree = Any


def init_touched(tx: Any, params: PyTree) -> PyTree:
  """Returns the first `touched`: no rows.

  Args:
    tx: An optimizer. Parameters that `sparse_rows` names are tables, unless
      they are frozen.
    params: The parameters.
  """
  mask = parameter_groups.sparse_mask(tx, params)
  if mask is None:
    return {}
  return jax.tree.map(
    lambda is_table, p: (
      jnp.zeros(jnp.shape(p)[0], bool) if is_table and p is not None else None
    ),
    mask,
    parameter_groups.drop_frozen(tx, params),
    is_leaf=lambda x: x is None,
  )


def find_touched(sums: PyTree, touched: PyTree) -> PyTree:
  """Returns `touched` with the rows that are not zero in the sums as well.

  A checkpoint of a run without tables has sums without `touched`.

  Args:
    sums: The sums, concrete arrays `[..., rows, width]`.
    touched: The rows that the sums of tables have, `[..., rows]`.
  """

  def find_leaf(rows: Any, total: Any) -> Any:
    if rows is None:
      return None
    axes = tuple(range(rows.ndim, total.ndim))
    find = jax.jit(
      lambda rows, total: rows | jnp.any(total != 0, axes),
      out_shardings=rows.sharding,
    )
    return find(rows, total)

  if not jax.tree.leaves(touched):
    return touched
  return jax.tree.map(find_leaf, touched, sums, is_leaf=lambda x: x is None)


def add(
  sums: PyTree, touched: PyTree, grads: PyTree, applied: Any = True
) -> tuple[PyTree, PyTree]:
  """Adds gradients to their sums.

  Args:
    sums: The sums; None for leaves that never have a gradient.
    touched: The rows that the sums of tables have.
    grads: A tree of arrays, `IndexedSlices` and None.
    applied: Whether to add them, a bool scalar. If not, nothing changes.

  Returns:
    The new sums, and the new `touched`.
  """

  def add_leaf(total: Any, rows: Any, g: Any) -> tuple[Any, Any]:
    if total is None or g is None:
      return total, rows
    if not is_indexed_slices(g):
      if applied is not True:
        # Not g * applied: the gradients of a skipped step may be infinite.
        g = jnp.where(applied, g, jnp.zeros_like(g))
      new = total + g.astype(total.dtype)
      # A whole array is a gradient for every row.
      return new, None if rows is None else rows | jnp.asarray(applied)
    g = g.deduplicated()
    indices = g.indices
    if applied is not True:
      indices = jnp.where(applied, indices, g.dense_shape[0])
    # Not deduplicated again: with `applied` False all numbers are padding.
    g = IndexedSlices(indices, g.values, g.dense_shape, is_unique=True)
    new = (total + g).astype(total.dtype)
    if rows is not None:
      rows = _set_rows(rows, indices, True)
    return new, rows

  return _map_pairs(add_leaf, sums, touched, grads)


def take(sums: PyTree, touched: PyTree, grads: PyTree, steps: int) -> PyTree:
  """Returns the sums as gradients, those of tables as their touched rows.

  The number of rows must be static. `steps` gradients like that of now have at
  most `steps` times as many rows. Should more rows be touched, because an
  earlier step had a larger batch, those with the largest numbers are not
  returned: they stay in the sums for the next time.

  Args:
    sums: The sums.
    touched: The rows that the sums of tables have.
    grads: The gradients of this step, without equal row numbers.
    steps: The number of gradients in a sum.

  Returns:
    A tree like the sums. The sum of a table is an `IndexedSlices` without equal
    row numbers; if its gradient of this step is a whole array, it is a whole
    array.
  """

  def take_leaf(total: Any, rows: Any, g: Any) -> Any:
    is_whole = g is not None and not is_indexed_slices(g)
    if total is None or rows is None or is_whole:
      return total
    size = rows.shape[0]
    # Without a gradient in this step, nothing says how many rows others had.
    if g is not None:
      size = min(size, steps * g.indices.size)
    # The number of the k-th touched row, by binary search; beyond the last one
    # the number of rows, which is padding.
    indices = jnp.searchsorted(
      jnp.cumsum(rows.astype(jnp.int32)), jnp.arange(1, size + 1)
    ).astype(jnp.int32)
    values = total.at[indices].get(
      mode="fill", fill_value=0, indices_are_sorted=True
    )
    return IndexedSlices(indices, values, total.shape, is_unique=True)

  treedef, leaves = _zip_leaves(sums, touched, grads)
  return treedef.unflatten(take_leaf(*given) for given in leaves)


def clear(
  sums: PyTree, touched: PyTree, taken: PyTree
) -> tuple[PyTree, PyTree]:
  """Returns zeros in place of what `take` has returned.

  Args:
    sums: The sums.
    touched: The rows that the sums of tables have.
    taken: The result of `take`. Where it is None, the sum stays.

  Returns:
    The new sums, and the new `touched`.
  """

  def clear_leaf(total: Any, rows: Any, x: Any) -> tuple[Any, Any]:
    if total is None or x is None:
      return total, rows
    if not is_indexed_slices(x):
      return jnp.zeros_like(total), (
        None if rows is None else jnp.zeros_like(rows)
      )
    # Zeros that depend on the rows: XLA then reads the rows before it clears
    # them. In the other order it would have to copy the whole sum.
    zeros = jnp.where(jnp.isfinite(x.values), jnp.abs(x.values) * 0, 0)
    return _set_rows(total, x.indices, zeros), _set_rows(rows, x.indices, False)

  return _map_pairs(clear_leaf, sums, touched, taken)


def count_touched(touched: PyTree) -> int:
  """Returns the number of touched rows, of concrete arrays.

  Args:
    touched: The rows of one replica or of all, `[..., rows]`. A row counts once
      for each replica.
  """
  return sum(int(jnp.sum(rows)) for rows in jax.tree.leaves(touched))


def _set_rows(x: jax.Array, indices: jax.Array, value: Any) -> jax.Array:
  """Sets rows in place; `indices` are distinct but for padding."""
  # Not `unique_indices`: the padding occurs several times.
  return x.at[indices].set(value, mode="drop")


def _is_leaf(x: Any) -> bool:
  return x is None or is_indexed_slices(x)


def _zip_leaves(
  sums: PyTree, touched: PyTree, other: PyTree
) -> tuple[Any, list[tuple[Any, Any, Any]]]:
  """Returns the structure of three trees, and their leaves; None is a leaf."""
  leaves = jax.tree.leaves(sums, is_leaf=_is_leaf)
  treedef: Any = jax.tree.structure(sums, is_leaf=_is_leaf)
  rows = [None] * len(leaves)
  if jax.tree.leaves(touched):
    rows = treedef.flatten_up_to(touched)
  return treedef, list(
    zip(leaves, rows, treedef.flatten_up_to(other), strict=True)
  )


def _map_pairs(
  fn: Any, sums: PyTree, touched: PyTree, other: PyTree
) -> tuple[PyTree, PyTree]:
  """Maps `fn`, which returns a new sum and new touched rows."""
  treedef, leaves = _zip_leaves(sums, touched, other)
  pairs = [fn(*given) for given in leaves]
  new = treedef.unflatten(total for total, _ in pairs)
  if not jax.tree.leaves(touched):
    return new, touched
  return new, treedef.unflatten(rows for _, rows in pairs)
