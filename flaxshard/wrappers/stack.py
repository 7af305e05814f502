"""The wrappers of a TrainState as one stack: each function calls them in turn.

Wrappers are ordered outermost first. Their states are a dict by wrapper name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import indexed_slices
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base

PyTree = Any
Wrappers = tuple[base.Base, ...]
States = Mapping[str, PyTree]


def with_policy(wrappers: Wrappers, policy: Policy | None) -> Wrappers:
  """Returns the wrappers for a model of that precision policy."""
  if policy is None:
    return wrappers
  return tuple(w.with_policy(policy) for w in wrappers)


def reduces_gradients(wrappers: Wrappers) -> bool:
  """Returns whether a wrapper reduces gradients over the replicas itself."""
  return any(w.reduces_gradients for w in wrappers)


def defers_reduction(wrappers: Wrappers) -> bool:
  """Returns whether gradients are reduced inside of a wrapper."""
  return any(w.defers_reduction for w in wrappers)


def has_local_updates(wrappers: Wrappers) -> bool:
  """Returns whether a wrapper updates each replica separately."""
  return any(w.local_updates for w in wrappers)


def check_replicas(wrappers: Wrappers, num_replicas: int) -> None:
  """Raises or warns if wrappers do not fit a number of replicas."""
  for w in wrappers:
    w.check_replicas(num_replicas)
  note = divergence(wrappers)
  if note:
    checks.warn(note)


def divergence(wrappers: Wrappers) -> str | None:
  """Returns how replicas come to hold different parameters; None if not."""
  # A wrapper with local updates reduces over all replicas when they commit.
  if has_local_updates(wrappers):
    return None
  notes = [w.divergence() for w in wrappers]
  return " ".join(note for note in notes if note) or None


def replica_groups(
  wrappers: Wrappers, num_replicas: int
) -> Sequence[Sequence[int]]:
  """Returns the groups of replicas that hold the same parameters.

  Empty if the wrappers let replicas differ and do not say in which groups.
  """
  if divergence(wrappers) is None:
    return [range(num_replicas)]
  return next(filter(None, (w.replica_groups() for w in wrappers)), ())


# -- Their states.


def init(
  wrappers: Wrappers,
  params: PyTree,
  tx: Any,
  collections: Mapping[str, PyTree] = types.MappingProxyType({}),
  num_replicas: int = 1,
) -> dict[str, PyTree]:
  """Returns the first states of the wrappers, by wrapper name.

  Args:
    wrappers: The wrappers.
    params: The parameters.
    tx: The optax optimizer.
    collections: The other collections of the train state, by name.
    num_replicas: Length of the replica axis of the per-replica leaves.
  """
  states = {
    base.name_of(w): w.init_collections(w.init(params, tx), dict(collections))
    for w in wrappers
  }
  return add_replica_axis(wrappers, states, num_replicas)


def add_replica_axis(
  wrappers: Wrappers, states: States, num_replicas: int = 1
) -> dict[str, PyTree]:
  """Adds a leading replica axis to the per-replica leaves, by broadcasting."""
  return _map_per_replica(
    lambda path, x: jnp.broadcast_to(x, (num_replicas, *x.shape)),
    wrappers,
    states,
  )


def drop_replica_axis(wrappers: Wrappers, states: States) -> dict[str, PyTree]:
  """Drops the leading replica axis, of length 1, of the per-replica leaves.

  Raises:
    ValueError: There are several replicas.
  """

  def take_only_row(path: str, x: jax.Array) -> jax.Array:
    if x.shape[:1] != (1,):
      raise ValueError(
        f"wrapper_states[{path}] has a row for each of {x.shape[0]} replicas: "
        "call the train step through Strategy.run."
      )
    return x[0]

  return _map_per_replica(take_only_row, wrappers, states)


def local_states(wrappers: Wrappers, states: States) -> dict[str, PyTree]:
  """Returns the states of one replica, without the replica axis.

  Raises:
    ValueError: There are several replicas, and this is outside of `run`.
  """
  # Strategy.run has dropped the axis already.
  if not wrappers or replica_context.get_replica_context() is not None:
    return dict(states)
  return drop_replica_axis(wrappers, states)


def _map_per_replica(
  fn: Callable[[str, jax.Array], jax.Array], wrappers: Wrappers, states: States
) -> dict[str, PyTree]:
  """Applies `fn(path, leaf)` to the per-replica leaves of states."""
  mapped = dict(states)
  for w in wrappers:
    name = base.name_of(w)
    leaves = jax.tree_util.tree_leaves_with_path(states[name])
    treedef: Any = jax.tree.structure(states[name])
    mask = base.per_replica_mask(w, states[name])
    mapped[name] = treedef.unflatten(
      fn(f"{name}/{trees.path_string(path)}", x) if is_per_replica else x
      for (path, x), is_per_replica in zip(leaves, mask, strict=True)
    )
  return mapped


# -- Other collections.


def swap_collections(
  wrappers: Wrappers, states: States, collections: dict[str, PyTree]
) -> tuple[dict[str, PyTree], dict[str, PyTree]]:
  """Exchanges the train state's collections for those of a replica."""
  states = dict(states)
  for w in wrappers:
    name = base.name_of(w)
    states[name], collections = w.swap_collections(states[name], collections)
  return states, collections


def reduce_collection(wrappers: Wrappers, x: jax.Array) -> jax.Array:
  """Reduces a collection's array over the replicas (default: mean)."""
  reducing = [w for w in wrappers if base.overrides(w, "reduce_collection")]
  if not reducing:
    return replica_context.mean_collection(x)
  for w in reducing:
    x = w.reduce_collection(x)
  return x


# -- A step.


def working_params(
  wrappers: Wrappers, states: States, params: PyTree
) -> PyTree:
  """Returns the parameters at which the loss is differentiated."""
  for w in reversed(wrappers):
    params = w.working_params(states[base.name_of(w)], params)
  return params


def eval_params(wrappers: Wrappers, states: States, params: PyTree) -> PyTree:
  """Returns the parameters to evaluate and to export."""
  for w in reversed(wrappers):
    params = w.eval_params(states[base.name_of(w)], params)
  return params


def scale_loss(
  wrappers: Wrappers, states: States, loss: jax.Array
) -> jax.Array:
  """Scales a loss by every wrapper, innermost first."""
  for w in reversed(wrappers):
    loss = w.scale_loss(states[base.name_of(w)], loss)
  return loss


def unscale_gradients(
  wrappers: Wrappers, states: States, grads: PyTree
) -> PyTree:
  """Undoes `scale_loss` on gradients, outermost first."""
  grads = _to_dense_unless_taken(wrappers, "unscale_gradients", grads)
  for w in wrappers:
    grads = w.unscale_gradients(states[base.name_of(w)], grads)
  return grads


def take_narrow_gradients(wrappers: Wrappers, states: States) -> bool:
  """Returns whether `unscale_gradients` may get gradients in 16 bits."""
  unscaling = [w for w in wrappers if base.overrides(w, "unscale_gradients")]
  return bool(unscaling) and all(
    w.takes_narrow_gradients(states[base.name_of(w)]) for w in unscaling
  )


def apply(
  wrappers: Wrappers,
  target: base.Target,
  grads: PyTree,
  update: base.Next,
  reduction: str = "mean",
) -> base.Target:
  """Applies gradients through the wrappers.

  Args:
    wrappers: The wrappers.
    target: The part of the train state that the update may change. It holds
      the states of the wrappers too, so that a wrapper that calls `next` under
      a condition, or twice, updates those of the inner wrappers with it.
    grads: Unscaled gradients like the parameters.
    update: The optimizer's update, called by the innermost wrapper.
    reduction: "mean" or "sum", over the replicas, if a wrapper that defers the
      reduction leaves it to this function.

  Returns:
    The new target.
  """
  # Before the outermost wrapper: `AGN` counts on the wrappers inside of it to
  # change no other rows than those of the gradients that it passes to them.
  grads = _to_dense_unless_taken(wrappers, "apply", grads)

  def apply_from(i: int, target: base.Target, grads: PyTree) -> base.Target:
    if i == len(wrappers):
      return update(target, grads)
    name = base.name_of(wrappers[i])
    apply_inner: base.Next = functools.partial(apply_from, i + 1)
    if wrappers[i].defers_reduction:
      apply_inner = _reduce_before(wrappers, name, apply_inner, reduction)
    returned = wrappers[i].apply(
      target.wrapper_states[name], target, grads, apply_inner
    )
    # A Target is a tuple too: the result of `next`, without a state.
    if type(returned) is not tuple or len(returned) != 2:
      raise TypeError(
        f"wrapper {name!r}: apply must return (target, state), got "
        f"{type(returned).__name__}. next returns the target alone."
      )
    target, state = returned
    states = {**target.wrapper_states, name: state}
    return target._replace(wrapper_states=states)

  return apply_from(0, target, grads)


def _to_dense_unless_taken(
  wrappers: Wrappers, hook: str, grads: PyTree
) -> PyTree:
  """Returns gradients without rows if a wrapper's hook does not take them.

  A wrapper that knows nothing of `IndexedSlices` may map a function over all
  leaves, and so change row numbers.

  Args:
    wrappers: The wrappers.
    hook: Name of the method that gets the gradients.
    grads: The gradients.
  """
  paths = [
    trees.path_string(path)
    for path, g in jax.tree_util.tree_leaves_with_path(
      grads, is_leaf=is_indexed_slices
    )
    if is_indexed_slices(g)
  ]
  unaware = [
    w
    for w in wrappers
    if base.overrides(w, hook) and not w.takes_indexed_slices
  ]
  if not (paths and unaware):
    return grads
  checks.warn(
    f"wrapper {base.name_of(unaware[0])!r}: {hook} takes no IndexedSlices: the "
    f"gradients of {', '.join(paths)} become whole arrays, and the step "
    "updates whole tables. See takes_indexed_slices of flaxshard.wrappers.Base."
  )
  return indexed_slices.to_dense(grads)


def _reduce_before(
  wrappers: Wrappers, name: str, apply_inner: base.Next, reduction: str
) -> base.Next:
  """Returns `apply_inner` on gradients that are reduced over the replicas."""
  context = replica_context.get_replica_context()
  if context is None or has_local_updates(wrappers):
    return apply_inner
  if context.aggregation_skipped:
    raise ValueError(
      f"apply_gradients: {name!r} keeps the gradients of each replica, which "
      "are to be reduced later; skip_gradients_aggregation=True says that they "
      "are reduced: use Accumulate(per_replica=False)."
    )
  if context.gradients_reduced or reduces_gradients(wrappers):
    return apply_inner

  def reduce_and_apply(target: base.Target, grads: PyTree) -> base.Target:
    grads = replica_context.reduce_gradients(reduction, grads)
    with replica_context.gradients_already_reduced():
      return apply_inner(target, grads)

  return reduce_and_apply


def took_batch(
  wrappers: Wrappers, before: States, after: States
) -> jax.Array | None:
  """Returns whether a step without an update has used its batch.

  Args:
    wrappers: The wrappers.
    before: Their states before the step.
    after: Their states after the step.

  Returns:
    A bool scalar; None if no wrapper accumulates gradients.
  """
  answers = [
    w.took_batch(before[base.name_of(w)], after[base.name_of(w)])
    for w in wrappers
  ]
  known = [answer for answer in answers if answer is not None]
  return functools.reduce(jnp.logical_or, known) if known else None


# -- For the training loop.


def metrics(wrappers: Wrappers, states: States) -> dict[str, jax.Array]:
  """Returns the scalars that the wrappers want to have logged, by name."""
  scalars: dict[str, jax.Array] = {}
  for w in wrappers:
    scalars.update(w.metrics(states[base.name_of(w)]))
  return scalars


def pending(wrappers: Wrappers, states: States) -> list[str]:
  """Returns what `Base.pending` of each wrapper returns, without None.

  Empty in a trace and for a state without values.
  """
  leaves = jax.tree.leaves(dict(states))
  if any(
    isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in leaves
  ):
    return []
  notes = [w.pending(states[base.name_of(w)]) for w in wrappers]
  return [note for note in notes if note]


def stalls(wrappers: Wrappers, states: States) -> list[base.Stall]:
  """Returns what `Base.stalled` of each wrapper returns, without None."""
  found = [w.stalled(states[base.name_of(w)]) for w in wrappers]
  return [stall for stall in found if stall]
