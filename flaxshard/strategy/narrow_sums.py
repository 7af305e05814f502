"""Sums bfloat16 gradients over the replicas before they become float32.

If a model computes in bfloat16 with float32 parameters, the last operation on a
gradient is the conversion from bfloat16 to float32. `apply_gradients` sums what
it is given, so the sum would be of float32: twice the bytes, on the links and
in memory. Under `jax.jit` over the global batch, XLA sums first and converts
then. This module does the same in a traced program. It exchanges

    sum(convert(g))  for  convert(sum(g))

where the sum is one of `apply_gradients` and `g` is bfloat16. float16 stays as
it is, because its sum may overflow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend import core
import jax.numpy as jnp

from flaxshard.replicas import context as replica_context
from flaxshard.strategy import replication
from flaxshard.strategy import replication_check

# These run one jaxpr once, with their own inputs and outputs.
_CALLS = frozenset("jit pjit closed_call remat remat2 checkpoint".split())


def sum_before_widening(jaxpr: Any) -> Any:
  """Returns a program that sums bfloat16 gradients before it converts them.

  Args:
    jaxpr: A `Jaxpr`, or a `ClosedJaxpr`.

  Returns:
    A program with the same inputs and outputs.
  """
  return _map_open(_exchange_sums, jaxpr)


def _exchange_sums(jaxpr: Any) -> Any:
  """Exchanges sums and conversions in a jaxpr and in those of its equations."""
  # The equation that computes a variable.
  source: dict[Any, Any] = {}
  eqns = []

  for eqn in jaxpr.eqns:
    params = {k: _map_jaxprs(v) for k, v in eqn.params.items()}
    eqn = eqn.replace(params=params)
    gradient = _gradient_that_is_summed(eqn, source)
    new = [] if gradient is None else _sum_narrow(eqn, gradient, source)
    for new_eqn in new or _widen_after(eqn):
      eqns.append(new_eqn)
      source.update(dict.fromkeys(new_eqn.outvars, new_eqn))
  return jaxpr.replace(eqns=eqns)


def _gradient_that_is_summed(eqn: Any, source: dict[Any, Any]) -> Any:
  """Returns the gradient that an equation sums over the replicas, or None."""
  if (
    eqn.primitive.name != "psum"
    or len(eqn.invars) != 1
    or not replication.names_replicas(eqn.params["axes"])
  ):
    return None
  mark = _source(eqn.invars[0], source)
  if (
    mark is None
    or mark.primitive.name != "name"
    or mark.params["name"] != replica_context.GRADIENTS
  ):
    return None
  return mark.invars[0]


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
  (total,) = eqn.outvars
  widening = _widening(gradient, source)
  if widening is not None:
    narrow = _narrow_variable(total)
    return [
      eqn.replace(invars=widening.invars, outvars=[narrow]),
      _convert(widening, narrow, total),
    ]
  # A parameter that is used twice, such as a tied embedding, has the sum of two
  # gradients. Two sums of bfloat16 have the traffic of one of float32.
  add = _source(gradient, source)
  if add is None or add.primitive.name != "add_any":
    return []
  parts = [core.Var(total.aval) for _ in add.invars]
  sums = [
    _sum_narrow(eqn.replace(outvars=[part]), term, source)
    for part, term in zip(parts, add.invars, strict=True)
    if _widening(term, source) is not None
  ]
  if len(sums) < len(parts):
    return []
  return [*sums[0], *sums[1], add.replace(invars=parts, outvars=[total])]


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


def _widen_after(eqn: Any) -> list[Any]:
  """Moves conversions of the results of a call or a loop behind it.

  Args:
    eqn: An equation.

  Returns:
    The equation, followed by the conversions.
  """
  name = eqn.primitive.name
  if name not in _CALLS and name != "scan":
    return [eqn]
  first = 0
  if name == "scan":
    # What the steps carry must keep its dtype.
    _, carry, _ = replication_check.split_scan(eqn.params, eqn.invars)
    first = len(carry)
  outvars, conversions = list(eqn.outvars), []

  def narrow_results(jaxpr: Any) -> Any:
    source = {x: inner for inner in jaxpr.eqns for x in inner.outvars}
    results = list(jaxpr.outvars)
    for i in range(first, len(results)):
      widening = _widening(results[i], source)
      if widening is not None:
        (results[i],) = widening.invars
        narrow = _narrow_variable(outvars[i])
        conversions.append(_convert(widening, narrow, outvars[i]))
        outvars[i] = narrow
    return jaxpr.replace(outvars=results)

  jaxpr = _map_open(narrow_results, eqn.params["jaxpr"])
  params = eqn.params | {"jaxpr": jaxpr}
  return [eqn.replace(params=params, outvars=outvars), *conversions]


def _convert(widening: Any, narrow: Any, wide: Any) -> Any:
  """Returns an equation that converts `narrow` to `wide`, like another one."""
  # Its shape may be another one: that of the results of all steps of a loop.
  params = widening.params | {"sharding": None}
  return widening.replace(params=params, invars=[narrow], outvars=[wide])


def _narrow_variable(variable: Any) -> Any:
  """Returns a new variable: the same in bfloat16."""
  return core.Var(variable.aval.update(dtype=jnp.dtype(jnp.bfloat16)))


def _map_jaxprs(value: Any) -> Any:
  """Exchanges sums in the jaxprs among the parameters of an equation."""
  if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
    return sum_before_widening(value)
  if type(value) in (tuple, list):
    return type(value)(map(_map_jaxprs, value))
  return value


def _map_open(fn: Callable[[Any], Any], jaxpr: Any) -> Any:
  """Applies a function of `Jaxpr`s to a `Jaxpr` or a `ClosedJaxpr`."""
  # JAX 0.12 has one class for both.
  if isinstance(jaxpr, core.Jaxpr):
    return fn(jaxpr)
  return jaxpr.replace(jaxpr=fn(jaxpr.jaxpr))
