"""Checks of mistakes that would be silent, or hard to find."""

from __future__ import annotations

from collections.abc import Mapping
import inspect
from typing import Any

import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib

PyTree = Any

# Methods that a field or a collection of the same name may hide. Flax's
# examples have a field `metrics`.
HIDEABLE = frozenset(("metrics", "variables"))


def check_tx(tx: Any) -> None:
  """Raises a TypeError unless `tx` is an optax optimizer."""
  # By attribute, because optax.MultiSteps is no GradientTransformation.
  if hasattr(tx, "init") and callable(getattr(tx, "update", None)):
    return
  hint = f" Call it: {tx.__name__}(1e-3)." if inspect.isfunction(tx) else ""
  raise TypeError(
    "tx must be an optax GradientTransformation, such as optax.adam(1e-3), got "
    f"{checks.describe(tx)}.{hint}"
  )


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
    # A misspelt argument, such as `wrapers`, would be a collection.
    if name not in fields:
      trees.check_arrays(name, tree)


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
    TypeError: `value` is a pair, and `has_aux` says that it is none, or the
      other way round; or the loss is None.
    ValueError: The loss is no scalar, or `grad_loss` has another shape.
  """
  is_pair = isinstance(value, (tuple, list)) and len(value) == 2
  if is_pair != has_aux:
    raise TypeError(
      "loss_fn must return the loss, or (loss, aux) with has_aux=True; got "
      f"{'a' if is_pair else 'no'} pair with has_aux={has_aux}."
    )
  loss, aux = value if has_aux else (value, None)
  if loss is None:
    raise TypeError(
      "loss_fn must return a scalar, got None: is `return` there?"
    )
  wanted = () if grad_loss is None else jnp.shape(grad_loss)
  if jnp.shape(loss) != wanted:
    raise ValueError(
      "loss_fn must return a scalar, or an array of the shape of grad_loss: "
      f"{wanted}, got {jnp.shape(loss)}."
    )
  return loss, aux


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
