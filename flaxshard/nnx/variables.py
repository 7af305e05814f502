"""Sets the variables of NNX objects to the arrays of other trees."""

from __future__ import annotations

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.state import nnx_adapter
from flaxshard.state.train_state import TrainState

PyTree = Any


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
  names = {name for name, *_ in apply_fn.places}
  new = apply_fn.nnx_state({name: getattr(state, name) for name in names})
  shapes, params, wanted = (
    {p: jnp.shape(x) for p, x in trees.leaves_by_path(nnx.as_pure(s)).items()}
    for s in (nnx.state(model), nnx.state(model, nnx.Param), new)
  )
  # Calls may have added others to the module, such as sown values.
  for path in [*wanted, *params]:
    if shapes.get(path) != wanted.get(path):
      raise ValueError(
        "model must have the structure of the module that the state was made "
        f"of; its {'/'.join(path)} has the shape {shapes.get(path)}, in the "
        f"state {wanted.get(path)}."
      )
  nnx.update(model, jax.tree.map(jnp.copy, new))


def assign(variables: PyTree, arrays: PyTree) -> None:
  """Sets each variable of a tree to the array at its place."""
  nodes = jax.tree.leaves(
    variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  values = iter(jax.tree.leaves(arrays))
  for variable in nodes:
    treedef: Any = jax.tree.structure(variable.get_raw_value())
    variable.set_value(
      treedef.unflatten([next(values) for _ in range(treedef.num_leaves)])
    )
