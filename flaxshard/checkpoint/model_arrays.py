"""The arrays of a train state that a checkpoint of another run may have."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.state import lora
from flaxshard.state import reinitialize
from flaxshard.state.train_state import TrainState

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ModelArrays:
  """The arrays of a state, or of a tree of parameters, that may be read.

  Attributes:
    state: The state, or the tree.
    fields: The trees of arrays, by field; a tree of parameters is `params`.
    paths: The field and the path in it of each array, by its path in the model.
    leaves: The arrays, by the same paths.
    factors: Paths of the factors of LoRA, which most files lack.
  """

  state: Any
  fields: Mapping[str, PyTree]
  paths: Mapping[str, tuple[str, tuple[str, ...]]]
  leaves: Mapping[str, jax.Array]
  factors: frozenset[str]

  @classmethod
  def of(cls, state: Any) -> ModelArrays:
    """Returns the arrays of a state or a tree of parameters."""
    if isinstance(state, TrainState):
      fields = fields_lib.variables(state)
      # Random streams begin with the new run.
      fields.pop("rngs", None)
    else:
      fields = {"params": state}
    has_lora = isinstance(getattr(state, "apply_fn", None), lora.Apply)
    frozen = lora.FROZEN if has_lora else None
    paths, leaves = {}, {}
    for field, tree in fields.items():
      # The frozen parameters are parameters of the model.
      prefix = () if field in ("params", frozen) else (field,)
      for path, leaf in trees.leaves_by_path(tree).items():
        name = "/".join((*prefix, *path))
        if not isinstance(leaf, jax.Array):
          raise TypeError(
            f"state must hold JAX arrays, got {checks.describe(leaf)} at "
            f"{name}. Give the state of create_train_state without abstract."
          )
        paths[name] = field, path
        leaves[name] = leaf
    factors = [
      name
      for name, (field, path) in paths.items()
      if has_lora
      and field == "params"
      and lora.is_factor(path, fields[lora.FROZEN])
    ]
    return cls(state, fields, paths, leaves, frozenset(factors))

  def replace(self, arrays: Mapping[str, jax.Array]) -> Any:
    """Returns the state or the tree with other arrays, by their paths."""
    by_field = {
      self.paths[path]: x for path, x in {**self.leaves, **arrays}.items()
    }
    fields = {
      field: jax.tree.unflatten(
        jax.tree.structure(tree),
        [by_field[field, path] for path in trees.leaves_by_path(tree)],
      )
      for field, tree in self.fields.items()
    }
    if not isinstance(self.state, TrainState):
      return fields["params"]
    return reinitialize.reinitialize(self.state, fields)
