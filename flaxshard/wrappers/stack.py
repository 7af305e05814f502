"""The wrappers of a train state as one stack: their order and their states.

Wrappers are ordered outermost first. Their states are a dict by wrapper name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import rows
from flaxshard.replicas import values
from flaxshard.wrappers import base
from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.ema import EMA
from flaxshard.wrappers.loss_scale import LossScale

PyTree = Any
# The collection of the parameters that are not trained, such as those of LoRA.
FROZEN = "frozen"
Wrappers = tuple[base.Base, ...]
States = Mapping[str, PyTree]


def check(wrappers: Iterable[base.Base]) -> Wrappers:
  """Checks wrappers and returns them as a tuple.

  Args:
    wrappers: A sequence of wrappers, outermost first.

  Raises:
    TypeError: `wrappers` is no list or tuple, or an entry is not a wrapper.
    ValueError: The same wrapper is given twice, or one may not stand inside of
      another one.
  """
  if not isinstance(wrappers, (tuple, list)):
    # A set has no order.
    raise checks.ArgumentTypeError(
      f"wrappers must be a list or a tuple, the outermost first, got "
      f"{wrappers!r}."
    )
  wrappers = tuple(wrappers)
  for i, wrapper in enumerate(wrappers):
    if not isinstance(wrapper, base.Base):
      raise checks.ArgumentTypeError(
        f"wrappers[{i}] must be an instance of a wrapper, such as "
        f"LossScale('dynamic') or LossScale(FixedLossScale(2.0)), got "
        f"{wrapper!r}. LoRA is the argument lora=."
      )
    for outer in wrappers[:i]:
      if outer.name == wrapper.name:
        raise ValueError(f"wrappers[{i}]: {wrapper.name!r} is given twice.")
      if reason := _conflict(outer, wrapper):
        raise ValueError(
          f"wrappers[{i}]: {wrapper.name!r} may not be inside of "
          f"{outer.name!r}, {reason}."
        )
  return wrappers


def _conflict(outer: base.Base, inner: base.Base) -> str | None:
  """Returns why a wrapper may not stand inside of another one, and what may."""
  remedy = f"put {inner.name!r} first"
  if outer.reduces in ("local", "store"):
    if inner.reduces != "before" or isinstance(inner, (Accumulate, EMA)):
      return f"whose steps are not those of the center: {remedy}"
  if inner.reduces == "inside" and outer.reduces == "self":
    return f"which has reduced the gradients of each batch already: {remedy}"
  if isinstance(outer, Accumulate):
    if isinstance(inner, LossScale) and inner.skips_steps:
      return f"which would add gradients that overflow: {remedy}"
    if inner.reduces in ("self", "local") and not outer.per_replica:
      return "which adds reduced gradients: it needs per_replica=True"
  return None


def with_policy(wrappers: Wrappers, policy: Policy | None) -> Wrappers:
  """Returns the wrappers for a model of that precision policy."""
  return tuple(
    dataclasses.replace(w, policy=policy)
    if isinstance(w, LossScale) and w.policy is None
    else w
    for w in wrappers
  )


def overrides(wrapper: base.Base, hook: str) -> bool:
  """Returns whether a wrapper defines a hook, instead of the default."""
  return getattr(type(wrapper), hook) is not getattr(base.Base, hook)


# -- Replicas.


def reduces(wrappers: Wrappers) -> str:
  """Returns who reduces gradients over the replicas; see `Base.reduces`.

  `"local"` if a wrapper updates each replica separately, else `"self"` if one
  reduces gradients itself, else `"before"`: none does.
  """
  found = [w.reduces for w in wrappers]
  if "local" in found:
    return "local"
  return "self" if "self" in found else "before"


def check_replicas(wrappers: Wrappers, num_replicas: int) -> None:
  """Raises or warns if wrappers do not fit a number of replicas."""
  for w in wrappers:
    w.check_replicas(num_replicas)
  if note := divergence(wrappers):
    checks.warn(note)


def groups_of(wrappers: Wrappers) -> rows.Groups:
  """Returns the groups of replicas with the same parameters; None if all."""
  # A wrapper with local updates reduces over all replicas when they commit.
  if reduces(wrappers) == "local":
    return None
  return next((w.groups for w in wrappers if w.groups), None)


def divergence(wrappers: Wrappers) -> str | None:
  """Returns how replicas come to hold different parameters; None if not."""
  groups = groups_of(wrappers)
  if groups is None:
    return None
  name = next(type(w).__name__ for w in wrappers if w.groups)
  first = next(tuple(group) for group in groups if 0 in group)
  return (
    f"{name}: gradients are reduced in {len(groups)} groups of {len(first)} "
    "replicas, so each group gets different parameters. Those of the group of "
    f"replica 0, {first}, are evaluated and saved."
  )


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

  Raises:
    TypeError: A collection that a wrapper keeps is a `PerReplica` already.
  """
  states = {}
  for w in wrappers:
    state = w.init(params, tx)
    if keeps_collections(state):
      # What is not trained is the same on all replicas.
      kept = {name: x for name, x in collections.items() if name != FROZEN}
      for name, tree in kept.items():
        if values.paths_of_per_replica(tree):
          raise TypeError(
            f"wrapper {w.name!r} keeps every collection per replica: "
            f"{name!r} must not be a PerReplica, but the value of one replica."
          )
      state = state._replace(collections=kept)
    states[w.name] = state
  return map_per_replica(
    lambda _, x: jnp.broadcast_to(x, (num_replicas, *x.shape)),
    wrappers,
    states,
  )


def keeps_collections(state: PyTree) -> bool:
  """Returns whether the state of a wrapper has a field `collections`."""
  return "collections" in getattr(state, "_fields", ())


def map_collections(
  fn: Callable[[dict[str, PyTree]], dict[str, PyTree]], states: States
) -> dict[str, PyTree]:
  """Applies `fn` to the collections of each state that keeps them."""
  return {
    name: state._replace(collections=fn(state.collections))
    if keeps_collections(state)
    else state
    for name, state in states.items()
  }


def local_states(wrappers: Wrappers, states: States) -> dict[str, PyTree]:
  """Returns the states of one replica, without the replica axis.

  Raises:
    ValueError: There are several replicas, and this is outside of `run`.
  """
  # Inside of run the axis is gone already.
  if not wrappers or replica_context.current.get() is not None:
    return dict(states)

  def take_only_row(name: str, x: jax.Array) -> jax.Array:
    if x.shape[:1] != (1,):
      raise ValueError(
        f"wrapper_states[{name!r}] has a row for each of {x.shape[0]} "
        "replicas: call the train step through Strategy.run."
      )
    return x[0]

  return map_per_replica(take_only_row, wrappers, states)


def map_per_replica(
  fn: Callable[[str, jax.Array], Any], wrappers: Wrappers, states: States
) -> dict[str, PyTree]:
  """Applies `fn(wrapper's name, leaf)` to the per-replica leaves of states."""
  mapped = dict(states)

  def map_leaf(name: str, x: jax.Array, spec: jax.P) -> Any:
    return fn(name, x) if values.has_replica_axis(spec) else x

  for w in wrappers:
    if overrides(w, "specs"):
      state = states[w.name]
      map_leaves = functools.partial(map_leaf, w.name)
      mapped[w.name] = jax.tree.map(map_leaves, state, w.specs(state))
  return mapped


# -- Each of them in turn.


def params(
  wrappers: Wrappers, states: States, params: PyTree, mode: str
) -> PyTree:
  """Returns the parameters to use; see `Base.params`."""
  for w in reversed(wrappers):
    params = w.params(states[w.name], params, mode)
  return params


def scale_loss(
  wrappers: Wrappers, states: States, loss: jax.Array
) -> jax.Array:
  """Scales a loss by every wrapper, innermost first."""
  for w in reversed(wrappers):
    loss = w.scale_loss(states[w.name], loss)
  return loss


def metrics(wrappers: Wrappers, states: States) -> dict[str, jax.Array]:
  """Returns the scalars that the wrappers want to have logged, by name."""
  scalars: dict[str, jax.Array] = {}
  for w in wrappers:
    scalars.update(w.metrics(states[w.name]))
  return scalars


def pending(wrappers: Wrappers, states: States) -> list[str]:
  """Returns what the parameters lack, in a sentence for each such wrapper.

  Empty in a trace and for a state without values.
  """
  abstract = (jax.core.Tracer, jax.ShapeDtypeStruct)
  if any(isinstance(x, abstract) for x in jax.tree.leaves(dict(states))):
    return []
  # Of an ensemble, which `jax.vmap` has made, the largest.
  counts = {w.name: int(np.max(w.pending(states[w.name]))) for w in wrappers}
  return [
    f"{name}: the gradients of the last {count} batches are not in params yet."
    for name, count in counts.items()
    if count
  ]
