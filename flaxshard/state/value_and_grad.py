"""Differentiates a loss through the wrappers of a TrainState."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextvars
from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import extra_args
from flaxshard.core import gradients
from flaxshard.core import narrow_gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import parameter_groups
from flaxshard.core import tracing
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.sparse import gradient_rows
from flaxshard.state import fields as fields_lib
from flaxshard.state import tf_surface
from flaxshard.state import validation
from flaxshard.wrappers import stack

if TYPE_CHECKING:
  from flaxshard.state.train_state import TrainState

PyTree = Any

# The wrappers' states of the `value_and_grad` that calls its loss function.
inside: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "inside", default=None
)


def value_and_grad(
  state: TrainState,
  loss_fn: Callable[..., Any],
  args: tuple[Any, ...],
  *,
  has_aux: bool,
  var_list: Sequence[Any] | None,
  grad_loss: Any,
  gate_gradients: str,
) -> tuple[Any, PyTree]:
  """Does the work of `TrainState.value_and_grad`, whose arguments it has."""
  checks.one_of("gate_gradients", gate_gradients, ("none", "op", "graph"))
  params = opt_state_lib.trained_params(
    stack.working_params(
      state.wrappers,
      stack.local_states(state.wrappers, state.wrapper_states),
      state.params,
    )
  )
  trained = _select(state, params, var_list)
  # jax.grad rejects integer leaves unless allow_int=True.
  allow_int = not all(map(_is_inexact, jax.tree.leaves(trained)))

  def scaled_loss(trained: PyTree) -> tuple[jax.Array, Any]:
    all_params = parameter_groups.merge(params, trained)
    token = inside.set(state.wrapper_states)
    try:
      result = loss_fn(all_params, *args)
    finally:
      inside.reset(token)
    loss, aux = validation.split_loss(result, has_aux, grad_loss)
    objective = validation.weigh_loss(loss, grad_loss)
    # The unscaled loss is an auxiliary output: to divide the scaled loss by the
    # scale would not undo an overflow.
    return state.scale_loss(objective), (loss, aux) if has_aux else loss

  # Eagerly there is no compiler to save memory for.
  is_narrow = tracing.is_compiling() and stack.take_narrow_gradients(
    state.wrappers, state.wrapper_states
  )
  # A barrier behind a cast from bfloat16 would hide the cast: replicas would
  # exchange the gradients in float32.
  is_gated = tracing.is_compiling() and gate_gradients != "none"
  mask = parameter_groups.sparse_mask(state.tx, trained)
  if mask is not None:
    (_, value), grads = gradient_rows.value_and_grad(
      scaled_loss, trained, mask, narrow=is_narrow or is_gated
    )
  elif is_narrow or is_gated:
    (_, value), grads = narrow_gradients.value_and_grad(scaled_loss, trained)
  else:
    (_, value), grads = jax.value_and_grad(
      scaled_loss, has_aux=True, allow_int=allow_int
    )(trained)
  if is_gated:
    grads = _gate(grads, gate_gradients)
    if not is_narrow:
      grads = _widen(grads, trained)
  grads = state.unscale_gradients(grads)
  # Without integer parameters every leaf is a gradient already.
  return value, gradients.normalize(grads) if allow_int else grads


def extra_arguments(
  state: TrainState,
  loss_fn: Callable[..., Any],
  args: tuple[Any, ...],
  value: Any,
  grads: PyTree,
  *,
  has_aux: bool,
  var_list: Sequence[Any] | None,
  grad_loss: Any,
) -> dict[str, Any]:
  """Returns those of `value`, `grad` and `value_fn` that the optimizer uses.

  Args:
    state: The state.
    loss_fn: The loss function, as in `value_and_grad`.
    args: Its further arguments.
    value: The first result of `value_and_grad`: the loss, or (loss, aux).
    grads: Its second result.
    has_aux: As in `value_and_grad`.
    var_list: As in `value_and_grad`.
    grad_loss: As in `value_and_grad`.

  Raises:
    ValueError: `var_list` is given, and the optimizer uses `value_fn`.
  """

  def objective(value: Any) -> Any:
    loss = value[0] if has_aux else value
    return validation.weigh_loss(loss, grad_loss)

  fields = fields_lib.fields_by_name(type(state))
  known = dict(
    value=objective(value),
    grad=grads,
    value_fn=lambda params: objective(loss_fn(params, *args)),
  )
  names = extra_args.used(state.tx) & set(known) - set(fields)
  if var_list is not None and "value_fn" in names:
    # Undoing its step for some parameters leaves a point it has not seen.
    raise ValueError(
      "minimize: var_list needs an optimizer that updates each parameter by "
      "itself; this one uses value_fn, as line searches do. Freeze the other "
      "parameters: flaxshard.freeze(tx, patterns)."
    )
  return {name: known[name] for name in names}


def _select(
  state: TrainState, params: PyTree, var_list: Sequence[Any] | None
) -> PyTree:
  """Returns the parameters to differentiate, with None for the others."""
  # Only what is trained is differentiated: a frozen parameter has no gradient
  # that the compiler would have to remove.
  trained = parameter_groups.drop_frozen(state.tx, params)
  if var_list is None:
    return trained
  selected = tf_surface.select(var_list, state.params)
  return tf_surface.keep_selected(selected, trained)


def _gate(grads: PyTree, mode: str) -> PyTree:
  """Puts gradients behind optimization barriers.

  XLA runs each operation as soon as its inputs exist. A barrier makes all its
  outputs wait for all its inputs, and keeps the operations before and after it
  from being fused.

  Args:
    grads: A tree of gradients; leaves without a gradient stay as they are.
    mode: "op": one barrier for the gradients of each module, whose paths differ
      in their last key alone. "graph": one barrier for all gradients.
  """
  flat, treedef = jax.tree_util.tree_flatten_with_path(
    grads, is_leaf=is_indexed_slices
  )
  groups: dict[Any, dict[int, Any]] = {}
  for i, (path, g) in enumerate(flat):
    if gradients.has_gradient(path, g) or gradients.is_statistic(path):
      module = path[:-1] if mode == "op" else ()
      groups.setdefault(module, {})[i] = g
  leaves = [g for _, g in flat]
  for group in groups.values():
    gated: Any = jax.lax.optimization_barrier(group)
    for i, g in gated.items():
      leaves[i] = g
  return jax.tree.unflatten(treedef, leaves)


def _widen(grads: PyTree, params: PyTree) -> PyTree:
  """Casts gradients to the dtypes of their parameters."""
  return jax.tree_util.tree_map_with_path(
    lambda path, p, g: (
      g.astype(p.dtype) if gradients.has_gradient(path, g) else g
    ),
    params,
    grads,
  )


def _is_inexact(x: Any) -> bool:
  return jnp.issubdtype(jnp.result_type(x), jnp.inexact)
