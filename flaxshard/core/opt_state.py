"""The slots of an optimizer, which lie as their parameters, and its counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp

from flaxshard.core import trees

PyTree = Any
Path = trees.Path
P = jax.sharding.PartitionSpec


def with_optimizer(params: PyTree) -> PyTree:
  """The part of the parameters that the optimizer sees, as Flax has it."""
  if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
    return params["params"]
  return params


def parameters_of(opt_state: PyTree, params: PyTree) -> list[Path | None]:
  """Returns the path of the parameter that each leaf is a slot of, if any.

  A subtree is a copy of the parameters, in every optimizer of optax, if all of
  its leaves have paths of parameters.

  Args:
    opt_state: The state of an optimizer, or any tree with such copies.
    params: The parameters that the optimizer sees.
  """
  # Not by optax.tree_utils.tree_map_params: that calls `tx.init` on a
  # placeholder, which L-BFGS and inits that look at their arrays cannot take.
  known = {path for path, _ in jax.tree_util.tree_leaves_with_path(params)}
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)]
  strays = {
    path[:start]
    for path in paths
    for start in range(len(path) + 1)
    if path[start:] not in known
  }

  def parameter(path: Path) -> Path | None:
    for start in range(len(path) + 1):
      if path[:start] not in strays:
        return path[start:]
    return None

  return [parameter(path) for path in paths]


def specs(opt_state: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
  """Returns the specs of an optimizer's state, whose slots follow parameters.

  A slot has the shape of its parameter, or ends with it: L-BFGS keeps several
  of each in one array. Anything else is replicated: counts, and the row and
  column statistics of Adafactor.

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
  seen = with_optimizer(params)
  followed = {
    path: (tuple(p.shape), spec)
    for (path, p), spec in zip(
      jax.tree_util.tree_leaves_with_path(seen),
      jax.tree.leaves(with_optimizer(param_specs)),
      strict=True,
    )
  }

  def spec_of(slot: Any, parameter: Path | None) -> P:
    shape, spec = followed.get(parameter or (), ((), P()))
    more = len(slot.shape) - len(shape)
    if tuple(spec) and more >= 0 and tuple(slot.shape[more:]) == shape:
      return P(*(None,) * more, *spec)
    return P()

  leaves, treedef = jax.tree.flatten(opt_state)
  return jax.tree.unflatten(
    treedef, list(map(spec_of, leaves, parameters_of(opt_state, seen)))
  )


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
