"""Converts TrainStates and values between the global and the replica's view.

Inside `Strategy.run` a replica has its own row of each per-replica leaf: the
value itself in place of a `PerReplica`, and its own wrapper states and
collections.
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
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any


def is_state(x: Any) -> bool:
  """Returns whether `x` is a TrainState, Flax's own or ours."""
  return isinstance(x, flax_train_state.TrainState)


def is_node(x: Any) -> bool:
  """Returns whether `x` is a TrainState, a `PerReplica` or a `Replicated`."""
  return is_state(x) or isinstance(x, (PerReplica, Replicated))


def wrappers_of(state: Any) -> tuple[base.Base, ...]:
  """Returns the wrappers of a TrainState; Flax's own has none."""
  return state.wrappers if isinstance(state, TrainState) else ()


def per_replica_mask(state: Any) -> Any:
  """Returns a TrainState of booleans: whether each leaf is per replica."""
  mask = jax.tree.map(
    lambda x: jax.tree.map(lambda _: is_per_replica(x), x),
    state,
    is_leaf=is_per_replica,
  )
  # A wrapper says by its partition_specs which of its leaves are per replica.
  states = {}
  for wrapper in wrappers_of(state):
    name = base.name_of(wrapper)
    states[name] = jax.tree.unflatten(
      jax.tree.structure(state.wrapper_states[name]),
      base.per_replica_mask(wrapper, state.wrapper_states[name]),
    )
  return mask.replace(wrapper_states=states) if states else mask


def to_local(tree: PyTree) -> PyTree:
  """Puts this replica's row in place of every per-replica leaf.

  Args:
    tree: The arguments in the body of `jax.shard_map`, where a per-replica leaf
      has one row.
  """

  def convert_node(node: Any) -> Any:
    if is_per_replica(node):
      return jax.tree.map(lambda x: x[0], node.value)
    if is_state(node):
      return _state_to_local(node)
    return node

  return jax.tree.map(convert_node, tree, is_leaf=is_node)


def to_global(tree: PyTree) -> PyTree:
  """Undoes `to_local`, and makes every other value a `PerReplica`.

  Args:
    tree: What the function returned: TrainStates, and trees of arrays.

  Raises:
    TypeError: The function returned a `PerReplica`.
  """

  def convert_node(node: Any) -> Any:
    if isinstance(node, Replicated):
      return node
    if is_per_replica(node):
      raise TypeError(
        "run: fn returned a PerReplica. fn must return this replica's value; "
        "run returns a PerReplica with the values of all replicas."
      )
    if is_state(node):
      return _state_to_global(node)
    return PerReplica(_add_row_axis(node))

  return jax.tree.map(convert_node, tree, is_leaf=is_node)


def _state_to_local(state: Any) -> Any:
  state = _wrapper_states_to_local(state)
  fields = {
    field.name: getattr(state, field.name)
    for field in dataclasses.fields(state)
  }
  fields = {name: x for name, x in fields.items() if has_per_replica(x)}
  if not fields:
    return state
  if not isinstance(state, TrainState):
    raise TypeError(
      f"run: {type(state).__name__}.{next(iter(fields))} is a PerReplica; "
      "only a flaxshard.TrainState can have one."
    )
  # The state carries the structure of these fields to the end of `fn`, where
  # nothing else shows which of their leaves were per replica.
  return state.replace(
    **{name: to_local(value) for name, value in fields.items()},
    global_structures=tuple(
      (name, jax.tree.structure(value)) for name, value in fields.items()
    ),
  )


def _state_to_global(state: Any) -> Any:
  state = _wrapper_states_to_global(state)
  if not isinstance(state, TrainState) or not state.global_structures:
    return state
  fields = {}
  for name, treedef in state.global_structures:
    leaves = jax.tree.leaves(getattr(state, name))
    fields[name] = jax.tree.map(
      lambda x: _add_row_axis(x) if is_per_replica(x) else x,
      jax.tree.unflatten(treedef, leaves),
      is_leaf=is_per_replica,
    )
  return state.replace(**fields, global_structures=())


def _wrapper_states_to_local(state: Any) -> Any:
  wrappers = wrappers_of(state)
  if not wrappers:
    return state
  # A wrapper's swap_collections sees the state of one replica.
  return _swap_collections(
    state, stack.drop_replica_axis(wrappers, state.wrapper_states)
  )


def _wrapper_states_to_global(state: Any) -> Any:
  wrappers = wrappers_of(state)
  if not wrappers:
    return state
  state = _swap_collections(state, state.wrapper_states)
  return state.replace(
    wrapper_states=stack.add_replica_axis(wrappers, state.wrapper_states)
  )


def _swap_collections(state: Any, wrapper_states: Mapping[str, PyTree]) -> Any:
  """Exchanges the state's collections for those that wrappers keep."""
  if not any(base.overrides(w, "swap_collections") for w in state.wrappers):
    return state.replace(wrapper_states=wrapper_states)
  collections = fields_lib.collections(state)
  for name, tree in collections.items():
    if has_per_replica(tree):
      raise TypeError(
        f"run: TrainState.{name} is a PerReplica; a wrapper of the state keeps "
        "this collection per replica already."
      )
  wrapper_states, collections = stack.swap_collections(
    state.wrappers, wrapper_states, collections
  )
  return state.replace(wrapper_states=wrapper_states, **collections)


def _add_row_axis(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)
