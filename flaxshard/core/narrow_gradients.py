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

from flaxshard.core import jaxprs

PyTree = Any
# The equation that computes each variable, for each program.
Sources = dict[Any, dict[Any, Any]]

# Primitives that move numbers and leave each as it is.
_MOVES = frozenset(
  "copy copy_p name reshape sharding_constraint squeeze transpose".split()
)


def value_and_grad(
  fn: Callable[[PyTree], tuple[jax.Array, Any]], params: PyTree
) -> tuple[tuple[jax.Array, Any], PyTree]:
  """Differentiates a function; casts gradients to 16 bits where that is exact.

  Args:
    fn: Returns a real scalar and auxiliary output. Its gradient is traced once,
      and the traced program is evaluated.
    params: The argument of `fn`. Integer leaves have gradients of `float0`.

  Returns:
    What `jax.value_and_grad(fn, has_aux=True, allow_int=True)(params)` returns,
    but the gradients that it casts from float16 or bfloat16 as its last
    operation are cast back.

  Raises:
    TypeError: The scalar is complex.

  Example:
    >>> loss = lambda w: ((w.astype(jnp.bfloat16) ** 2).astype("float32"), None)
    >>> (value, _), grad = value_and_grad(loss, jnp.float32(3))
    >>> float(value), float(grad), grad.dtype
    (9.0, 6.0, dtype(bfloat16))
  """
  # Outside of the trace below, so that `fn` may store what it computes.
  value, pullback, aux = jax.vjp(fn, params, has_aux=True)
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise TypeError(f"loss_fn must return a real scalar, got {value.dtype}.")
  grads: dict[int, Any] = {}

  def trace(cotangent: jax.Array) -> dict[int, Any]:
    computed = dict(enumerate(jax.tree.leaves(pullback(cotangent))))
    # A gradient of `float0` is a constant, which is no output of a program. No
    # tracer may leave this function but as an output.
    constants = {
      i: g for i, g in computed.items() if not isinstance(g, jax.core.Tracer)
    }
    grads.update(constants)
    return {i: g for i, g in computed.items() if i not in constants}

  one = jnp.ones_like(value)
  program, computed = jax.make_jaxpr(trace, return_shape=True)(one)
  outputs = jax_core.jaxpr_as_fun(program)(one)
  sources: Sources = {}
  variables = program.jaxpr.outvars
  for i, x, variable in zip(computed, outputs, variables, strict=True):
    dtype = dtype_before_cast(program.jaxpr, variable, sources)
    grads[i] = x if dtype is None else x.astype(dtype)
  treedef: Any = jax.tree.structure(params)
  leaves = [grads[i] for i in range(treedef.num_leaves)]
  return (value, aux), treedef.unflatten(leaves)


def dtype_before_cast(
  program: Any, var: Any, sources: Sources, *, loops: bool = False
) -> Any:
  """Returns the 16-bit dtype that a variable was cast from, else None.

  Args:
    program: The `jax.extend.core.Jaxpr` that computes the variable.
    var: The variable, or a literal.
    sources: The equation of each variable, by program; missing ones are added.
    loops: Whether to look at what the steps of a `scan` return. XLA collects it
      in float32, and casts it to 16 bits after the loop.
  """
  # Literals have no hash.
  while not isinstance(var, jax_core.Literal):
    if program not in sources:
      sources[program] = {x: eqn for eqn in program.eqns for x in eqn.outvars}
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
    elif name in jaxprs.CALLS or (loops and name == "scan"):
      index = list(eqn.outvars).index(var)
      if name == "scan":
        _, carry, _ = jaxprs.split_scan(eqn.params, eqn.invars)
        if index < len(carry):  # the first steps may compute it otherwise
          return None
      program = jaxprs.open_program(jaxprs.called(eqn))
      var = program.outvars[index]
    else:
      return None
  return None
