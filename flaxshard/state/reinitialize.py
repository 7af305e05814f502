"""Starts a train state anew from other values of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import trees
from flaxshard.state import fields as fields_lib
from flaxshard.state.train_state import TrainState

PyTree = Any


def reinitialize(
  state: TrainState, replaced: Mapping[str, PyTree]
) -> TrainState:
  """Returns a state at step 0 with other parameters and collections.

  Optimizer slots and wrapper states are created anew: some hold copies of the
  parameters (a moving average, the local parameters of AGN).

  Args:
    state: A state of arrays, whose shardings the result has.
    replaced: The new values of `params` and of collections, by field.
  """
  variables = fields_lib.variables(state)
  given = variables | dict(replaced)
  # The other fields are computed from the parameters.
  computed = {
    name: tree
    for name, tree in fields_lib.array_fields(state).items()
    if name not in variables
  }

  def create_fields(given: Mapping[str, PyTree]) -> dict[str, PyTree]:
    new = TrainState.create(
      apply_fn=state.apply_fn, tx=state.tx, wrappers=state.wrappers, **given
    )
    # Per-replica leaves of a state without a strategy have one row.
    fields = {
      name: jax.tree.map(
        lambda x, old: jnp.broadcast_to(x, old.shape),
        getattr(new, name),
        computed[name],
      )
      for name in computed
    }
    # The train step donates the state, so no two outputs may share a buffer.
    return trees.unshare_buffers(fields)

  shardings = jax.tree.map(lambda x: x.sharding, computed)
  jitted = jax.jit(create_fields, out_shardings=shardings)
  return state.replace(**replaced, **jitted(given))
