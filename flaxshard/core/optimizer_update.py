"""The innermost update: Flax's own, for trees where some leaves stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax.training import train_state
import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees

PyTree = Any


def keep_dtypes(new: PyTree, old: PyTree) -> PyTree:
  """Casts the leaves of `new` to the dtypes that `old` has."""
  # float32 gradients of float16 parameters must not turn their slots float32.
  return jax.tree.map(
    lambda n, o: n.astype(o.dtype) if n.dtype != o.dtype else n, new, old
  )


def flax_update(state: Any, grads: PyTree, replaced: Mapping[str, Any]) -> Any:
  """Flax's own update; leaves without a gradient keep parameter and slots."""
  given = dict(
    jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda x: x is None)
  )
  params = jax.tree_util.tree_leaves_with_path(state.params)
  if not any(
    _is_float8(p)
    and gradients.has_gradient(path, given[path])
    and given[path].dtype != p.dtype
    for path, p in params
  ):
    return _update(state, grads, given, replaced)
  # float8 does not promote: update in float32, store as before.
  wide = state.replace(
    params=_widen(state.params), opt_state=_widen(state.opt_state)
  )
  new = _update(wide, grads, given, replaced)
  return new.replace(
    params=keep_dtypes(new.params, state.params),
    opt_state=keep_dtypes(new.opt_state, state.opt_state),
  )


def _update(
  state: Any,
  grads: PyTree,
  given: Mapping[trees.Path, Any],
  replaced: Mapping[str, Any],
) -> Any:
  apply_gradients = train_state.TrainState.apply_gradients
  fixed = {
    path
    for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
    if not gradients.overwrites(path)
    and not gradients.has_gradient(path, given[path])
  }
  if not fixed:
    return apply_gradients(state, grads=grads, **replaced)
  filled = jax.tree_util.tree_map_with_path(
    lambda path, p: _zeros(p) if path in fixed else given[path],
    state.params,
  )
  new = apply_gradients(state, grads=filled, **replaced)
  params = _keep(fixed, new.params, state.params)
  seen = opt_state_lib.with_optimizer(params)
  if seen is not params:
    fixed = {path[1:] for path in fixed}
  return new.replace(
    params=params,
    opt_state=_keep_slots(seen, fixed, new.opt_state, state.opt_state),
  )


def _is_float8(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 2


def _widen(tree: PyTree) -> PyTree:
  return jax.tree.map(
    lambda x: x.astype(jnp.float32) if _is_float8(x) else x, tree
  )


def _zeros(p: jax.Array) -> jax.Array:
  # Zeros of an integer parameter are float32: optax computes with gradients.
  inexact = jnp.issubdtype(p.dtype, jnp.inexact)
  return jnp.zeros(p.shape, p.dtype if inexact else jnp.float32)


def _keep(fixed: set[trees.Path], new: PyTree, old: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(
    lambda path, n, o: o if path in fixed else n, new, old
  )


def _keep_slots(
  params: PyTree, fixed: set[trees.Path], new: PyTree, old: PyTree
) -> PyTree:
  kept = [
    o if parameter in fixed else n
    for n, o, parameter in zip(
      jax.tree.leaves(new),
      jax.tree.leaves(old),
      opt_state_lib.parameters_of(old, params),
      strict=True,
    )
  ]
  return jax.tree.unflatten(jax.tree.structure(new), kept)
