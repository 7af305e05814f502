"""Rows that are brought up to date when a step uses them."""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.sparse import row_plan
from flaxshard.sparse import row_update

PyTree = Any
Path = trees.Path


class CatchUpState(NamedTuple):
  """The state of an optimizer whose rows are not all up to date.

  Attributes:
    inner: The state of the optimizer.
    step_count: int32 scalar, the number of updates.
    last_step: A tree like the parameters. For each table, int32 `[rows]`: the
      number of updates that the row and its slots have had. None for others.
    log_decay: A tree like the parameters. For each table whose parameter decays
      by a factor that differs from step to step, the sum of the logarithms of
      the factors so far. None for others.
    row_log_decay: Beside each `log_decay`, float32 `[rows]`: that sum when the
      row was up to date.
  """

  inner: PyTree
  step_count: jax.Array
  last_step: PyTree
  log_decay: PyTree
  row_log_decay: PyTree


def init(
  inner: PyTree, params: PyTree, plan: row_plan.RowPlan, decay: Any
) -> CatchUpState:
  """Returns a state in which all rows are up to date.

  Args:
    inner: The state of the optimizer.
    params: The parameters.
    plan: What the optimizer does with rows.
    decay: The result of `row_plan.decay_factors`.
  """
  _, of_params = decay
  varying = [
    path
    for path, factor in zip(plan.tables, of_params, strict=True)
    if factor is None
  ]

  def zeros_of(tables: Any, dtype: Any, num_dims: int) -> PyTree:
    return jax.tree_util.tree_map_with_path(
      lambda path, p: (
        jnp.zeros(jnp.shape(p)[:num_dims], dtype) if path in tables else None
      ),
      params,
    )

  return CatchUpState(
    inner,
    jnp.zeros((), jnp.int32),
    last_step=zeros_of(plan.tables, jnp.int32, 1),
    log_decay=zeros_of(varying, jnp.float32, 0),
    row_log_decay=zeros_of(varying, jnp.float32, 1),
  )


def update(
  tx: Any,
  updates: PyTree,
  state: CatchUpState,
  params: PyTree,
  extra: Mapping[str, Any],
  plan: row_plan.RowPlan,
  decay: Any,
) -> tuple[PyTree, CatchUpState]:
  """Returns the updates and the next state of an optimizer.

  Args:
    tx: The optax optimizer.
    updates: Gradients, some of which are `IndexedSlices`.
    state: The state.
    params: The parameters.
    extra: Extra arguments of the update.
    plan: What the optimizer does with rows.
    decay: The result of `row_plan.decay_factors`.
  """
  tables = row_update.find_tables(updates)
  # With a whole gradient all rows are used.
  whole = [path for path in plan.tables if path not in tables]
  old_params = params
  params, inner = _settle(params, state, plan, decay, whole)
  row_params = row_update.take_rows(params, params, tables)
  row_state = row_update.take_rows(inner, params, tables)
  old_rows = row_params
  row_params, row_state = _decay(
    row_params, row_state, _missed(state, tables), plan, decay, tables
  )
  row_grads = row_update.values_of(updates)
  row_updates, new_rows = tx.update(row_grads, row_state, row_params, **extra)
  # The updates are added to parameters that have not decayed yet.
  row_updates = jax.tree_util.tree_map_with_path(
    lambda path, u, new, old: (
      u + (new - old) if _decays(path, plan, decay) else u
    ),
    row_updates,
    row_params,
    _merge(old_rows, old_params, whole),
  )
  count = state.step_count + 1
  log_decay = state.log_decay
  if jax.tree.leaves(log_decay):
    factors = _current_log_factors(
      tx, row_grads, row_state, row_params, extra, plan
    )
    log_decay = jax.tree_util.tree_map_with_path(
      lambda path, x: x + factors[path], log_decay
    )
  last_step = jax.tree_util.tree_map_with_path(
    lambda path, x: _mark(x, count, tables.get(path)), state.last_step
  )
  row_log_decay = jax.tree_util.tree_map_with_path(
    lambda path, x, new: _mark(x, new, tables.get(path)),
    state.row_log_decay,
    log_decay,
  )
  new_inner = row_update.put_rows(inner, new_rows, params, tables)
  return (
    row_update.with_rows(row_updates, tables),
    CatchUpState(new_inner, count, last_step, log_decay, row_log_decay),
  )


def settle(
  params: PyTree, state: CatchUpState, plan: row_plan.RowPlan, decay: Any
) -> tuple[PyTree, CatchUpState]:
  """Returns parameters and state with all rows up to date.

  Args:
    params: The parameters.
    state: The state.
    plan: What the optimizer does with rows.
    decay: The result of `row_plan.decay_factors`.
  """
  params, inner = _settle(params, state, plan, decay, plan.tables)
  return params, CatchUpState(
    inner,
    state.step_count,
    jax.tree.map(lambda x: jnp.full_like(x, state.step_count), state.last_step),
    state.log_decay,
    jax.tree.map(jnp.full_like, state.row_log_decay, state.log_decay),
  )


def _settle(
  params: PyTree,
  state: CatchUpState,
  plan: row_plan.RowPlan,
  decay: Any,
  paths: Any,
) -> tuple[PyTree, PyTree]:
  missed = _missed(state, dict.fromkeys(paths))
  return _decay(params, state.inner, missed, plan, decay, paths)


def _missed(
  state: CatchUpState, tables: Mapping[Path, IndexedSlices | None]
) -> dict[Path, tuple[jax.Array, jax.Array | None]]:
  """Returns the missed steps of the rows of each table, and their log decay.

  Args:
    state: The state.
    tables: The rows of each table; None takes all rows.
  """

  def take(x: jax.Array, rows: IndexedSlices | None) -> jax.Array:
    return x if rows is None else rows.take_rows(x)

  last_step, log_decay, row_log_decay = (
    dict(jax.tree_util.tree_leaves_with_path(tree))
    for tree in (state.last_step, state.log_decay, state.row_log_decay)
  )
  return {
    path: (
      state.step_count - take(last_step[path], rows),
      log_decay[path] - take(row_log_decay[path], rows)
      if path in log_decay
      else None,
    )
    for path, rows in tables.items()
  }


def _decay(
  params: PyTree,
  inner: PyTree,
  missed: Mapping[Path, tuple[jax.Array, jax.Array | None]],
  plan: row_plan.RowPlan,
  decay: Any,
  paths: Any,
) -> tuple[PyTree, PyTree]:
  """Multiplies slots and parameters by the decay of the missed steps."""
  of_state, of_params = decay

  def decay_slot(x: Any, path: Path | None, factor: float | None) -> Any:
    if path is None or path not in paths or factor in (None, 1.0):
      return x
    return _power(x, factor, missed[path][0])

  def decay_parameter(path: Path, x: Any) -> Any:
    if path not in paths:
      return x
    steps, log_decay = missed[path]
    factor = of_params[plan.tables.index(path)]
    if log_decay is not None:
      return _scale(x, jnp.exp(log_decay))
    return x if factor == 1.0 else _power(x, factor, steps)

  leaves, treedef = jax.tree.flatten(inner)
  new = map(decay_slot, leaves, plan.slots, of_state)
  return (
    jax.tree_util.tree_map_with_path(decay_parameter, params),
    jax.tree.unflatten(treedef, new),
  )


def _power(x: jax.Array, factor: float, steps: jax.Array) -> jax.Array:
  if factor > 0:
    # In float32 a factor that is nearly 1 would be rounded.
    return _scale(x, jnp.exp(steps * math.log(factor)))
  return _scale(x, jnp.power(factor, steps))


def _scale(x: jax.Array, factors: jax.Array) -> jax.Array:
  # JAX does not promote float8 to other dtypes.
  wide = x.astype(jnp.float32) if x.dtype.itemsize == 1 else x
  return (wide * factors[:, None]).astype(x.dtype)


def _mark(x: jax.Array, value: jax.Array, rows: IndexedSlices | None) -> Any:
  """Sets the numbers of rows, or of all rows, to a value.

  Args:
    x: The numbers, `[rows]`.
    value: A scalar; of counts not below the old ones.
    rows: The rows; None takes all.
  """
  old = x if rows is None else rows.take_rows(x)
  # The new numbers depend on the old ones. So XLA splits them over devices in
  # the same way, and reads before it writes: otherwise it copies all of them.
  is_count = jnp.issubdtype(x.dtype, jnp.integer)
  new = jnp.maximum(old, value) if is_count else value + 0 * old
  return new if rows is None else rows.put_rows(x, new)


def _decays(path: Path, plan: row_plan.RowPlan, decay: Any) -> bool:
  """Returns whether the parameter of a table decays without a gradient."""
  return path in plan.tables and decay[1][plan.tables.index(path)] != 1.0


def _merge(rows: PyTree, params: PyTree, whole: Any) -> PyTree:
  """Returns the parameters as they were: rows, or whole tables."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x, p: p if path in whole else x, rows, params
  )


def _current_log_factors(
  tx: Any,
  row_grads: PyTree,
  row_state: PyTree,
  row_params: PyTree,
  extra: Mapping[str, Any],
  plan: row_plan.RowPlan,
) -> dict[Path, jax.Array]:
  """Returns the logarithms of the factors by which parameters decay now.

  A factor is 1 plus the update of a row of ones whose gradient and slots are
  zero.
  """

  def probe(path: Path, x: Any, value: float) -> Any:
    return (
      jnp.full((1, *x.shape[1:]), value, x.dtype) if path in plan.tables else x
    )

  def probe_all(tree: PyTree, value: float) -> PyTree:
    return jax.tree_util.tree_map_with_path(
      lambda path, x: probe(path, x, value), tree
    )

  leaves, treedef = jax.tree.flatten(row_state)
  state = [
    x if path is None else probe(path, x, 0.0)
    for x, path in zip(leaves, plan.slots, strict=True)
  ]
  if extra.get("grad") is not None:
    extra = {**extra, "grad": probe_all(extra["grad"], 0.0)}
  updates, _ = tx.update(
    probe_all(row_grads, 0.0),
    jax.tree.unflatten(treedef, state),
    probe_all(row_params, 1.0),
    **extra,
  )
  return {
    # More exact than the logarithm of a sum that is nearly 1. A factor of 0
    # has none, and would make later differences NaN.
    path: jnp.log1p(jnp.maximum(update[0, 0].astype(jnp.float32), -1 + 1e-7))
    for path, update in jax.tree_util.tree_leaves_with_path(updates)
    if path in plan.tables
  }
