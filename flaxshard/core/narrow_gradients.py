"""Gradients in the 16-bit dtypes in which a model computes them.

A model in mixed precision casts its float32 parameters to 16 bits. Then the
last operation on a gradient casts it from 16 bits to float32. Such a gradient
fits into 16 bits without rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp

from flaxshard.core import tracing

PyTree = Any
# The equation that computes each variable, for each program.
Sources = dict[Any, dict[Any, Any]]

# Primitives that move numbers and leave each as it is.
_MOVES = frozenset(
  "copy copy_p name reshape sharding_constraint squeeze transpose".split()
)


def narrow_gradients(
  fn: Callable[[PyTree], tuple[Any, PyTree]], params: PyTree
) -> tuple[Any, PyTree]:
  """Calls a function that returns gradients; casts them to 16 bits if exact.

  Args:
    fn: Returns a pair of any value and a tree of gradients. It is traced once,
      and the traced program is evaluated. So it may not branch on the value of
      an array, nor store one that it computes.
    params: The argument of `fn`.

  Returns:
    What `fn(params)` returns, but the gradients that it casts from float16 or
    bfloat16 as its last operation are cast back.

  Example:
    >>> loss = lambda w: (w.astype(jnp.bfloat16) ** 2).astype(jnp.float32)
    >>> value, grad = narrow_gradients(jax.value_and_grad(loss), 3.0)
    >>> float(value), float(grad), grad.dtype
    (9.0, 6.0, dtype(bfloat16))
  """
  leaves: list[Any] = []
  structure: Any = None

  def traced(params: PyTree) -> dict[int, Any]:
    nonlocal structure
    outputs, structure = jax.tree.flatten(fn(params))
    # The value may hold anything. What was not computed is no output of the
    # program, and no tracer may leave this function but as an output.
    computed = {
      i: x for i, x in enumerate(outputs) if isinstance(x, jax.core.Tracer)
    }
    leaves.extend(None if i in computed else x for i, x in enumerate(outputs))
    return computed

  program, shapes = jax.make_jaxpr(traced, return_shape=True)(params)
  outputs = jax_core.jaxpr_as_fun(program)(*jax.tree.leaves(params))
  for i, x in zip(shapes, outputs, strict=True):
    leaves[i] = x
  value, grads = structure.unflatten(leaves)
  treedef: Any = jax.tree.structure(grads)
  # The gradients are the last leaves.
  first = len(leaves) - treedef.num_leaves
  sources: Sources = {}
  for i, var in zip(shapes, program.jaxpr.outvars, strict=True):
    dtype = _dtype_before_cast(program.jaxpr, var, sources)
    if i >= first and dtype is not None:
      leaves[i] = leaves[i].astype(dtype)
  return value, treedef.unflatten(leaves[first:])


def _dtype_before_cast(program: Any, var: Any, sources: Sources) -> Any:
  """Returns the 16-bit dtype that a variable was cast from, else None.

  Args:
    program: The `jax.extend.core.Jaxpr` that computes the variable.
    var: The variable, or a literal.
    sources: The equation of each variable, by program; missing ones are added.
  """
  if program not in sources:
    sources[program] = {out: eqn for eqn in program.eqns for out in eqn.outvars}
  # Literals have no hash.
  while not isinstance(var, jax_core.Literal):
    eqn = sources[program].get(var)
    if eqn is None:
      return None
    name = eqn.primitive.name
    if name == "convert_element_type":
      dtype = eqn.invars[0].aval.dtype
      is_exact = dtype in (jnp.float16, jnp.bfloat16) and var.aval.dtype in (
        jnp.float32,
        jnp.float64,
      )
      return dtype if is_exact else None
    if name in _MOVES:
      var = eqn.invars[0]
    # Not `scan`: XLA would collect its outputs in float32, and cast them to 16
    # bits after the loop.
    elif name in tracing.CALLS:
      index = list(eqn.outvars).index(var)
      program = eqn.params["jaxpr"]
      program = getattr(program, "jaxpr", program)
      return _dtype_before_cast(program, program.outvars[index], sources)
    else:
      return None
  return None
