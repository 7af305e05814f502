"""A step through the wrappers: from a loss to gradients, and to an update.

`TrainState`, `flaxshard.nnx.Optimizer` and `flaxshard.wrap` call the functions
here, which take wrappers, their states and parameters as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
import contextvars
import functools
import types
from typing import Any

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import indexed_slices
from flaxshard.core import jaxprs
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import rows
from flaxshard.sparse import lookups
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers.loss_scale import LossScale

PyTree = Any
Wrappers = stack.Wrappers
States = stack.States

# The wrappers' states of the `value_and_grad` that calls its loss function.
_inside: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "inside", default=None
)


# -- From a loss to gradients.


def value_and_grad(
  tx: Any,
  wrappers: Wrappers,
  states: States,
  params: PyTree,
  loss_fn: Callable[..., Any],
  args: tuple[Any, ...] = (),
  *,
  has_aux: bool = False,
  selected: Container[str] | None = None,
  grad_loss: Any = None,
  gate_gradients: str = "none",
) -> tuple[Any, PyTree]:
  """Differentiates a loss through wrappers.

  Args:
    tx: The optax optimizer.
    wrappers: The wrappers.
    states: Their states.
    params: The parameters.
    loss_fn: `loss_fn(params, *args)` returns a loss, or `(loss, aux)`.
    args: See there.
    has_aux: Whether `loss_fn` returns auxiliary output.
    selected: The paths of the parameters to differentiate; None for all.
    grad_loss: See `TrainState.value_and_grad`.
    gate_gradients: See there.

  Returns:
    `(loss, grads)` or `((loss, aux), grads)`, unscaled.
  """
  if grad_loss is not None:
    trees.check_arrays("grad_loss", grad_loss)
  if gate_gradients != "none":
    checks.one_of("gate_gradients", gate_gradients, ("none", "op", "graph"))
  local = stack.local_states(wrappers, states)
  params = stack.params(wrappers, local, params, "train")
  # Only what is trained is differentiated: a frozen parameter has no gradient
  # that the compiler would have to remove.
  trained = gradients.trained(tx, params, selected)

  def scaled_loss(trained: PyTree) -> tuple[jax.Array, Any]:
    token = _inside.set(states)
    try:
      merged = jax.tree.map(
        lambda p, new: p if new is None else new, params, trained
      )
      result = loss_fn(merged, *args)
    finally:
      _inside.reset(token)
    loss, aux = split_loss(result, has_aux, grad_loss)
    # The unscaled loss is an auxiliary output: to divide the scaled loss by the
    # scale would not undo an overflow.
    scaled = stack.scale_loss(wrappers, local, weigh_loss(loss, grad_loss))
    return scaled, (loss, aux) if has_aux else loss

  # Operations are traced into a program, as by `jax.jit`. They are not under
  # `jax.vmap` or `jax.grad` alone, and there is no compiler to save memory for.
  is_compiling = isinstance(jnp.zeros(()), jax.core.Tracer)
  is_narrow = is_compiling and _unscales_16_bits(wrappers, local)
  # A barrier behind a cast from bfloat16 would hide the cast: replicas would
  # exchange the gradients in float32.
  is_gated = is_compiling and gate_gradients != "none"

  def differentiate(fn: Callable[..., Any], params: PyTree) -> Any:
    if is_narrow or is_gated:
      return _narrow_value_and_grad(fn, params)
    return jax.value_and_grad(fn, has_aux=True)(params)

  if tables := gradients.tables(tx, trained):
    (_, value), grads = lookups.value_and_grad(
      scaled_loss, trained, tables, differentiate
    )
  else:
    (_, value), grads = differentiate(scaled_loss, trained)
  if is_gated:
    # XLA runs each operation as soon as its inputs exist. All outputs of a
    # barrier wait for all its inputs.
    grads = jax.lax.optimization_barrier(grads)
  if is_gated and not is_narrow:
    grads = jax.tree.map(lambda p, g: g.astype(p.dtype), trained, grads)
  return value, unscale_gradients(tx, wrappers, local, grads)


def scale_loss(wrappers: Wrappers, states: States, loss: jax.Array) -> Any:
  """Scales a loss, for a step without `value_and_grad`.

  Raises:
    ValueError: The call is in a loss of `value_and_grad`, which scales it.
  """
  if wrappers and _inside.get() is states:
    raise ValueError(
      "scale_loss: value_and_grad and minimize scale the loss themselves. "
      "Return the loss as it is."
    )
  return stack.scale_loss(wrappers, stack.local_states(wrappers, states), loss)


def unscale_gradients(
  tx: Any, wrappers: Wrappers, states: States, grads: PyTree
) -> PyTree:
  """Undoes the scaling of the loss on gradients, outermost wrapper first.

  Args:
    tx: The optax optimizer.
    wrappers: The wrappers.
    states: Their states, of one replica.
    grads: Gradients of the scaled loss.
  """
  grads = _keep_rows(tx, wrappers, "unscale_gradients", grads)
  for w in wrappers:
    grads = w.unscale_gradients(states[w.name], grads)
  return grads


def weigh_loss(loss: Any, grad_loss: Any) -> Any:
  """Returns the scalar that is differentiated: the loss, weighted and summed.

  Args:
    loss: The loss.
    grad_loss: The cotangent of the loss; None for a scalar that stays.
  """
  if grad_loss is None:
    return loss
  # A product or a sum in 16 bits could overflow.
  loss = gradients.widen(jnp.asarray(loss))
  return jnp.sum(loss * jnp.asarray(grad_loss, loss.dtype))


def split_loss(
  value: Any, has_aux: bool, grad_loss: Any = None
) -> tuple[Any, Any]:
  """Returns the loss and the auxiliary output that a loss function returned."""
  is_pair = isinstance(value, (tuple, list)) and len(value) == 2
  loss, aux = value if is_pair else (value, None)
  wanted = () if grad_loss is None else jnp.shape(grad_loss)
  # None has the shape of a scalar.
  if is_pair != has_aux or loss is None or jnp.shape(loss) != wanted:
    kind = f"of the shape {wanted} of grad_loss" if wanted else "a scalar"
    if is_pair != has_aux:
      got = "a pair" if is_pair else "no pair"
    elif loss is None:
      got = "None (is `return` there?)"
    else:
      got = checks.describe(loss)
    raise checks.ArgumentTypeError(
      f"loss_fn must return the loss, {kind}, or (loss, aux) with "
      f"has_aux=True; got {got} with has_aux={has_aux}."
    )
  return loss, aux


def _narrow_value_and_grad(
  fn: Callable[[PyTree], tuple[jax.Array, Any]], params: PyTree
) -> tuple[tuple[jax.Array, Any], PyTree]:
  """Differentiates a function; casts gradients to 16 bits where that is exact.

  A model in mixed precision casts its float32 parameters to 16 bits. Then the
  last operation on a gradient casts it from 16 bits to float32. Such a gradient
  fits into 16 bits without rounding.

  Args:
    fn: Returns a real scalar and auxiliary output. Its gradient is traced once,
      and the traced program is evaluated.
    params: The argument of `fn`.

  Returns:
    What `jax.value_and_grad(fn, has_aux=True)(params)` returns, but the
    gradients that it casts from float16 or bfloat16 as its last operation are
    cast back.

  Raises:
    TypeError: The scalar is complex.

  Example:
    >>> loss = lambda w: ((w.astype(jnp.bfloat16) ** 2).astype("float32"), None)
    >>> (value, _), grad = _narrow_value_and_grad(loss, jnp.float32(3))
    >>> float(value), float(grad), grad.dtype
    (9.0, 6.0, dtype(bfloat16))
  """
  # Outside of the trace below, so that `fn` may store what it computes.
  value, pullback, aux = jax.vjp(fn, params, has_aux=True)
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise TypeError(f"loss_fn must return a real scalar, got {value.dtype}.")
  one = jnp.ones_like(value)
  program = jax.make_jaxpr(pullback)(one)
  grads = list(jax_core.jaxpr_as_fun(program)(one))
  sources: jaxprs.Sources = {}
  for i, variable in enumerate(program.jaxpr.outvars):
    dtype = jaxprs.dtype_before_cast(program.jaxpr, variable, sources)
    if dtype is not None:
      grads[i] = grads[i].astype(dtype)
  return (value, aux), jax.tree.unflatten(jax.tree.structure(params), grads)


def _unscales_16_bits(wrappers: Wrappers, states: States) -> bool:
  """Returns whether a dynamic LossScale alone unscales the gradients."""
  unscaling = [w for w in wrappers if stack.overrides(w, "unscale_gradients")]
  return [
    isinstance(w, LossScale) and w.skips_steps and bool(states[w.name])
    for w in unscaling
  ] == [True]


# -- From gradients to an update.


def update(
  tx: Any,
  wrappers: Wrappers,
  target: base.Target,
  grads: PyTree,
  extra: Mapping[str, Any] = types.MappingProxyType({}),
  *,
  reduction: str | None = "mean",
  own_paths: Container[tuple[str, ...]] = (),
) -> base.Target:
  """Applies gradients through wrappers and an optimizer.

  Args:
    tx: The optax optimizer.
    wrappers: The wrappers.
    target: What changes. Wrappers and replicas need new collections with the
      structure, shapes and dtypes of the old ones.
    grads: Unscaled gradients.
    extra: Extra arguments of the optimizer's update.
    reduction: How gradients are reduced over the replicas, if no wrapper does
      it: "mean", "sum", or None for gradients that are the same on all.
    own_paths: The paths in the collections of what each replica has for itself.

  Returns:
    The new target.

  Raises:
    ValueError: `grads` does not match the parameters, or none is there; or a
      new collection does not match the old one.
  """
  context = replica_context.current.get()
  if target.collections and (wrappers or context is not None):
    target = _conform_collections(wrappers, target, own_paths)
  # None for each leaf that has or needs no gradient.
  grads = gradients.conform(tx, grads, target.params)
  if not jax.tree.leaves(grads):
    raise ValueError(
      "No gradients provided for any parameter: "
      f"{', '.join(trees.names(target.params)) or 'params has no leaves'}."
    )
  # None outside of `Strategy.run`, where there is nothing to reduce.
  who = stack.reduces(wrappers) if context is not None else None
  if who in ("before", "self") and reduction is not None:
    groups = stack.groups_of(wrappers)
    extra = replica_context.mean_extra_args(extra, groups)

  def apply_tx(target: base.Target, grads: PyTree) -> base.Target:
    given = extra
    inner = replica_context.current.get()
    if who == "local" and inner is not None and inner.gradients_reduced:
      # Local updates take the loss of their replica, a commit takes the mean.
      given = replica_context.mean_extra_args(extra)
    params, opt_state = opt_state_lib.update(
      tx,
      target.params,
      target.opt_state,
      grads,
      given,
      keep_dtypes=bool(wrappers),
    )
    return target._replace(
      step=target.step + 1,
      params=params,
      opt_state=opt_state,
      collections={**target.collections, **target.new_collections},
    )

  # How gradients are to be reduced before a wrapper gets them.
  op = reduction if who == "before" else None
  # What gradients pass through, from the optimizer to the outside.
  apply: base.Next = apply_tx
  for w in reversed(wrappers):
    if w.reduces == "inside" and context is not None:
      if reduction is None:
        raise ValueError(
          f"skip_gradients_aggregation: the wrapper {w.name!r} keeps gradients "
          "of each replica, which it reduces when it applies them. Without "
          "that, use per_replica=False."
        )
      if op is not None:
        apply, op = functools.partial(_apply_reduced, op, apply), None
    apply = functools.partial(_apply_wrapper, w, apply)
  if op is not None:
    # Before all others: a reduced gradient carries the NaN of any replica to
    # all of them, so that LossScale needs no collective of its own.
    grads = replica_context.reduce_gradients(op, grads)
  if gradients.find_rows(grads):
    grads = rows.gather_over_mesh(grads)
    grads = _keep_rows(tx, wrappers, "apply", grads)
  if wrappers:
    target = target._replace(
      # A step that a user made may be weakly typed: lax.cond refuses branches
      # of different types.
      step=jnp.asarray(target.step, jnp.int32),
      wrapper_states=stack.local_states(wrappers, target.wrapper_states),
    )
  with replica_context.marked(
    gradients_reduced=op is not None, aggregation_skipped=reduction is None
  ):
    target = apply(target, grads)
  if wrappers and context is None:
    states = target.wrapper_states
    if target.collections:
      # Without `Strategy.run` collections are not swapped: the user sees those
      # of this replica after every step.
      new = target.collections
      states = stack.map_collections(
        lambda kept: {n: new.get(n, x) for n, x in kept.items()}, states
      )
    states = stack.map_per_replica(
      lambda _, x: jnp.expand_dims(x, 0), wrappers, states
    )
    return target._replace(wrapper_states=states)
  return target


def _conform_collections(
  wrappers: Wrappers, target: base.Target, own_paths: Container[tuple[str, ...]]
) -> base.Target:
  """Returns a target whose new collections can take the place of the old ones.

  A skipped step keeps the old ones, so the new ones must be like them. They are
  averaged over the replicas.
  """
  new = {
    name: jax.tree.map(
      trees.drop_weak_type, trees.conform(name, x, target.collections[name])
    )
    for name, x in target.new_collections.items()
  }
  # The commits of wrappers with local updates reduce them.
  if replica_context.current.get() and stack.reduces(wrappers) != "local":
    groups = stack.groups_of(wrappers)
    is_own = lambda path, _: trees.path_strings(path) in own_paths
    new = jax.tree.map_with_path(
      lambda path, x: (
        x if is_own(path, x) else replica_context.mean_collection(x, groups)
      ),
      new,
      is_leaf=is_own,
      is_leaf_takes_path=True,
    )
  return target._replace(new_collections=new)


def _apply_wrapper(
  wrapper: base.Base, next: base.Next, target: base.Target, grads: PyTree
) -> base.Target:
  state = target.wrapper_states[wrapper.name]
  target, state = wrapper.apply(state, target, grads, next)
  states = {**target.wrapper_states, wrapper.name: state}
  return target._replace(wrapper_states=states)


def _apply_reduced(
  op: Any, next: base.Next, target: base.Target, grads: PyTree
) -> base.Target:
  """Applies the mean or the sum of gradients over the replicas."""
  grads = replica_context.reduce_gradients(op, grads)
  with replica_context.marked(gradients_reduced=True):
    return next(target, grads)


def _keep_rows(tx: Any, wrappers: Wrappers, hook: str, grads: PyTree) -> PyTree:
  """Returns gradients with rows where wrappers and the optimizer take them.

  A wrapper that knows nothing of `IndexedSlices` may map a function over all
  leaves, and so change row numbers.

  Args:
    tx: The optax optimizer.
    wrappers: The wrappers.
    hook: Name of the method of a wrapper that gets the gradients.
    grads: The gradients.
  """
  found = gradients.find_rows(grads)
  if not found:
    return grads
  kept = gradients.tables(tx, grads)
  names = lambda paths: ", ".join(map(trees.path_string, paths))
  takes = lambda w: w.takes_indexed_slices or not stack.overrides(w, hook)
  if refusing := [w.name for w in wrappers if not takes(w)]:
    kept = {}
    checks.warn(
      f"wrapper {refusing[0]!r}: {hook} takes no IndexedSlices: the gradients "
      f"of {names(found)} become whole arrays, and the step updates whole "
      "tables. See takes_indexed_slices of flaxshard.wrappers.Base."
    )
  elif others := [path for path in found if path not in kept]:
    checks.warn(
      f"grads: {names(others)} has an IndexedSlices, and the optimizer does "
      "not update its rows: it becomes a whole array. Name the parameter in "
      "sparse=[...] of create_train_state, or in flaxshard.sparse_rows."
    )
  return indexed_slices.to_dense(grads, keep=kept)
