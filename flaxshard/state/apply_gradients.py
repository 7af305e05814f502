"""Applies gradients to a TrainState through its wrappers."""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import functools
from typing import Any, TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import extra_args
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import optimizer_update
from flaxshard.core import parameter_groups
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import rows
from flaxshard.replicas import values
from flaxshard.state import fields as fields_lib
from flaxshard.state import tf_surface
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

if TYPE_CHECKING:
  from flaxshard.state.train_state import TrainState

PyTree = Any
S = TypeVar("S", bound="TrainState")

# Fields that only the update itself changes.
_RESERVED = frozenset(
  ("step", "params", "opt_state", "wrapper_states", "wrappers")
)
_STATIC = frozenset(("apply_fn", "tx", "global_structures"))


def apply_gradients(
  state: S,
  grads: PyTree,
  given: Mapping[str, Any],
  *,
  skip_gradients_aggregation: bool,
  aggregation: str | None,
) -> S:
  """Does the work of `TrainState.apply_gradients`.

  Args:
    state: The state.
    grads: A tree of gradients.
    given: Fields to replace, and extra arguments of the optimizer.
    skip_gradients_aggregation: As in the method.
    aggregation: As in the method.
  """
  op = tf_surface.check_aggregation(
    aggregation, skip_gradients_aggregation, state.wrappers
  )
  replaced, extra = _split_names(state, given)
  tf_surface.check_extra_arguments(op, extra)
  grads = _check_gradients(state, grads)
  mark: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
  if replica_context.get_replica_context() is None:
    grads = rows.gather_over_mesh(grads)
  else:
    replaced = _reduce_collections(state, replaced)
    if skip_gradients_aggregation:
      mark = replica_context.gradients_already_reduced(by_user=True)
    else:
      if not (
        stack.reduces_gradients(state.wrappers)
        or stack.defers_reduction(state.wrappers)
      ):
        # Before the wrappers: a reduced gradient carries the NaN of any replica
        # to all of them, so that LossScale needs no collective of its own.
        grads = replica_context.reduce_gradients(op, grads)
        mark = replica_context.gradients_already_reduced()
      if not stack.has_local_updates(state.wrappers):
        extra = replica_context.mean_extra_args(extra)
  if not state.wrappers:
    return optimizer_update.flax_update(state, grads, replaced, extra)
  with mark:
    return _update_through_wrappers(state, grads, replaced, extra, op)


def _check_gradients(state: TrainState, grads: PyTree) -> PyTree:
  """Returns gradients with None for each leaf that has or needs none."""
  trained = opt_state_lib.trained_params(state.params)
  grads = trees.conform(
    "grads", grads, trained, dtypes=False, of_gradients=True
  )
  grads = parameter_groups.drop_frozen(state.tx, gradients.normalize(grads))
  if not jax.tree.leaves(grads):
    paths = map(trees.path_string, trees.paths(trained))
    raise ValueError(
      f"No gradients provided for any parameter: {', '.join(paths)}."
    )
  return grads


def _split_names(
  state: TrainState, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Splits arguments into fields and extra arguments of the optimizer."""
  fields = set(fields_lib.fields_by_name(type(state))) - _RESERVED
  replaced = {k: v for k, v in given.items() if k in fields}
  extra = {k: v for k, v in given.items() if k not in fields}
  names = extra_args.accepted(state.tx) if extra else None
  for name in extra:
    if name in _RESERVED or (names is not None and name not in names):
      allowed = sorted((fields - _STATIC) | (names or set()))
      hint = checks.did_you_mean(name, allowed)
      raise TypeError(
        f"apply_gradients: {name!r} cannot be replaced, and is no argument of "
        f"the optimizer; allowed: grads, {', '.join(allowed)}.{hint}"
      )
  return replaced, extra


def _reduce_collections(
  state: TrainState, replaced: Mapping[str, PyTree]
) -> dict[str, PyTree]:
  """Reduces new collections over the replicas, except per-replica leaves."""
  global_structures = dict(state.global_structures)

  def reduce_leaf(x: Any) -> Any:
    if values.is_per_replica(x):
      return x
    return stack.reduce_collection(state.wrappers, x)

  reduced = dict(replaced)
  array_fields = fields_lib.array_field_names(state)
  for name in [n for n in replaced if n in array_fields]:
    leaves, treedef = jax.tree.flatten(
      trees.conform(name, replaced[name], getattr(state, name))
    )
    # In the structure from outside of `run` the per-replica leaves show.
    tree = jax.tree.unflatten(global_structures.get(name, treedef), leaves)
    tree = jax.tree.map(reduce_leaf, tree, is_leaf=values.is_per_replica)
    reduced[name] = jax.tree.unflatten(treedef, jax.tree.leaves(tree))
  return reduced


def _update_through_wrappers(
  state: S,
  grads: PyTree,
  replaced: Mapping[str, Any],
  extra: Mapping[str, Any],
  op: str,
) -> S:
  """Returns the state after the wrappers and, if they call it, the update.

  Args:
    state: The state.
    grads: The gradients; None marks the leaves without one.
    replaced: The fields to replace.
    extra: Extra arguments of the optimizer.
    op: "mean" or "sum", how the gradients of replicas are reduced.
  """
  collections, static = _split_collections(state, replaced)
  old_collections = {name: getattr(state, name) for name in collections}

  def update(target: base.Target, grads: PyTree) -> base.Target:
    current = state.replace(
      step=target.step, params=target.params, opt_state=target.opt_state
    )
    given = extra
    context = replica_context.get_replica_context()
    has_local_updates = stack.has_local_updates(state.wrappers)
    if has_local_updates and context and context.gradients_reduced:
      # Local updates take the loss of their replica, a commit takes the mean.
      given = replica_context.mean_extra_args(extra)
    new = optimizer_update.flax_update(current, grads, {}, given)
    return target._replace(
      step=new.step,
      params=new.params,
      opt_state=optimizer_update.keep_dtypes(new.opt_state, target.opt_state),
      collections=collections,
    )

  states = stack.local_states(state.wrappers, state.wrapper_states)
  target = base.Target(
    # A step that a user made may be weakly typed: lax.cond refuses branches of
    # different types.
    step=jnp.asarray(state.step, jnp.int32),
    params=state.params,
    opt_state=state.opt_state,
    # The old values: they stay if a wrapper does not call `update`.
    collections=old_collections,
    wrapper_states=states,
  )
  target = stack.apply(state.wrappers, target, grads, update, op)
  new_states, new_collections = target.wrapper_states, target.collections
  is_added = stack.took_batch(state.wrappers, states, new_states)
  if is_added is not None:
    # The update, which replaces collections, did not run for this batch.
    new_collections = jax.tree.map(
      functools.partial(jnp.where, is_added), collections, new_collections
    )
  if replica_context.get_replica_context() is None:
    new_states = stack.add_replica_axis(state.wrappers, new_states)
  return state.replace(
    step=target.step,
    params=target.params,
    opt_state=target.opt_state,
    wrapper_states=new_states,
    **new_collections,
    **static,
  )


def _split_collections(
  state: TrainState, replaced: Mapping[str, PyTree]
) -> tuple[dict[str, PyTree], dict[str, Any]]:
  """Checks the fields to replace; returns collections and static fields."""
  array_fields = fields_lib.array_field_names(state)
  collections, static = {}, {}
  for name, value in replaced.items():
    if name not in array_fields:
      static[name] = value
      continue
    value = trees.conform(name, value, getattr(state, name))
    # A weakly typed leaf would make the next call of the step recompile.
    collections[name] = jax.tree.map(trees.drop_weak_type, value)
  return collections, static
