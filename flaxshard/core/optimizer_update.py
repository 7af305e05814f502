"""Updates by an optimizer, also of leaves without a gradient.

An optimizer's update may take extra arguments, such as the `value` of the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
import contextlib
import functools
import inspect
import types
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib

PyTree = Any

# Extra arguments that optax documents: the loss, its gradients, its function.
# An optimizer that takes extra arguments ignores those that it does not use, so
# that one step suits many optimizers.
_OBJECTIVE = frozenset(("value", "grad", "value_fn"))


def update(
  tx: Any,
  params: PyTree,
  opt_state: PyTree,
  grads: PyTree,
  extra: Mapping[str, Any] = types.MappingProxyType({}),
  *,
  keep_dtypes: bool = True,
) -> tuple[PyTree, PyTree]:
  """Updates parameters and slots as Flax's `TrainState.apply_gradients` does.

  A leaf without a gradient keeps its parameter and its slots.

  Args:
    tx: The optax optimizer.
    params: The parameters.
    opt_state: Its state.
    grads: A tree like `params`; None where a leaf has no gradient.
    extra: Extra arguments of the optimizer's update.
    keep_dtypes: Whether the state keeps its dtypes. It takes those of the
      gradients: float32 ones of float16 parameters would change it, and the
      next step would compile again.

  Returns:
    The new parameters and the new state.
  """
  structure: Any = jax.tree.structure(params)
  is_kept = [g is None for g in structure.flatten_up_to(grads)]
  if any(is_kept):
    # The optimizer needs an array for every parameter. With a zero gradient it
    # may still change parameter and slots, by weight decay or momentum: undone.
    grads = jax.tree.map(
      lambda p, g: _zero_gradient(p) if g is None else g, params, grads
    )
  optimized = gradients.optimized_params(params)
  updates, new_state = tx.update(
    gradients.optimized_params(grads), opt_state, optimized, **extra
  )
  new = optax.apply_updates(optimized, updates)
  if optimized is not params:
    new = {**grads, "params": new}
  if any(is_kept):
    kept = structure.unflatten(is_kept)
    new, new_state = keep(kept, (params, opt_state), (new, new_state))
  if keep_dtypes:
    new_state = jax.tree.map(
      lambda n, o: n.astype(o.dtype) if n.dtype != o.dtype else n,
      new_state,
      opt_state,
    )
  return new, new_state


def keep(
  is_kept: PyTree, old: tuple[PyTree, PyTree], new: tuple[PyTree, PyTree]
) -> tuple[PyTree, PyTree]:
  """Returns an update without its effect on some leaves and their slots.

  Args:
    is_kept: For each of the parameters whether it is kept: a bool, or a bool
      scalar of a traced program.
    old: Parameters and optimizer state before the update.
    new: Those after it.
  """

  def choose(is_kept: Any, o: jax.Array, n: jax.Array) -> jax.Array:
    if isinstance(is_kept, jax.Array):
      return jnp.where(is_kept, o, n)
    return o if is_kept else n

  (old_params, old_state), (new_params, new_state) = old, new
  params = jax.tree.map(choose, is_kept, old_params, new_params)
  optimized = gradients.optimized_params
  kept = dict(jax.tree_util.tree_leaves_with_path(optimized(is_kept)))
  # Leaves such as step counts belong to no parameter.
  slots = opt_state_lib.map_leaves(
    lambda parameter, o, n: choose(kept.get(parameter, False), o, n),
    optimized(old_params),
    old_state,
    new_state,
  )
  return params, slots


def _zero_gradient(p: jax.Array) -> jax.Array:
  # Optimizers divide and take roots, which integer arrays do not support.
  inexact = jnp.issubdtype(p.dtype, jnp.inexact)
  return jnp.zeros(p.shape, p.dtype if inexact else jnp.float32)


# -- Extra arguments.


def objective_of(tx: Any) -> frozenset[str]:
  """Returns which of `value`, `grad` and `value_fn` an optimizer uses.

  Example:
    >>> sorted(objective_of(optax.polyak_sgd()))
    ['value']
    >>> sorted(objective_of(optax.adam(0.1)))
    []
  """
  return _OBJECTIVE & _extra_arguments(tx)[0]


def check_extra(
  tx: Any,
  names: Iterable[str],
  replaceable: Iterable[str] = (),
  reserved: Collection[str] = (),
) -> None:
  """Raises a TypeError if a name is no argument of an optimizer's update.

  `optax.chain` takes any name, and leaves out those that nothing uses.

  Args:
    tx: The optax optimizer.
    names: The names that are given.
    replaceable: Fields of the state that may be given too, for the message.
    reserved: Fields that may not.
  """
  accepted = _extra_arguments(tx)[1] if names else None
  for name in names:
    if name in reserved or (accepted is not None and name not in accepted):
      allowed = sorted({*replaceable, *(accepted or ())})
      field = " no field that can be replaced, and" if replaceable else ""
      raise TypeError(
        f"{name!r} is{field} no argument of the optimizer; allowed: "
        f"{', '.join(allowed) or 'none'}.{checks.did_you_mean(name, allowed)}"
      )


def _extra_arguments(tx: Any) -> tuple[set[str], set[str] | None]:
  """Returns the extra arguments that an optimizer uses, and all it accepts.

  The second is None if it accepts any: a custom optimizer with `**kwargs`.
  """
  used: set[str] = set()
  # Packages with functions that take any name.
  packages: set[str] = set()
  # `optax.chain` takes any name and passes it on, so look at the functions that
  # it closes over.
  seen: set[int] = set()
  pending: list[Any] = [tx.update]
  while pending:
    x = pending.pop()
    if id(x) in seen:
      continue
    seen.add(id(x))
    if isinstance(x, (tuple, list)):
      pending += x
    elif isinstance(x, Mapping):
      pending += x.values()
    elif isinstance(x, functools.partial):
      pending.append(x.func)
    elif inspect.ismethod(x):
      # An object such as `optax.MultiSteps`, around another optimizer.
      pending += [x.__func__, *getattr(x.__self__, "__dict__", {}).values()]
    elif inspect.isfunction(x):
      for p in inspect.signature(x).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
          used.add(p.name)
        elif p.kind is p.VAR_KEYWORD:
          packages.add((x.__module__ or "").partition(".")[0])
      # Not inspect.getclosurevars: it fails where a variable has no value.
      for cell in x.__closure__ or ():
        with contextlib.suppress(ValueError):
          pending.append(cell.cell_contents)
  # This package's optimizers are those of optax.
  if not packages <= {"optax", "flaxshard"}:
    return used, None
  return used, used | _OBJECTIVE if packages else used
