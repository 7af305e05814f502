"""`sparse_rows`: an optimizer that updates the rows that a gradient has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import indexed_slices
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import parameter_groups
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.core.parameter_groups import SparseRows
from flaxshard.sparse import catch_up
from flaxshard.sparse import row_plan
from flaxshard.sparse import row_update
from flaxshard.sparse import table_parts
from flaxshard.sparse import whole_tables

PyTree = Any

SEMANTICS = ("lazy", "tf", "catch_up")


def sparse_rows(
  tx: Any,
  patterns: Sequence[str],
  semantics: str = "lazy",
  *,
  argument: str = "sparse_rows: patterns",
) -> SparseRows:
  """Returns an optimizer that updates the rows of tables that a step used.

  A `TrainState` with this optimizer computes an `IndexedSlices` as the gradient
  of a table. The update takes the rows of the parameter and of its slots,
  passes them to `tx` in place of the whole arrays, and puts the results back in
  place. Other parameters are updated by `tx` as usual. Step counts and
  schedules count steps, not uses of a row.

  Call it last, around the whole optimizer.

  Args:
    tx: The optax optimizer.
    patterns: Regular expressions. A parameter is a table if one of them is
      found in its path, such as `embed/embedding`.
    semantics: What happens to the rows that a step did not use:

      * `"lazy"`: they and their slots stay as they are.
      * `"tf"`: what TensorFlow's kernels do. With Adam the moments of all rows
        decay, and all rows move: the result is that of a whole gradient, at the
        costs of one. With SGD, momentum, Adagrad, RMSProp, Adadelta and
        `fs.optimizers` it is `"lazy"`. Other optimizers with slots are refused.
      * `"catch_up"`: when a row is used, its slots are multiplied by their
        decay in the steps that it missed, and so is a parameter with weight
        decay. So moments equal those of whole gradients. The moves that
        momentum alone would have made are left out. The state has a step count
        for each row. `state.settle()` of a train state, or
        `tx.settle(params, opt_state)`, brings all rows up to date.

    argument: Name of `patterns` for errors.

  Returns:
    An optax optimizer. Its state is that of `tx`, with `"catch_up"` a
    `CatchUpState` around it. Its updates have an `IndexedSlices` where the
    gradients have one, or with `"tf"` a `TableUpdate`; `optax.apply_updates`
    adds them in place.

  Raises:
    TypeError: `patterns` is not a sequence of strings.
    ValueError: There is no pattern, one is not a regular expression, or
      `semantics` does not exist. From `init`: a pattern matches no parameter,
      or one that is not a table, a floating-point array with two dimensions;
      or `tx` computes a row from other rows, as LAMB does. Sums over rows to
      which zeros add nothing, such as the global norm of gradients, are exact.

  Example:
    >>> import flaxshard as fs
    >>> params = {"table": jnp.ones((4, 1)), "bias": jnp.ones(1)}
    >>> tx = fs.sparse_rows(optax.sgd(0.5), ["table"])
    >>> slices = fs.IndexedSlices([2, 2], jnp.ones((2, 1)), (4, 1))
    >>> grads = {"table": slices, "bias": jnp.ones(1)}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["table"].ravel().tolist()
    [1.0, 1.0, 0.0, 1.0]

  References:
    `tf.train.Optimizer`, whose sparse kernels update rows.
  """
  if isinstance(tx, SparseRows):
    raise ValueError(
      "sparse_rows: tx updates tables by rows already; give all patterns in "
      "one call."
    )
  patterns = patterns_lib.check(argument, patterns)
  if not patterns:
    raise ValueError(f"{argument} must have at least one pattern.")
  semantics = checks.one_of("semantics", semantics, SEMANTICS)
  return _create(argument, tx, patterns, semantics, {}, {})


def _create(
  argument: str,
  tx: Any,
  patterns: tuple[str, ...],
  semantics: str,
  parts: table_parts.Parts,
  plans: dict[Any, Any],
) -> SparseRows:
  """Returns the optimizer of `sparse_rows`.

  Args:
    argument: Name of `patterns` for errors.
    tx: The optax optimizer.
    patterns: The checked patterns.
    semantics: What happens to the rows that a step did not use.
    parts: See `SparseRows`.
    plans: What has been found of `tx`, by the shapes of the parameters.
  """
  inner = optax.with_extra_args_support(tx)

  def plan_of(params: PyTree) -> tuple[row_plan.RowPlan, Any]:
    """Returns the plan, and what the semantics need to know of it."""
    leaves, treedef = jax.tree.flatten(params)
    key = treedef, tuple((jnp.shape(p), trees.dtype_of(p)) for p in leaves)
    if key not in plans:
      plan = row_plan.create(
        argument, inner, params, _find_tables(argument, patterns, tx, params)
      )
      facts: Any = None
      if plan.deferring is None and semantics == "tf":
        facts = row_plan.whole_tables(argument, plan)
      elif plan.deferring is None and semantics == "catch_up":
        facts = row_plan.decay_factors(argument, plan)
      plans[key] = plan, facts
    return plans[key]

  def init(params: PyTree) -> PyTree:
    plan, facts = plan_of(params)
    if plan.deferring is not None:
      checks.warn(
        f"{argument}={patterns!r}: {plan.deferring} applies gradients in later "
        "steps, which rows are not enough for: they become whole arrays."
      )
    state = inner.init(params)
    if semantics == "catch_up" and plan.deferring is None:
      return catch_up.init(state, params, plan, facts)
    return state

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, PyTree]:
    if extra.get("grad") is not None:
      updates, extra["grad"] = row_update.join_rows(updates, extra["grad"])
    has_rows = any(map(is_indexed_slices, row_update.leaves(updates)))
    if not has_rows and semantics != "catch_up":
      return inner.update(updates, state, params, **extra)
    if params is None:
      raise ValueError("sparse_rows: update needs params, got None.")
    plan, facts = plan_of(params)
    if plan.deferring is not None:
      updates, extra = indexed_slices.to_dense((updates, extra))
      return inner.update(updates, state, params, **extra)
    updates = table_parts.split(updates, params, parts)
    if extra.get("grad") is not None:
      extra["grad"] = row_update.values_of(
        table_parts.split(extra["grad"], params, parts)
      )
    args = inner, updates, state, params, extra
    if semantics == "catch_up":
      return catch_up.update(*args, plan, facts)
    if semantics == "tf":
      return whole_tables.update(*args, facts)
    return row_update.update(*args)

  def settle(params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    if not isinstance(state, catch_up.CatchUpState):
      return params, state
    return catch_up.settle(params, state, *plan_of(params))

  def find_whole(params: PyTree) -> set[trees.Path]:
    plan, facts = plan_of(params)
    if plan.deferring is not None:
      return set(plan.tables)
    return set(facts) if semantics == "tf" else set()

  def find_decaying(params: PyTree) -> set[trees.Path]:
    plan, facts = plan_of(params)
    if plan.deferring is not None or semantics != "catch_up":
      return set()
    _, of_params = facts
    return {p for p, f in zip(plan.tables, of_params, strict=True) if f != 1.0}

  new = SparseRows(init, update)
  new.patterns = patterns
  new.semantics = semantics
  new.inner = tx
  new.parts = parts
  new.with_parts = lambda parts: _create(
    argument, tx, patterns, semantics, parts, plans
  )
  new.settle = settle
  new.whole_tables = find_whole
  new.decaying_tables = find_decaying
  return new


def with_parts(tx: Any, params: PyTree) -> Any:
  """Returns an optimizer that knows how the rows of its tables are split.

  Args:
    tx: An optimizer; others than those of `sparse_rows` are returned.
    params: The parameters of a train state with their shardings.
  """
  if not isinstance(tx, SparseRows):
    return tx
  parts = table_parts.from_shardings(params)
  if parts == tx.parts:
    return tx
  # A new object: JAX compares optimizers by their functions.
  return tx.with_parts(parts)


def settle(tx: Any, params: PyTree, opt_state: PyTree) -> tuple[PyTree, PyTree]:
  """Returns what `"catch_up"` has left behind, with all rows up to date.

  Args:
    tx: The optimizer of a train state; all but `"catch_up"` change nothing.
    params: The parameters of the train state.
    opt_state: The optimizer's state.
  """
  if not isinstance(tx, SparseRows):
    return params, opt_state
  optimized = opt_state_lib.optimized_params(params)
  new, opt_state = tx.settle(optimized, opt_state)
  if optimized is params:
    return new, opt_state
  return type(params)({**params, "params": new}), opt_state


def eval_params(tx: Any, params: PyTree, opt_state: PyTree) -> PyTree:
  """Returns the parameters with the decay of the steps that rows missed."""
  return settle(tx, params, opt_state)[0] if has_decay(tx, params) else params


def has_decay(tx: Any, params: PyTree) -> bool:
  """Returns whether `settle` changes the parameters of a train state."""
  return isinstance(tx, SparseRows) and bool(
    tx.decaying_tables(opt_state_lib.optimized_params(params))
  )


def wrap(tx: Any, sparse: Any, semantics: Any, *, prefix: str = "") -> Any:
  """Returns `sparse_rows` around an optimizer if there are patterns.

  Args:
    tx: The optax optimizer.
    sparse: Patterns; none leaves `tx` as it is.
    semantics: See `sparse_rows`.
    prefix: What precedes the names of the arguments in errors.
  """
  sparse = patterns_lib.check(f"{prefix}sparse", sparse)
  name = f"{prefix}sparse_semantics"
  semantics = checks.one_of(name, semantics, SEMANTICS)
  if sparse:
    return sparse_rows(tx, sparse, semantics, argument=f"{prefix}sparse")
  if semantics != "lazy":
    raise ValueError(
      f"{name}={semantics!r} needs {prefix}sparse, the patterns of the tables."
    )
  return tx


def _find_tables(
  argument: str, patterns: tuple[str, ...], tx: Any, params: PyTree
) -> list[trees.Path]:
  """Returns the paths of the tables that are trained.

  Raises:
    PatternError: A pattern matches no parameter, one that is no table, or
      frozen ones alone.
  """
  parameter_groups.check_used(argument, patterns, params)
  frozen = parameter_groups.frozen_mask(tx, params)
  frozen_paths = {
    path
    for path, is_frozen in jax.tree_util.tree_leaves_with_path(frozen)
    if is_frozen
  }
  tables, used = [], set()
  for path, p in jax.tree_util.tree_leaves_with_path(params):
    name = trees.path_string(path)
    i = patterns_lib.first_match(patterns, name)
    if i is None or path in frozen_paths:
      continue
    used.add(i)
    dtype, shape = trees.dtype_of(p), jnp.shape(p)
    if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.floating):
      raise patterns_lib.PatternError(
        f"{argument}[{i}]={patterns[i]!r} matches {name}, {dtype}"
        f"{list(shape)}, which is not a table: a floating-point array with "
        "two dimensions."
      )
    tables.append(path)
  for i, pattern in enumerate(patterns):
    if i not in used:
      raise patterns_lib.PatternError(
        f"{argument}[{i}]={pattern!r} matches frozen parameters alone, which "
        "have no gradients."
      )
  return tables
