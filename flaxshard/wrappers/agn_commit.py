"""The parts of an AGN commit: accumulated gradients, and updates of the center.

An `Update` is one update of the center: `update(center, grads, shared)` returns
the new center. `shared` are further values that are the same on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flax.training import train_state
import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import optimizer_update
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import agn_quantized

PyTree = Any


class ModelState(NamedTuple):
  """Parameters and their optimizer state: of the center, or of one replica.

  Attributes:
    params: The parameters.
    opt_state: The state of the optimizer that updates them.
  """

  params: PyTree
  opt_state: PyTree


Update = Callable[[ModelState, PyTree, PyTree], ModelState]


def param_delta(
  old: PyTree, new: PyTree, grads: PyTree, touched: PyTree
) -> PyTree:
  """Returns the change of parameters in one step, with the sign of a gradient.

  Args:
    old: The parameters before the step.
    new: The parameters after the step.
    grads: The gradients of the step, without equal row numbers.
    touched: The rows of the accumulators of tables, see `row_accumulator`.

  Returns:
    `old - new`, in the dtypes of the accumulators. Of a table, the rows of its
    gradient: a local step has changed no others.
  """

  def subtract(o: jax.Array, n: jax.Array) -> jax.Array:
    dtype = gradients.accumulator_dtype(o.dtype)
    return o.astype(dtype) - n.astype(dtype)

  def subtract_leaf(o: jax.Array, n: jax.Array, g: Any, rows: Any) -> Any:
    if rows is None or not is_indexed_slices(g):
      return subtract(o, n)
    take_rows = lambda x: x.at[g.indices].get(mode="fill", fill_value=0)
    delta = subtract(take_rows(o), take_rows(n))
    return IndexedSlices(g.indices, delta, g.dense_shape, is_unique=True)

  if not jax.tree.leaves(touched):
    touched = jax.tree.map(lambda _: None, old)
  return jax.tree.map(subtract_leaf, old, new, grads, touched)


def commit_gradients(taken: PyTree, grads: PyTree, params: PyTree) -> PyTree:
  """Returns the gradients that a replica commits.

  Args:
    taken: The accumulated gradients or parameter deltas.
    grads: The gradients of this step.
    params: The replica's local parameters.

  Returns:
    The accumulated ones; None for leaves that never have a gradient. Of Flax's
    overwrite-with-gradient collection, the replica's newest values.
  """

  def choose(path: trees.Path, p: jax.Array, x: Any, g: Any) -> Any:
    # The sum of statistics over a period means nothing.
    return p if gradients.is_statistic(path) and g is not None else x

  return jax.tree_util.tree_map_with_path(choose, params, taken, grads)


def received_gradient(committed: PyTree, grads: PyTree) -> dict[str, jax.Array]:
  """Returns which leaves without a gradient now had one earlier in the period.

  Whether a leaf has a gradient is static within one step, but may differ from
  step to step. So for these leaves it is read off the accumulators.

  Args:
    committed: The gradients that this replica commits.
    grads: The gradients of this step; None where a leaf has none.

  Returns:
    A bool scalar by path, the same on all replicas, for each leaf that has an
    accumulator but no gradient in this step.
  """
  grad_of = dict(
    jax.tree_util.tree_leaves_with_path(
      grads, is_leaf=lambda g: g is None or is_indexed_slices(g)
    )
  )
  nonzero = {
    # Collectives take numbers, not booleans.
    trees.path_string(path): _is_nonzero(x).astype(jnp.int32)
    for path, x in jax.tree_util.tree_leaves_with_path(
      committed, is_leaf=is_indexed_slices
    )
    if grad_of[path] is None
  }
  if not nonzero:
    return {}
  nonzero = replica_context.reduce_over_replicas("max", nonzero)
  return {path: x > 0 for path, x in nonzero.items()}


def _is_nonzero(x: Any) -> jax.Array:
  """Returns whether an array, or some rows, have a gradient at all."""
  if is_indexed_slices(x):
    return jnp.any(x.indices < x.dense_shape[0])
  return jnp.any(x != 0)


def keep_without_gradient(
  old: ModelState, new: ModelState, received: dict[str, jax.Array]
) -> ModelState:
  """Keeps parameters and slots of leaves that received no gradient.

  With a zero gradient an optimizer may still change them, by weight decay or
  momentum.

  Args:
    old: The center before the update.
    new: The center after the update.
    received: The result of `received_gradient`.

  Returns:
    `new`, with the leaves of `old` where `received` is False.
  """
  if not received:
    return new

  def choose(path: trees.Path | None, o: jax.Array, n: jax.Array) -> jax.Array:
    name = None if path is None else trees.path_string(path)
    return jnp.where(received[name], n, o) if name in received else n

  params = jax.tree_util.tree_map_with_path(choose, old.params, new.params)
  optimized = opt_state_lib.optimized_params(old.params)
  # The paths of slots are those in what the optimizer gets.
  prefix = () if optimized is old.params else (jax.tree_util.DictKey("params"),)
  parameters = [
    None if path is None else (*prefix, *path)
    for path in opt_state_lib.parameters_of(old.opt_state, optimized)
  ]
  slots = map(
    choose,
    parameters,
    jax.tree.leaves(old.opt_state),
    jax.tree.leaves(new.opt_state),
  )
  opt_state = jax.tree.unflatten(jax.tree.structure(old.opt_state), slots)
  return ModelState(params, opt_state)


def apply_outer_tx(tx: Any, center: ModelState, grads: PyTree) -> ModelState:
  """Updates the center with `outer_tx`.

  Args:
    tx: The optax optimizer of the center.
    center: The center, with the state of `tx`.
    grads: Gradients like the parameters; None where a leaf has none.
  """
  # `AGN` has warned of these when its state was created.
  grads, _ = optimizer_update.to_dense_elsewhere(tx, grads)
  state = train_state.TrainState(
    step=0,
    apply_fn=None,  # type: ignore[arg-type]
    params=center.params,
    tx=tx,
    opt_state=center.opt_state,
  )
  new = optimizer_update.flax_update(state, grads, {})
  return ModelState(
    new.params, optimizer_update.keep_dtypes(new.opt_state, center.opt_state)
  )


def commit_combined(
  op: str,
  update: Update,
  center: ModelState,
  grads: PyTree,
  shared: PyTree,
  fmt: str | None = None,
) -> tuple[ModelState, PyTree, PyTree]:
  """Updates the center once, with the sum or mean of all commits.

  Args:
    op: "sum" or "mean".
    update: One update of the center.
    center: The center.
    grads: The gradients that this replica commits; None for leaves without.
    shared: Further arguments of `update`.
    fmt: The format in which gradients are sent; None: as they are.

  Returns:
    The new center; the new local parameters, which are those of the center; and
    the remainders of `agn_quantized.reduce_quantized`, None without a format.
  """
  remainders = None
  if fmt is None:
    reduced = replica_context.reduce_gradients(op, grads)
  else:
    reduced, remainders = agn_quantized.reduce_quantized(
      op, grads, center.params, fmt
    )
  center = update(center, reduced, shared)
  return center, center.params, remainders
