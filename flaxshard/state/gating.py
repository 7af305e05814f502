"""`gate_gradients`: which gradients must be there before any of them is used.

XLA runs each operation as soon as its inputs exist. An optimization barrier
makes all its outputs wait for all its inputs, and keeps the operations before
and after it from being fused.
"""

from __future__ import annotations

from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core.indexed_slices import is_indexed_slices

PyTree = Any

MODES = ("none", "op", "graph")


# TensorFlow's GATE_NONE, GATE_OP and GATE_GRAPH.
_TENSORFLOW_MODES = (0, 1, 2)


def check(gate_gradients: Any) -> str:
  """Returns `gate_gradients` if it is "none", "op" or "graph"."""
  if type(gate_gradients) is int and gate_gradients in _TENSORFLOW_MODES:
    mode = MODES[gate_gradients]
    raise checks.ArgumentTypeError(
      f"gate_gradients must be one of 'none', 'op', 'graph', got "
      f"{gate_gradients}. Write {mode!r} for TensorFlow's GATE_{mode.upper()}."
    )
  return checks.one_of("gate_gradients", gate_gradients, MODES)


def gate(grads: PyTree, gate_gradients: str) -> PyTree:
  """Puts gradients behind optimization barriers.

  Args:
    grads: A tree of gradients; leaves without a gradient stay as they are.
    gate_gradients: "none": no barrier. "op": one barrier for the gradients of
      each module, whose paths differ in their last key alone. "graph": one
      barrier for all gradients.

  Returns:
    A tree of the same values.

  Example:
    >>> import jax.numpy as jnp
    >>> fn = lambda g: gate(g, "op")
    >>> grads = {"a": {"w": jnp.ones(2), "b": jnp.ones(2)}, "c": jnp.ones(2)}
    >>> str(jax.make_jaxpr(fn)(grads)).count("optimization_barrier")
    2
  """
  if gate_gradients == "none":
    return grads
  flat, treedef = jax.tree_util.tree_flatten_with_path(
    grads, is_leaf=is_indexed_slices
  )
  groups: dict[Any, dict[int, Any]] = {}
  for i, (path, g) in enumerate(flat):
    if gradients.has_gradient(path, g) or gradients.is_statistic(path):
      module = path[:-1] if gate_gradients == "op" else ()
      groups.setdefault(module, {})[i] = g
  leaves = [g for _, g in flat]
  for group in groups.values():
    gated: Any = jax.lax.optimization_barrier(group)
    for i, g in gated.items():
      leaves[i] = g
  return jax.tree.unflatten(treedef, leaves)


def widen(grads: PyTree, params: PyTree) -> PyTree:
  """Casts gradients to the dtypes of their parameters.

  Args:
    grads: A tree of gradients like `params`; other leaves stay as they are.
    params: The parameters.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, p, g: (
      g.astype(p.dtype) if gradients.has_gradient(path, g) else g
    ),
    params,
    grads,
  )
