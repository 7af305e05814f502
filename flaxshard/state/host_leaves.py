"""Leaves of a train state with `AGN(transport="host")`, by their paths."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState

PyTree = Any
S = TypeVar("S", bound=TrainState)


def find(wrappers: Sequence[base.Wrapper]) -> AGN | None:
  """Returns the AGN with `transport="host"` among wrappers, if there is one."""
  for wrapper in wrappers:
    if isinstance(wrapper, AGN) and wrapper.commits_on_host:
      return wrapper
  return None


def agn_state(state: TrainState) -> tuple[AGN, AGNState]:
  """Returns the AGN of a train state, and its state.

  Raises:
    ValueError: There is no AGN with `transport="host"`.
  """
  agn = find(state.wrappers)
  if agn is None:
    names = [base.name_of(w) for w in state.wrappers]
    raise ValueError(
      f"state.wrappers must have an AGN with transport='host', got {names}."
    )
  return agn, state.wrapper_states[base.name_of(agn)]


def with_agn_state(state: S, own: AGNState) -> S:
  """Returns the train state with another state of its AGN."""
  return state.replace(wrapper_states={**state.wrapper_states, AGN.name: own})


def with_collections(
  state: S, given: Mapping[str, Any], *, committed: bool = False
) -> S:
  """Returns the state with other collections.

  Args:
    state: The train state.
    given: New arrays by path, with the name of the collection.
    committed: Whether the worker keeps its own collections.
  """
  _, own = agn_state(state)
  check_keys("collections", given, floating(own.collections))

  def update(tree: PyTree) -> PyTree:
    return map_keys(
      lambda path, x: jnp.asarray(given[path], x.dtype), tree, given
    )

  fields = update({name: getattr(state, name) for name in own.collections})
  state = state.replace(**fields)
  if committed:
    return state
  return with_agn_state(
    state, own._replace(collections=update(own.collections))
  )


def by_path(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths."""
  return {
    trees.path_string(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def map_keys(fn: Any, tree: PyTree, keys: Collection[str]) -> PyTree:
  """Applies `fn(path, leaf)` to the leaves with some paths."""

  def apply(path: trees.Path, x: Any) -> Any:
    name = trees.path_string(path)
    return fn(name, x) if name in keys else x

  return jax.tree_util.tree_map_with_path(apply, tree)


def statistics(params: PyTree) -> dict[str, jax.Array]:
  """Returns the statistics of Flax's fp8 layers, by path."""
  return {
    trees.path_string(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(params)
    if gradients.is_statistic(path)
  }


def floating(collections: Mapping[str, PyTree]) -> dict[str, jax.Array]:
  """Returns the arrays of collections that commits average, by path.

  The parameters that LoRA freezes are the same everywhere.
  """
  given = {n: x for n, x in collections.items() if n != lora.FROZEN}
  return {
    path: x
    for path, x in by_path(given).items()
    if jnp.issubdtype(x.dtype, jnp.floating)
  }


def to_wire(x: jax.Array) -> jax.Array:
  """Returns an array in float32, a complex one as real and imaginary parts."""
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag], -1)
  return x.astype(jnp.float32)


def from_wire(x: Any, like: jax.Array) -> jax.Array:
  """Undoes `to_wire`."""
  x = jnp.asarray(x)
  if jnp.issubdtype(like.dtype, jnp.complexfloating):
    x = jax.lax.complex(x[..., 0], x[..., 1])
  return x.astype(like.dtype)


def nonzero_rows(x: Any, rows: jax.Array) -> jax.Array:
  """Returns which rows of an array are not zero, in the shape of `rows`."""
  axes = tuple(range(rows.ndim, jnp.ndim(x)))
  return jnp.any(jnp.asarray(x) != 0, axes)


def check_keys(
  argument: str, given: Collection[str], known: Collection[str]
) -> None:
  """Raises a ValueError if a key is unknown."""
  unknown = [key for key in given if key not in known]
  if unknown:
    raise ValueError(
      f"{argument}: {unknown[0]!r} is unknown; there are "
      f"{', '.join(sorted(known)[:20])}."
    )
