"""Copies the arrays of a TrainState into an NNX module."""

from __future__ import annotations

from flax import nnx
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.nnx import calls
from flaxshard.state import nnx_adapter
from flaxshard.state.train_state import TrainState


def update(model: nnx.Module, state: TrainState) -> None:
  """Sets the variables of a module to those of a TrainState.

  `nnx.update(model, state.params)` raises a KeyError for a module with a list
  of layers, whose keys are integers in NNX and strings in a TrainState.

  The arrays are copied, so that donating the state does not delete those of the
  module.

  Args:
    model: The module, of the structure of the one that the state was made of.
    state: The result of `create_train_state` with an NNX module.

  Raises:
    TypeError: The state was not made of an NNX module.
    ValueError: The module lacks a variable of the state or has another
      parameter, or a variable has another shape.

  Example:
    >>> import flaxshard as fs, optax
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> state = fs.create_train_state(model, None, None, optax.sgd(0.1))
    >>> other = nnx.Linear(2, 1, rngs=nnx.Rngs(1))
    >>> fs.nnx.update(other, state)
    >>> bool((other.kernel == model.kernel).all())
    True
  """
  apply_fn = getattr(state, "apply_fn", None)
  if not isinstance(apply_fn, nnx_adapter.Apply):
    raise TypeError(
      "state must be a TrainState that create_train_state made of an NNX "
      f"module, got {checks.describe(state)}."
    )
  names = {v.collection for v in apply_fn.variables if v.leaves}
  variables = {name: getattr(state, name) for name in names}
  new = apply_fn.nnx_state(variables)
  _check_variables(model, new)
  nnx.update(model, jax.tree.map(jnp.copy, new))


def _check_variables(model: nnx.Module, new: nnx.State) -> None:
  shapes, params, new_shapes = (
    calls.shapes_of(nnx.as_pure(state))
    for state in (nnx.state(model), nnx.state(model, nnx.Param), new)
  )
  # Calls may have added others to the module, such as sown values.
  for path in [*new_shapes, *params]:
    given, wanted = shapes.get(path), new_shapes.get(path)
    if given != wanted:
      raise ValueError(
        "model must have the structure of the module that the state was made "
        f"of; its {'/'.join(path)} has the shape {given}, in the state "
        f"{wanted}."
      )
