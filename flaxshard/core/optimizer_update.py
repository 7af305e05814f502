"""Flax's optimizer update, extended to leaves without a gradient and float8."""

from __future__ import annotations

from collections.abc import Mapping
import types
from typing import Any

from flax.training import train_state
import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import extra_args
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import parameter_groups
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices

PyTree = Any


def flax_update(
  state: Any,
  grads: PyTree,
  replaced: Mapping[str, Any],
  extra: Mapping[str, Any] = types.MappingProxyType({}),
) -> Any:
  """Applies gradients as Flax's `TrainState.apply_gradients` does.

  A leaf without a gradient keeps its parameter and its slots. Float8 parameters
  are updated in float32. An `IndexedSlices` becomes a whole array if the
  optimizer does not update rows of that parameter.

  Args:
    state: A Flax train state.
    grads: A tree like `trained_params(state.params)`; None where a leaf has no
      gradient.
    replaced: New values of other fields of the state.
    extra: Extra arguments of the optimizer's update.

  Returns:
    The new state.

  Raises:
    TypeError: The optimizer needs an extra argument that is not given.
  """
  grads, others = to_dense_elsewhere(state.tx, grads)
  if others:
    checks.warn(
      f"grads: {', '.join(others)} has an IndexedSlices, and the optimizer "
      "does not update its rows: it becomes a whole array. Name the parameter "
      "in sparse=[...] of create_train_state, or in flaxshard.sparse_rows."
    )
  bound = state.replace(tx=extra_args.bind(state.tx, extra)) if extra else state
  try:
    new = _update_in_float32(bound, grads, replaced)
  except TypeError as e:
    # Looked for only here: it takes as long as a small eager update.
    missing = sorted(extra_args.required(state.tx) - extra.keys())
    if not missing:
      raise
    write = ", ".join(f"{name}=..." for name in missing)
    raise TypeError(
      f"apply_gradients: the optimizer needs {', '.join(missing)} as well: "
      f"write state.apply_gradients(grads=grads, {write}), or use "
      "state.minimize(loss_fn), which passes value, grad and value_fn."
    ) from e
  return new.replace(tx=state.tx) if extra else new


def keep_dtypes(new: PyTree, old: PyTree) -> PyTree:
  """Casts the leaves of `new` to the dtypes of `old`.

  An optimizer's state takes the dtype of the gradients: those in float32 of
  float16 parameters would change it, and the next step would compile again.
  """
  return jax.tree.map(
    lambda n, o: n.astype(o.dtype) if n.dtype != o.dtype else n, new, old
  )


def _update_in_float32(
  state: Any, grads: PyTree, replaced: Mapping[str, Any]
) -> Any:
  """Updates a state, its float8 parameters in float32."""

  def needs_float32(path: trees.Path, p: jax.Array, g: Any) -> bool:
    # `sparse_rows` computes in float32 itself, for the rows alone.
    if g is None or is_indexed_slices(g) or gradients.is_statistic(path):
      return False
    return _is_float8(p) and g.dtype != p.dtype

  wide_leaves = jax.tree_util.tree_map_with_path(
    needs_float32, opt_state_lib.trained_params(state.params), grads
  )
  if not any(jax.tree.leaves(wide_leaves)):
    return _update(state, grads, replaced)
  # JAX does not promote float8 to other dtypes: compute in float32.
  wide = state.replace(
    params=_widen(state.params), opt_state=_widen(state.opt_state)
  )
  new = _update(wide, grads, replaced)
  return new.replace(
    params=keep_dtypes(new.params, state.params),
    opt_state=keep_dtypes(new.opt_state, state.opt_state),
  )


def _update(state: Any, grads: PyTree, replaced: Mapping[str, Any]) -> Any:
  apply_gradients = train_state.TrainState.apply_gradients
  trained = opt_state_lib.trained_params(state.params)
  # A tree of booleans. Statistics are not frozen: Flax replaces them.
  frozen = jax.tree_util.tree_map_with_path(
    lambda path, _, g: g is None and not gradients.is_statistic(path),
    trained,
    grads,
  )
  if not any(jax.tree.leaves(frozen)):
    return apply_gradients(state, grads=grads, **replaced)
  # The optimizer needs an array for every parameter. With a zero gradient it
  # may still change parameter and slots, by weight decay or momentum: undo it.
  is_table = parameter_groups.sparse_mask(state.tx, trained)
  filled = jax.tree.map(
    lambda is_frozen, table, p, g: _zero_gradient(p, table) if is_frozen else g,
    frozen,
    is_table or jax.tree.map(lambda _: False, trained),
    trained,
    grads,
  )
  new = apply_gradients(state, grads=filled, **replaced)
  is_pair = isinstance(state.params, optax.LookaheadParams)
  params = jax.tree.map(
    lambda is_frozen, n, o: o if is_frozen else n,
    optax.LookaheadParams(frozen, frozen) if is_pair else frozen,
    new.params,
    state.params,
  )
  optimized = opt_state_lib.optimized_params
  is_frozen = dict(jax.tree_util.tree_leaves_with_path(optimized(frozen)))
  # None: leaves such as step counts belong to no parameter.
  parameters = opt_state_lib.parameters_of(state.opt_state, optimized(trained))
  slots = [
    o if parameter is not None and is_frozen[parameter] else n
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


def to_dense_elsewhere(tx: Any, grads: PyTree) -> tuple[PyTree, list[str]]:
  """Makes whole arrays of rows that an optimizer does not update as rows.

  Args:
    tx: The optimizer.
    grads: A tree of arrays, `IndexedSlices` and None.

  Returns:
    The gradients, and the paths of these arrays.
  """
  flat = jax.tree_util.tree_leaves_with_path(grads, is_leaf=is_indexed_slices)
  if not any(is_indexed_slices(x) for _, x in flat):
    return grads, []
  mask = parameter_groups.sparse_mask(tx, grads)
  is_table = [False] * len(flat) if mask is None else jax.tree.leaves(mask)
  others = {
    path
    for (path, x), of_tx in zip(flat, is_table, strict=True)
    if is_indexed_slices(x) and not of_tx
  }
  new = jax.tree_util.tree_map_with_path(
    lambda path, x: x.to_dense() if path in others else x,
    grads,
    is_leaf=is_indexed_slices,
  )
  return new, [trees.path_string(path) for path, _ in flat if path in others]


def _zero_gradient(p: jax.Array, is_table: bool) -> Any:
  if is_table:
    return IndexedSlices(
      jnp.zeros(0, jnp.int32), jnp.zeros((0, *p.shape[1:]), p.dtype), p.shape
    )
  # Optimizers divide and take roots, which integer arrays do not support.
  inexact = jnp.issubdtype(p.dtype, jnp.inexact)
  return jnp.zeros(p.shape, p.dtype if inexact else jnp.float32)
