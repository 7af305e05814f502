"""TrainStates and values as one replica sees them, and as they are outside.

Inside of `Strategy.run` a replica has its own value in the place of a
`PerReplica`, and its own wrapper states and collections.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp

from flaxshard.replicas.values import has_per_replica
from flaxshard.replicas.values import is_per_replica
from flaxshard.replicas.values import PerReplica
from flaxshard.replicas.values import Replicated
from flaxshard.state import fields as fields_lib
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any


def is_state(x: Any) -> bool:
  """Whether `x` is a TrainState, Flax's own or ours."""
  return isinstance(x, flax_train_state.TrainState)


def is_node(x: Any) -> bool:
  """Returns whether `x` is a TrainState, a `PerReplica` or a `Replicated`."""
  return is_state(x) or isinstance(x, (PerReplica, Replicated))


def per_replica_mask(state: Any) -> Any:
  """Returns a state of booleans: which leaves have the replicas in front."""
  marked = jax.tree.map(
    lambda x: jax.tree.map(lambda _: is_per_replica(x), x),
    state,
    is_leaf=is_per_replica,
  )
  states = {}
  for wrapper in getattr(state, "wrappers", ()):
    name = base.name_of(wrapper)
    states[name] = jax.tree.unflatten(
      jax.tree.structure(state.wrapper_states[name]),
      base.per_replica_mask(wrapper, state.wrapper_states[name]),
    )
  return marked.replace(wrapper_states=states) if states else marked


def to_local(tree: PyTree) -> PyTree:
  """Puts this replica's own value in the place of every `PerReplica`."""

  def local(node: Any) -> Any:
    if is_per_replica(node):
      return jax.tree.map(_only, node.value)
    if not is_state(node):
      return node
    node = _wrapper_states_to_local(node)
    fields = {}
    for field in dataclasses.fields(node):
      value = getattr(node, field.name)
      if has_per_replica(value):
        fields[field.name] = value
    if not fields:
      return node
    if not hasattr(node, "per_replica"):
      raise TypeError(
        f"run: {type(node).__name__}.{next(iter(fields))} is a PerReplica; "
        "only a flaxshard.TrainState can have one."
      )
    local_fields = {name: to_local(value) for name, value in fields.items()}
    # What these fields look like from outside travels with the state.
    return node.replace(
      **local_fields,
      per_replica=tuple(
        (name, jax.tree.structure(value)) for name, value in fields.items()
      ),
    )

  return jax.tree.map(local, tree, is_leaf=is_node)


def to_global(tree: PyTree) -> PyTree:
  """Undoes `to_local`: per-replica values become `PerReplica`."""

  def expand(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

  def one(node: Any) -> Any:
    if isinstance(node, Replicated):
      return node
    if is_per_replica(node):
      raise TypeError(
        "run: fn returned a PerReplica; it returns what this replica has, and "
        "a PerReplica of all of them comes back."
      )
    if not is_state(node):
      return PerReplica(expand(node))
    node = _wrapper_states_to_global(node)
    fields = {}
    for name, treedef in getattr(node, "per_replica", ()):
      leaves = jax.tree.leaves(getattr(node, name))
      fields[name] = jax.tree.map(
        lambda x: expand(x) if is_per_replica(x) else x,
        jax.tree.unflatten(treedef, leaves),
        is_leaf=is_per_replica,
      )
    return node.replace(**fields, per_replica=()) if fields else node

  return jax.tree.map(one, tree, is_leaf=is_node)


def _wrapper_states_to_local(state: Any) -> Any:
  """Returns a state as a replica sees it: its own wrapper states."""
  wrappers = getattr(state, "wrappers", ())
  if not wrappers:
    return state
  return _swapped(
    state, stack.drop_replica_axis(wrappers, state.wrapper_states)
  )


def _wrapper_states_to_global(state: Any) -> Any:
  """Undoes `_wrapper_states_to_local`."""
  wrappers = getattr(state, "wrappers", ())
  if not wrappers:
    return state
  state = _swapped(state, state.wrapper_states)
  return state.replace(
    wrapper_states=stack.add_replica_axis(wrappers, state.wrapper_states)
  )


def _swapped(state: Any, states: Mapping[str, PyTree]) -> Any:
  """Puts a replica's own collections for the others, or back."""
  if not any(base.overrides(w, "swap_collections") for w in state.wrappers):
    return state.replace(wrapper_states=states)
  own = ("step", "params", "opt_state", "wrapper_states")
  names = [n for n in fields_lib.array_field_names(state) if n not in own]
  collections = {name: getattr(state, name) for name in names}
  for name, tree in collections.items():
    if has_per_replica(tree):
      raise TypeError(
        f"run: TrainState.{name} is a PerReplica; a wrapper of the state keeps "
        "what each replica has of it already."
      )
  states, collections = stack.swap_collections(
    state.wrappers, states, collections
  )
  return state.replace(wrapper_states=states, **collections)


def _only(x: jax.Array) -> jax.Array:
  if x.shape[:1] != (1,):
    raise ValueError(
      "run: a PerReplica must have the replicas as its first dimension; a "
      f"replica's part of one has shape {x.shape}."
    )
  return x[0]
