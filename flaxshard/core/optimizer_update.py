"""Flax's optimizer update, extended to leaves without a gradient and float8."""

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


def flax_update(state: Any, grads: PyTree, replaced: Mapping[str, Any]) -> Any:
  """Applies gradients as Flax's `TrainState.apply_gradients` does.

  A leaf without a gradient keeps its parameter and its slots. Float8 parameters
  are updated in float32.

  Args:
    state: A Flax train state.
    grads: A tree like `state.params`; None where a leaf has no gradient.
    replaced: New values of other fields of the state.

  Returns:
    The new state.
  """
  grad_of = dict(
    jax.tree_util.tree_leaves_with_path(grads, is_leaf=lambda x: x is None)
  )
  params = jax.tree_util.tree_leaves_with_path(state.params)
  if not any(
    _is_float8(p)
    and grad_of[path] is not None
    and not gradients.is_statistic(path)
    and grad_of[path].dtype != p.dtype
    for path, p in params
  ):
    return _update(state, grads, grad_of, replaced)
  # JAX does not promote float8 to other dtypes: compute in float32.
  wide = state.replace(
    params=_widen(state.params), opt_state=_widen(state.opt_state)
  )
  new = _update(wide, grads, grad_of, replaced)
  return new.replace(
    params=keep_dtypes(new.params, state.params),
    opt_state=keep_dtypes(new.opt_state, state.opt_state),
  )


def keep_dtypes(new: PyTree, old: PyTree) -> PyTree:
  """Casts the leaves of `new` to the dtypes of `old`.

  An optimizer's state takes the dtype of the gradients: those in float32 of
  float16 parameters would change it, and the next step would compile again.
  """
  return jax.tree.map(
    lambda n, o: n.astype(o.dtype) if n.dtype != o.dtype else n, new, old
  )


def _update(
  state: Any,
  grads: PyTree,
  grad_of: Mapping[trees.Path, Any],
  replaced: Mapping[str, Any],
) -> Any:
  apply_gradients = train_state.TrainState.apply_gradients
  without_gradient = {
    path
    for path, _ in jax.tree_util.tree_leaves_with_path(state.params)
    if grad_of[path] is None and not gradients.is_statistic(path)
  }
  if not without_gradient:
    return apply_gradients(state, grads=grads, **replaced)
  # The optimizer needs an array for every parameter. With a zero gradient it
  # may still change parameter and slots, by weight decay or momentum: undo it.
  filled = jax.tree_util.tree_map_with_path(
    lambda path, p: (
      _zero_gradient(p) if path in without_gradient else grad_of[path]
    ),
    state.params,
  )
  new = apply_gradients(state, grads=filled, **replaced)
  params = jax.tree_util.tree_map_with_path(
    lambda path, n, o: o if path in without_gradient else n,
    new.params,
    state.params,
  )
  optimized = opt_state_lib.optimized_params(params)
  if optimized is not params:
    # The optimizer's paths begin below the key "params".
    without_gradient = {path[1:] for path in without_gradient}
  parameters = opt_state_lib.parameters_of(state.opt_state, optimized)
  slots = [
    o if parameter in without_gradient else n
    for n, o, parameter in zip(
      jax.tree.leaves(new.opt_state),
      jax.tree.leaves(state.opt_state),
      parameters,
      strict=True,
    )
  ]
  opt_state = jax.tree.unflatten(jax.tree.structure(new.opt_state), slots)
  return new.replace(params=params, opt_state=opt_state)


def _is_float8(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 2


def _widen(tree: PyTree) -> PyTree:
  return jax.tree.map(
    lambda x: x.astype(jnp.float32) if _is_float8(x) else x, tree
  )


def _zero_gradient(p: jax.Array) -> jax.Array:
  # Optimizers divide and take roots, which integer arrays do not support.
  inexact = jnp.issubdtype(p.dtype, jnp.inexact)
  return jnp.zeros(p.shape, p.dtype if inexact else jnp.float32)
