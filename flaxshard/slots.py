"""The slots of an optimizer: which lie as which parameters."""

from __future__ import annotations

from typing import Any

import jax

from flaxshard import trees
from flaxshard import update

PyTree = Any
P = jax.sharding.PartitionSpec


def specs(opt_state: PyTree, params: PyTree, param_specs: PyTree) -> PyTree:
  """Returns the specs of an optimizer's state, whose slots follow parameters.

  A slot is a leaf whose path ends with that of a parameter, as in every
  optimizer of optax, and whose shape does so too: L-BFGS keeps several of each
  in one array. Anything else is replicated: counts, and the row and column
  statistics of Adafactor.

  Args:
    opt_state: The state, or shapes and dtypes of it.
    params: The parameters, or shapes and dtypes of them.
    param_specs: Their specs.

  Example:
    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.ones((4, 2))}
    >>> state = optax.sgd(0.1, momentum=0.9).init(params)
    >>> specs(state, params, {"w": P("replica")})[0].trace
    {'w': P('replica',)}
  """
  # By path, not by optax.tree_utils.tree_map_params: that calls `tx.init` on a
  # placeholder, which L-BFGS and inits that look at their arrays cannot take.
  shapes = jax.tree_util.tree_leaves_with_path(update.with_optimizer(params))
  followed = {
    trees.path_strings(path): (tuple(p.shape), spec)
    for (path, p), spec in zip(
      shapes, jax.tree.leaves(update.with_optimizer(param_specs)), strict=True
    )
  }

  def spec_of(path: trees.Path, slot: Any) -> P:
    names, slot_shape = trees.path_strings(path), tuple(slot.shape)
    for start in range(len(names)):
      shape, spec = followed.get(names[start:], ((), P()))
      more = len(slot_shape) - len(shape)
      if tuple(spec) and slot_shape[more:] == shape:
        return P(*(None,) * more, *spec)
    return P()

  return jax.tree_util.tree_map_with_path(spec_of, opt_state)
