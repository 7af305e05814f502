"""Sums bfloat16 gradients over the replicas in bfloat16.

If a model computes in bfloat16 with float32 parameters, the last operation on a
gradient is the conversion from bfloat16 to float32. `apply_gradients` sums what
it is given, so the sum would be of float32: twice the bytes, on the links and
in memory. Under `jax.jit` over the global batch, XLA sums first and converts
then. This module does the same in a traced program. It exchanges

    sum(convert(g))  for  convert(sum(g))

where the sum is one of `apply_gradients` and `g` is bfloat16. float16 stays as
it is, because its sum may overflow. So does every gradient that the program
computes in float32 from what it converted: a clipped one, one that a loop adds
up, or the result of `jax.lax.optimization_barrier`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from flaxshard.core import jaxprs
from flaxshard.core import narrow_gradients
from flaxshard.replicas import context as replica_context


def sum_before_widening(program: Any) -> Any:
  """Returns a program that sums bfloat16 gradients before it converts them.

  Args:
    program: A `Jaxpr`, or a `ClosedJaxpr`.

  Returns:
    A program with the same inputs and outputs.
  """
  return jaxprs.rewriter(_exchange_sums)(program)


def _exchange_sums(program: Any, exchange: Callable[[Any], Any]) -> Any:
  """Exchanges sums and conversions; `exchange` does so in inner programs."""
  sources: narrow_gradients.Sources = {}
  marks = {
    eqn.outvars[0]: eqn.invars[0]
    for eqn in program.eqns
    if eqn.primitive.name == "name"
    and eqn.params["name"] == replica_context.GRADIENTS
  }
  eqns = []
  for eqn in program.eqns:
    params = {k: jaxprs.map_inner(exchange, v) for k, v in eqn.params.items()}
    new = [eqn.replace(params=params)]
    if eqn.primitive.name == "psum":
      # Literals have no hash, but only variables have a mark.
      found = [
        narrow_gradients.dtype_before_cast(
          program, marks[x], sources, loops=True
        )
        for x in eqn.invars
        if isinstance(x, core.Var) and x in marks
      ]
      if found == [jnp.bfloat16]:
        new = _sum_in_bfloat16(eqn)
    eqns += new
  return program.replace(eqns=eqns)


def _sum_in_bfloat16(eqn: Any) -> list[Any]:
  """Returns equations that compute a sum of one array in bfloat16."""
  (x,), (total,) = eqn.invars, eqn.outvars
  # XLA leaves out the first conversion, together with that of the gradient.
  narrow, narrow_total = (
    core.Var(v.aval.update(dtype=jnp.dtype(jnp.bfloat16))) for v in (x, total)
  )
  return [
    _convert(x, narrow),
    eqn.replace(invars=[narrow], outvars=[narrow_total]),
    _convert(narrow_total, total),
  ]


def _convert(x: Any, result: Any) -> Any:
  """Returns an equation that converts one variable to another one."""
  convert = lambda x: x.astype(result.aval.dtype)
  (eqn,) = jax.make_jaxpr(convert)(jnp.zeros((), x.aval.dtype)).eqns
  return eqn.replace(invars=[x], outvars=[result])
