"""Checks the arguments of a TrainState, and of the loss in a train step."""

from __future__ import annotations

from collections.abc import Mapping
import inspect
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib

PyTree = Any

_SCALARS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


# Methods that a field or a collection of the same name may hide. Flax's
# examples have a field `metrics`.
HIDEABLE = frozenset(("metrics", "variables"))


def check_params(params: PyTree) -> None:
  """Raises a TypeError unless `params` is a tree of arrays."""
  # Flax creates a state of a single array, but cannot apply its gradient.
  if not jax.tree.leaves(params) or jax.tree_util.all_leaves([params]):
    raise TypeError(
      "params must be a tree of arrays, such as {'w': array}, got "
      f"{checks.describe(params)}."
    )
  trees.check_arrays("params", params)


def check_tx(tx: Any) -> None:
  """Raises a TypeError unless `tx` is an optax optimizer."""
  # By attribute, because optax.MultiSteps is no GradientTransformation.
  if hasattr(tx, "init") and hasattr(tx, "update"):
    return
  hint = ""
  if isinstance(tx, nnx.Optimizer):
    hint = (
      " Pass the optax optimizer that the nnx.Optimizer was made with, or keep "
      "NNX's train step with flaxshard.nnx.Optimizer."
    )
  elif inspect.isfunction(tx):
    hint = f" Call it, as in {tx.__name__}(1e-3)."
  got = checks.describe(tx)
  raise TypeError(
    "tx must be an optax GradientTransformation, such as optax.adam(1e-3), got "
    f"{got}.{hint}"
  )


def check_loss_fn(loss_fn: Any) -> None:
  """Raises a TypeError unless `loss_fn` is a function."""
  if not callable(loss_fn):
    raise TypeError(
      "loss_fn must be a function of the parameters that returns the loss, got "
      f"{checks.describe(loss_fn)}: a JAX array does not know how it was "
      "computed."
    )


def split_loss(
  value: Any, has_aux: bool, grad_loss: Any = None
) -> tuple[Any, Any]:
  """Returns the loss and the auxiliary output that a loss function returned.

  The auxiliary output is None without `has_aux`.

  Args:
    value: What the loss function returned.
    has_aux: Whether it is a pair.
    grad_loss: The cotangent of the loss. With it the loss may be an array.

  Raises:
    TypeError: The loss is not a floating-point scalar, or `value` is no pair
      with `has_aux`.
    ValueError: `grad_loss` has another shape than the loss.
  """
  is_pair = isinstance(value, (tuple, list)) and len(value) == 2
  if has_aux and not is_pair:
    raise TypeError(
      f"loss_fn must return (loss, aux) with has_aux=True, got {_kind(value)}."
    )
  loss, aux = value if has_aux else (value, None)
  if isinstance(loss, _SCALARS):
    is_scalar = not jnp.shape(loss)
    if (is_scalar or grad_loss is not None) and jnp.issubdtype(
      trees.dtype_of(loss), jnp.inexact
    ):
      _check_grad_loss(grad_loss, loss)
      return loss, aux
  hint = ""
  if is_pair and not has_aux:
    hint = " Pass has_aux=True if it returns (loss, aux)."
  raise TypeError(
    f"loss_fn must return a floating-point scalar, got {_kind(loss)}.{hint}"
  )


def weigh_loss(loss: Any, grad_loss: Any) -> Any:
  """Returns the scalar that is differentiated: the loss, weighted and summed.

  Args:
    loss: What `split_loss` returns.
    grad_loss: The cotangent of the loss; None for a scalar that stays.
  """
  if grad_loss is None:
    return loss
  # A product or a sum in 16 bits could overflow.
  dtype = gradients.accumulator_dtype(trees.dtype_of(loss))
  return jnp.sum(jnp.asarray(loss, dtype) * jnp.asarray(grad_loss, dtype))


def _check_grad_loss(grad_loss: Any, loss: Any) -> None:
  if grad_loss is None:
    return
  if not isinstance(grad_loss, _SCALARS) or jnp.iscomplexobj(grad_loss):
    raise TypeError(
      f"grad_loss must be an array of real numbers, got {_kind(grad_loss)}."
    )
  if jnp.shape(grad_loss) != jnp.shape(loss):
    raise ValueError(
      f"grad_loss must have the shape of the loss, {jnp.shape(loss)}, got "
      f"{_kind(grad_loss)}."
    )


def _kind(x: Any) -> str:
  """Returns what a loss function returned, in a few words."""
  if isinstance(x, _SCALARS):
    return f"{trees.dtype_of(x)} of shape {jnp.shape(x)}"
  # The repr of a traced array says nothing to a user.
  if isinstance(x, (tuple, list)):
    return f"a {type(x).__name__} of {len(x)}"
  return checks.describe(x)


def check_collections(
  cls: type, inherited: type, collections: Mapping[str, PyTree]
) -> None:
  """Raises unless collections can be fields of a state.

  Args:
    cls: The class of the state.
    inherited: The class whose fields no collection may have.
    collections: The collections, by name.

  Raises:
    ValueError: A collection has the name of an attribute of the state.
    TypeError: A collection is no tree of arrays.
  """
  arguments = ["apply_fn", "params", "tx", "wrappers", "strategy"]
  fields = set(fields_lib.fields_by_name(cls))
  taken = (fields & set(fields_lib.fields_by_name(inherited))) | (
    set(dir(cls)) - fields - HIDEABLE
  )
  for name, tree in collections.items():
    if name in taken:
      raise ValueError(
        f"a collection cannot be named {name!r}: a TrainState has an attribute "
        "of that name."
      )
    if name in fields:
      continue
    try:
      trees.check_arrays(name, tree)
    except TypeError as e:
      raise TypeError(
        f"create: {name!r} is no argument, and no tree of arrays: {e}"
        f"{checks.did_you_mean(name, arguments)}"
      ) from e
    if tree is None or name == "rules":
      raise TypeError(
        f"create: {name}={tree!r} is no argument; allowed: "
        f"{', '.join(arguments)}, and trees of arrays."
      )
