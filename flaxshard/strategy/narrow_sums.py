"""Sums bfloat16 gradients over the replicas before they become float32.

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
import functools
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from flaxshard.core import jaxprs
from flaxshard.replicas import context as replica_context


def sum_before_widening(jaxpr: Any) -> Any:
  """Returns a program that sums bfloat16 gradients before it converts them.

  Args:
    jaxpr: A `Jaxpr`, or a `ClosedJaxpr`.

  Returns:
    A program with the same inputs and outputs.
  """
  narrow_outputs = functools.cache(_narrow_outputs)
  exchange = jaxprs.rewriter(
    lambda jaxpr, inner: _exchange_sums(jaxpr, inner, narrow_outputs)
  )
  return exchange(jaxpr)


def _exchange_sums(
  jaxpr: Any, exchange: Callable[..., Any], narrow_outputs: Callable[..., Any]
) -> Any:
  """Exchanges sums and conversions in a jaxpr.

  Args:
    jaxpr: The `Jaxpr`.
    exchange: Does the same in a jaxpr of one of its equations.
    narrow_outputs: `_narrow_outputs`.

  Returns:
    The new `Jaxpr`.
  """
  # The equation that computes a variable.
  source: dict[Any, Any] = {}
  eqns = []
  for eqn in jaxpr.eqns:
    params = {k: jaxprs.map_inner(exchange, v) for k, v in eqn.params.items()}
    eqn = eqn.replace(params=params)
    gradient = _gradient_that_is_summed(eqn, source)
    new = [] if gradient is None else _sum_narrow(eqn, gradient, source)
    for new_eqn in new or _widen_after(eqn, narrow_outputs):
      eqns.append(new_eqn)
      source.update(dict.fromkeys(new_eqn.outvars, new_eqn))
  return jaxpr.replace(eqns=eqns)


def _gradient_that_is_summed(eqn: Any, source: dict[Any, Any]) -> Any:
  """Returns the gradient that an equation sums over the replicas, or None."""
  if eqn.primitive.name != "psum" or len(eqn.invars) != 1:
    return None
  mark = _source(eqn.invars[0], source)
  if mark is None or mark.primitive.name != "name":
    return None
  is_gradient = mark.params["name"] == replica_context.GRADIENTS
  return mark.invars[0] if is_gradient else None


def _sum_narrow(eqn: Any, gradient: Any, source: dict[Any, Any]) -> list[Any]:
  """Returns equations that sum a gradient in bfloat16.

  Args:
    eqn: The equation that sums the gradient in float32.
    gradient: The gradient.
    source: The equation that computes a variable.

  Returns:
    The equations, with the result of `eqn`; none if the gradient holds more
    than bfloat16 numbers.
  """
  add = _source(gradient, source)
  if add is None or add.primitive.name != "add_any":
    terms, totals = [gradient], eqn.outvars
  else:
    # A parameter that is used twice, such as a tied embedding, has the sum of
    # two gradients. Of two sums of bfloat16 XLA makes one.
    terms = add.invars
    totals = [core.Var(eqn.outvars[0].aval) for _ in terms]
  eqns = []
  for term, total in zip(terms, totals, strict=True):
    widening = _widening(term, source)
    if widening is None:
      return []
    narrow = _narrow_variable(total)
    eqns.append(eqn.replace(invars=widening.invars, outvars=[narrow]))
    eqns.append(_convert(widening, narrow, total))
  if len(terms) > 1:
    eqns.append(add.replace(invars=totals, outvars=eqn.outvars))
  return eqns


def _source(atom: Any, source: dict[Any, Any]) -> Any:
  """Returns the equation that computes a value, or None."""
  # Literals have no hash.
  return None if isinstance(atom, core.Literal) else source.get(atom)


def _widening(atom: Any, source: dict[Any, Any]) -> Any:
  """Returns the equation that converts bfloat16 to `atom`, or None."""
  eqn = _source(atom, source)
  if (
    eqn is None
    or eqn.primitive.name != "convert_element_type"
    or eqn.params["new_dtype"] != jnp.float32
    or isinstance(eqn.invars[0], core.Literal)
    or eqn.invars[0].aval.dtype != jnp.bfloat16
    or eqn.invars[0].aval.sharding != atom.aval.sharding
  ):
    return None
  return eqn


def _widen_after(eqn: Any, narrow_outputs: Callable[..., Any]) -> list[Any]:
  """Moves conversions of the results of a call or a loop behind it.

  Args:
    eqn: An equation.
    narrow_outputs: `_narrow_outputs`.

  Returns:
    The equation, followed by the conversions.
  """
  name = eqn.primitive.name
  if name not in jaxprs.CALLS and name != "scan":
    return [eqn]
  first = 0
  if name == "scan":
    # What the steps carry must keep its dtype.
    _, carry, _ = jaxprs.split_scan(eqn.params, eqn.invars)
    first = len(carry)
  key = jaxprs.called_key(eqn)
  jaxpr, widenings = narrow_outputs(eqn.params[key], first)
  outvars, conversions = list(eqn.outvars), []
  for i, widening in widenings.items():
    narrow = _narrow_variable(outvars[i])
    conversions.append(_convert(widening, narrow, outvars[i]))
    outvars[i] = narrow
  params = eqn.params | {key: jaxpr}
  return [eqn.replace(params=params, outvars=outvars), *conversions]


def _narrow_outputs(jaxpr: Any, first: int) -> tuple[Any, dict[int, Any]]:
  """Returns a program without the conversions of its outputs to float32.

  Args:
    jaxpr: A `Jaxpr`, or a `ClosedJaxpr`.
    first: The index of the first output that may change its dtype.

  Returns:
    The program, and the equation that converted an output, by its index.
  """
  widenings = {}

  def narrow(jaxpr: Any) -> Any:
    source = {x: eqn for eqn in jaxpr.eqns for x in eqn.outvars}
    outputs = list(jaxpr.outvars)
    for i in range(first, len(outputs)):
      widening = _widening(outputs[i], source)
      if widening is not None:
        widenings[i] = widening
        (outputs[i],) = widening.invars
    return jaxpr.replace(outvars=outputs)

  return jaxprs.map_open(narrow, jaxpr), widenings


def _convert(widening: Any, narrow: Any, wide: Any) -> Any:
  """Returns an equation that converts `narrow` to `wide`, like another one."""
  # Its shape may be another one: that of the results of all steps of a loop.
  params = widening.params | {"sharding": None}
  return widening.replace(params=params, invars=[narrow], outvars=[wide])


def _narrow_variable(variable: Any) -> Any:
  """Returns a new variable: the same in bfloat16."""
  return core.Var(variable.aval.update(dtype=jnp.dtype(jnp.bfloat16)))
