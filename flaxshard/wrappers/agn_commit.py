"""The parts of an AGN commit: accumulated gradients, and updates of the center.

An `Update` is one update of the center: `update(center, grads, shared)` returns
the new center. `shared` are further values that are the same on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import optimizer_update
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base

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


# -- What a replica accumulates and commits.


def accumulate(accum: PyTree, grads: PyTree, applied: jax.Array) -> PyTree:
  """Adds gradients to their sums.

  Args:
    accum: The sums; None for leaves that never have a gradient.
    grads: The gradients or parameter deltas; None for leaves without.
    applied: Whether to add them, a bool scalar.
  """

  def add(total: Any, g: Any) -> Any:
    if total is None or g is None:
      return total
    # Not g * applied: the gradients of a skipped step may be infinite.
    return total + jnp.where(applied, g, jnp.zeros_like(g)).astype(total.dtype)

  return jax.tree.map(add, accum, grads, is_leaf=lambda x: x is None)


def param_delta(old: PyTree, new: PyTree) -> PyTree:
  """Returns the change of parameters in one step, with the sign of a gradient.

  Args:
    old: The parameters before the step.
    new: The parameters after the step.

  Returns:
    `old - new`, in the dtypes of the accumulators.
  """

  def subtract(o: jax.Array, n: jax.Array) -> jax.Array:
    dtype = gradients.accumulator_dtype(o.dtype)
    return o.astype(dtype) - n.astype(dtype)

  return jax.tree.map(subtract, old, new)


def commit_gradients(accum: PyTree, grads: PyTree, params: PyTree) -> PyTree:
  """Returns the gradients that a replica commits.

  Args:
    accum: The accumulated gradients or parameter deltas.
    grads: The gradients of this step.
    params: The replica's local parameters.

  Returns:
    The accumulated ones; None for leaves that never have a gradient. Of Flax's
    overwrite-with-gradient collection, the replica's newest values.
  """

  def choose(path: trees.Path, p: jax.Array, x: Any, g: Any) -> Any:
    # The sum of statistics over a period means nothing.
    return p if gradients.is_statistic(path) and g is not None else x

  return jax.tree_util.tree_map_with_path(choose, params, accum, grads)


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
    jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda g: g is None)
  )
  nonzero = {
    # Collectives take numbers, not booleans.
    trees.path_string(path): jnp.any(x != 0).astype(jnp.int32)
    for path, x in jax.tree_util.tree_leaves_with_path(committed)
    if grad_of[path] is None
  }
  if not nonzero:
    return {}
  nonzero = replica_context.reduce_over_replicas("max", nonzero)
  return {path: x > 0 for path, x in nonzero.items()}


# -- Updates of the center.


def create_update(agn: Any, target: base.Target, next: base.Next) -> Update:
  """Returns the update of the center with accumulated gradients.

  Its `shared` are step counts of the optimizer by path, `{}` for those of the
  center, and the result of `received_gradient`.

  Args:
    agn: An `AGN` wrapper.
    target: The target of this step, for its other fields.
    next: Applies gradients with the wrappers inside and the optimizer.
  """

  def update_center(
    old: ModelState, accum: PyTree, shared: tuple[PyTree, PyTree]
  ) -> ModelState:
    counts, received = shared
    grads = _keep_statistics(old.params, normalize(agn, accum))
    if agn.outer_tx is not None:
      new = apply_tx(agn.outer_tx, old, grads)
    else:
      updated = next(
        target._replace(
          # The target's step is local: `state.step` counts no commits.
          step=jnp.zeros((), jnp.int32),
          params=old.params,
          opt_state=opt_state_lib.with_counts(old.opt_state, counts),
        ),
        grads,
      )
      new = ModelState(updated.params, updated.opt_state)
    return keep_without_gradient(old, new, received)

  return update_center


def normalize(agn: Any, accum: PyTree) -> PyTree:
  """Returns the gradients of a commit: the mean over the period."""
  if agn.commit_delta:
    return accum
  # Divided here and not before it is sent: XLA fuses this into the update,
  # elsewhere it would take memory for a copy.
  return gradients.map_gradients(lambda a: a / agn.communication_period, accum)


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


def apply_tx(tx: Any, center: ModelState, grads: PyTree) -> ModelState:
  """Updates the center with an optimizer.

  Args:
    tx: The optax optimizer of the center.
    center: The center, with the state of `tx`.
    grads: Gradients like the parameters; None where a leaf has none.
  """
  params, opt_state = optimizer_update.update(
    tx, center.params, center.opt_state, grads
  )
  return ModelState(
    params, optimizer_update.keep_dtypes(opt_state, center.opt_state)
  )


def _keep_statistics(params: PyTree, grads: PyTree) -> PyTree:
  """Returns gradients with the values of statistics that have none.

  Flax replaces its statistics by their gradients, also by None.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, p, g: p if g is None and gradients.is_statistic(path) else g,
    params,
    grads,
  )
