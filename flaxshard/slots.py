"""The slots of an optimizer, which lie as their parameters, and its counts."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp

from flaxshard import trees

PyTree = Any
P = jax.sharding.PartitionSpec


def with_optimizer(params: PyTree) -> PyTree:
  """The part of the parameters that the optimizer sees, as Flax has it."""
  if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
    return params["params"]
  return params


def parameter_of(
  path: trees.Path, params: Container[Any]
) -> tuple[str, ...] | None:
  """Returns the parameter whose path a slot's path ends with, if any."""
  # By path, not by optax.tree_utils.tree_map_params: that calls `tx.init` on a
  # placeholder, which L-BFGS and inits that look at their arrays cannot take.
  names = trees.path_strings(path)
  tails = (names[start:] for start in range(len(names)))
  return next((tail for tail in tails if tail in params), None)


def specs(opt_state: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
  """Returns the specs of an optimizer's state, whose slots follow parameters.

  A slot is a leaf whose path ends with that of a parameter, as in every
  optimizer of optax, and whose shape does so too: L-BFGS keeps several of each
  in one array. Anything else is replicated: counts, and the row and column
  statistics of Adafactor.

  Args:
    opt_state: The state, or shapes and dtypes of it.
    params: The parameters, or shapes and dtypes of them.
    param_specs: Their specs.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.ones((4, 2))}
    >>> state = optax.sgd(0.1, momentum=0.9).init(params)
    >>> specs(state, params, {"w": P("replica")})[0].trace
    {'w': P('replica',)}
  """
  shapes = jax.tree_util.tree_leaves_with_path(with_optimizer(params))
  followed: dict[tuple[str, ...] | None, tuple[tuple[int, ...], P]] = {
    trees.path_strings(path): (tuple(p.shape), spec)
    for (path, p), spec in zip(
      shapes, jax.tree.leaves(with_optimizer(param_specs)), strict=True
    )
  }

  def spec_of(path: trees.Path, slot: Any) -> P:
    shape, spec = followed.get(parameter_of(path, followed), ((), P()))
    more = len(slot.shape) - len(shape)
    if tuple(spec) and more >= 0 and tuple(slot.shape[more:]) == shape:
      return P(*(None,) * more, *spec)
    return P()

  return jax.tree_util.tree_map_with_path(spec_of, opt_state)


def _is_count(path: trees.Path, leaf: Any) -> bool:
  return (
    trees.path_strings(path[-1:]) in (("count",), ("step_count",))
    and not leaf.shape
    and jnp.issubdtype(leaf.dtype, jnp.integer)
  )


def counts(opt_state: PyTree) -> dict[str, jax.Array]:
  """Returns the step counts in an optimizer's state, by path."""
  return {
    trees.path_string(path): leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)
    if _is_count(path, leaf)
  }


def with_counts(opt_state: PyTree, new: Mapping[str, jax.Array]) -> PyTree:
  """Returns an optimizer's state with those step counts."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: (
      new.get(trees.path_string(path), leaf) if _is_count(path, leaf) else leaf
    ),
    opt_state,
  )
