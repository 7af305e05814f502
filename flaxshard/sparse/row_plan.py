"""Finds, before training, which slots of an optimizer have rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from flaxshard.core import extra_args
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import tf_optimizers
from flaxshard.core import trees
from flaxshard.sparse import row_program
from flaxshard.sparse import row_update
from flaxshard.sparse import zero_rows
from flaxshard.sparse.row_program import Value
from flaxshard.sparse.zero_rows import ZeroRow

PyTree = Any
Path = trees.Path

# A step changes what later ones apply, undo or take the mean of.
_DEFERRING = (
  optax.MultiStepsState,
  optax.ApplyEvery,
  optax.contrib.SAMState,
)
# TensorFlow's kernels for sparse gradients. Adam's moments decay in all rows.
_TF_WHOLE = (optax.ScaleByAdamState,)
_TF_ROWS = (
  optax.TraceState,
  optax.ScaleByRssState,
  optax.ScaleByRmsState,
  optax.ScaleByRStdDevState,
  optax.ScaleByAdaDeltaState,
  tf_optimizers.FtrlState,
  tf_optimizers.AdagradDAState,
  tf_optimizers.ProximalAdagradState,
)


@dataclasses.dataclass(frozen=True)
class RowPlan:
  """Which leaves of an optimizer's state have the rows of which tables.

  Attributes:
    tables: The paths of the tables.
    slots: For each leaf of the optimizer's state, the path of the table whose
      rows it has, or None.
    owners: For each leaf of the state, the class of the state that has it.
    new_state: For each leaf of the state, its next value in rows whose gradient
      is zero. The sources are leaves of the state, by their numbers; the
      parameter of a table is source `-1 - i` of table `i`.
    updates: For each table, the update of rows whose gradient is zero.
    deferring: The state of a transformation that applies rows in later steps,
      such as `optax.MultiSteps`; None if there is none.
  """

  tables: tuple[Path, ...]
  slots: tuple[Path | None, ...]
  owners: tuple[type | None, ...]
  new_state: tuple[ZeroRow, ...] = ()
  updates: tuple[ZeroRow, ...] = ()
  deferring: str | None = None


def create(
  argument: str, tx: Any, params: PyTree, tables: Sequence[Path]
) -> RowPlan:
  """Traces the update of an optimizer, and returns what it does with rows.

  Args:
    argument: Name of the patterns, for errors.
    tx: The optax optimizer.
    params: The parameters, or their shapes and dtypes.
    tables: The paths of the tables.

  Raises:
    PatternError: The optimizer mixes the rows of a table.
  """
  tables = tuple(tables)
  params = jax.tree.map(_shape_of, params)
  state = jax.eval_shape(tx.init, params)
  slots = tuple(row_update.slots_of(state, params, tables))
  plan = RowPlan(tables, slots, tuple(_owners(state)))
  for node in jax.tree.leaves(
    state, is_leaf=lambda x: isinstance(x, _DEFERRING)
  ):
    if isinstance(node, _DEFERRING):
      return dataclasses.replace(plan, deferring=type(node).__name__)
  given = {"grads": params, "state": state, "params": params}
  names = extra_args.used(tx)
  if "value" in names:
    given["value"] = jax.ShapeDtypeStruct((), jnp.float32)
  if "grad" in names:
    given["grad"] = params

  def update(given: dict[str, PyTree]) -> PyTree:
    extra: dict[str, Any] = {
      k: given[k] for k in ("value", "grad") if k in given
    }
    if "value_fn" in names:
      extra["value_fn"] = lambda _: jnp.float32(0)
    return tx.update(given["grads"], given["state"], given["params"], **extra)

  rows = {n for p in jax.tree.leaves(params) for n in p.shape[:1]}
  num_rows = next(n for n in (5, 7, 11, *range(13, 999, 2)) if n not in rows)
  inputs = _inputs(given, slots, tables)
  whole, (update_shapes, _) = jax.make_jaxpr(update, return_shape=True)(given)
  try:
    part = jax.make_jaxpr(update)(_with_rows(given, inputs, num_rows))
  except Exception as e:
    # An optimizer may raise any error for a state of other shapes.
    raise _refusal(argument, plan, None, frozenset()) from e
  try:
    outputs = row_program.evaluate(whole, part, jax.tree.leaves(inputs))
  except row_program.MixedRowsError as e:
    raise _refusal(argument, plan, e.eqn, e.tables) from None
  updates = outputs[: len(jax.tree.leaves(update_shapes))]
  by_path = dict(zip(trees.paths(update_shapes), updates, strict=True))
  new_state = outputs[len(updates) :]
  wanted: list[Path | None] = [
    path if path in tables else None for path in by_path
  ]
  for value, path in zip(outputs, [*wanted, *slots], strict=True):
    is_right = value.dim is None
    if path is not None:
      is_right = value.dim == 0 and value.table in (None, tables.index(path))
    if not is_right:
      raise _refusal(argument, plan, value.zero.eqn, frozenset())
  return dataclasses.replace(
    plan,
    new_state=tuple(x.zero for x in new_state),
    updates=tuple(by_path[path].zero for path in tables),
  )


def decay_factors(
  argument: str, plan: RowPlan
) -> tuple[list[float | None], list[float | None]]:
  """Returns what rows are multiplied by in a step that does not use them.

  Args:
    argument: Name of the patterns, for errors.
    plan: The plan.

  Returns:
    A factor for each leaf of the optimizer's state, None for those that are no
    slots of tables; and a factor for the parameter of each table, None if it
    differs from step to step.

  Raises:
    PatternError: A slot does something else than decay by a constant factor.
  """
  factors: list[float | None] = []
  for i, (path, zero) in enumerate(
    zip(plan.slots, plan.new_state, strict=True)
  ):
    if path is None:
      factors.append(None)
      continue
    factor = zero.factors.get(i, 0.0)
    others = [s for s, f in zero.factors.items() if s != i and f != 0]
    if (
      not zero.is_linear
      or zero.sum_eqn is not None
      or others
      or not _is_zero(zero)
      or factor is zero_rows.UNKNOWN
    ):
      raise _no_decay(argument, plan, path, i, zero)
    factors.append(float(factor))
  of_params: list[float | None] = []
  for i, (path, zero) in enumerate(zip(plan.tables, plan.updates, strict=True)):
    factor = zero.factors.get(-1 - i, 0.0)
    # A slot that does not decay moves the parameter for ever.
    stays = lambda s: s >= 0 and abs(factors[s] or 0.0) >= 1
    slots = [s for s in zero.sources if s >= 0]
    if any(stays(s) and f != 0 for s, f in zero.factors.items()) or (
      slots and all(map(stays, slots))
    ):
      raise _no_decay(argument, plan, path, None, zero)
    if -1 - i in zero.sources or zero.sum_eqn is not None:
      raise _no_decay(argument, plan, path, None, zero)
    is_known = factor is not zero_rows.UNKNOWN
    of_params.append(1.0 + float(factor) if is_known else None)
  return factors, of_params


def whole_tables(argument: str, plan: RowPlan) -> set[Path]:
  """Returns the tables whose rows TensorFlow updates in every step.

  Args:
    argument: Name of the patterns, for errors.
    plan: The plan.

  Raises:
    PatternError: A slot is of an optimizer for which TensorFlow has no kernel
      of sparse gradients.
  """
  whole = set()
  for path, owner in zip(plan.slots, plan.owners, strict=True):
    if path is None:
      continue
    if owner is None or not issubclass(owner, (*_TF_WHOLE, *_TF_ROWS)):
      name = "the optimizer" if owner is None else owner.__name__
      raise patterns_lib.PatternError(
        f"{argument}: {trees.path_string(path)} cannot be updated with "
        f"semantics 'tf': TensorFlow has no sparse kernel for {name}. Use "
        "'lazy' or 'catch_up'."
      )
    if issubclass(owner, _TF_WHOLE):
      whole.add(path)
  for path, zero in zip(plan.tables, plan.updates, strict=True):
    if path in whole and zero.sum_eqn is not None:
      raise _no_decay(argument, plan, path, None, zero)
  for path, zero in zip(plan.slots, plan.new_state, strict=True):
    if path in whole and zero.sum_eqn is not None:
      raise _no_decay(argument, plan, path, None, zero)
  return whole


def _shape_of(p: Any) -> jax.ShapeDtypeStruct:
  dtype = trees.dtype_of(p)
  if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
    # The update computes in another dtype: JAX does not promote float8.
    dtype = jnp.float32
  return jax.ShapeDtypeStruct(jnp.shape(p), dtype)


def _inputs(
  given: dict[str, PyTree],
  slots: Sequence[Path | None],
  tables: Sequence[Path],
) -> dict[str, PyTree]:
  """Returns what is known of the arguments of the update."""
  unknown = Value(zero_rows.constant(zero_rows.UNKNOWN))

  def of_gradient(path: Path, x: Any) -> Value:
    if path not in tables:
      return unknown
    return Value(zero_rows.constant(0), 0, tables.index(path))

  def of_parameter(path: Path, x: Any) -> Value:
    if path not in tables:
      return unknown
    i = tables.index(path)
    return Value(zero_rows.source(-1 - i), 0, i)

  of_state = [
    unknown
    if path is None
    else Value(zero_rows.source(i), 0, tables.index(path))
    for i, path in enumerate(slots)
  ]
  map_with_path = jax.tree_util.tree_map_with_path
  values = {
    "grads": map_with_path(of_gradient, given["grads"]),
    "state": jax.tree.unflatten(jax.tree.structure(given["state"]), of_state),
    "params": map_with_path(of_parameter, given["params"]),
  }
  if "value" in given:
    values["value"] = unknown
  if "grad" in given:
    values["grad"] = values["grads"]
  return values


def _with_rows(given: PyTree, inputs: PyTree, num_rows: int) -> PyTree:
  """Returns shapes with another number of rows of each table."""
  return jax.tree.map(
    lambda x, value: (
      x
      if value.dim is None
      else jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)
    ),
    given,
    inputs,
  )


def _owners(node: Any, owner: type | None = None) -> list[type | None]:
  """Returns, for each leaf of a state, the innermost named tuple around it."""
  children = jax.tree.leaves(node, is_leaf=lambda x: x is not node)
  if len(children) == 1 and children[0] is node:
    return [owner]
  if isinstance(node, tuple) and hasattr(node, "_fields"):
    owner = type(node)
  return [o for child in children for o in _owners(child, owner)]


def _is_zero(zero: ZeroRow) -> bool:
  return zero.const is not zero_rows.UNKNOWN and not np.any(zero.const)


def _refusal(
  argument: str, plan: RowPlan, eqn: Any, tables: frozenset[int]
) -> patterns_lib.PatternError:
  """Returns the error for an optimizer that mixes rows."""
  named = [plan.tables[i] for i in sorted(tables)] or plan.tables
  paths = ", ".join(map(trees.path_string, named))
  name = row_program.function_name(eqn) or "the optimizer"
  return patterns_lib.PatternError(
    f"{argument}: {paths} cannot be updated by rows: {name} computes a row "
    "from other rows too, or from the number of rows. Use another optimizer "
    "for it, such as by optax.multi_transform, or give no pattern for it."
  )


def _no_decay(
  argument: str, plan: RowPlan, path: Path, leaf: int | None, zero: ZeroRow
) -> patterns_lib.PatternError:
  """Returns the error for rows that cannot be brought up to date."""
  owner = None if leaf is None else plan.owners[leaf]
  what = "the parameter"
  if leaf is not None:
    what = "a slot" if owner is None else f"a slot of {owner.__name__}"
  name = row_program.function_name(zero.sum_eqn or zero.eqn)
  by = f" ({name})" if name else ""
  if zero.sum_eqn is not None:
    reason = f"what happens to {what} depends on the gradients of other rows"
  else:
    constant = " that is the same in all steps" if leaf is not None else ""
    reason = (
      f"in a step without a gradient, {what} is not just multiplied by a "
      f"factor{constant}"
    )
  reason += by
  return patterns_lib.PatternError(
    f"{argument}: {trees.path_string(path)} cannot be updated by rows with "
    f"these semantics: {reason}. Use semantics 'lazy'."
  )
