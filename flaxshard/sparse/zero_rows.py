"""Describes what an optimizer computes for rows whose gradient is zero.

A `ZeroRow` describes the elements of such a row as functions of the elements at
the same place in the parameter and its slots: a constant, a sum of multiples of
them, or something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

# A factor or a constant that is not known before the program runs.
UNKNOWN = None

_LINEAR = frozenset(
  "convert_element_type copy copy_p optimization_barrier reduce_precision "
  "stop_gradient".split()
)


@dataclasses.dataclass(frozen=True)
class ZeroRow:
  """A value in rows whose gradient is zero.

  It is `const + sum(factor * source) + rest(sources)`.

  Attributes:
    const: The constant; `UNKNOWN` if it is computed by the program.
    factors: The factor of each source, by its number; `UNKNOWN` if it is
      computed by the program from other things than rows.
    sources: The sources of `rest`.
    is_linear: Whether there is no `rest`.
    sum_eqn: An equation that sums over rows, on which the value depends, or
      None.
    eqn: The first equation of `rest`.
  """

  const: Any = 0
  factors: Mapping[int, Any] = dataclasses.field(default_factory=dict)
  sources: frozenset[int] = frozenset()
  is_linear: bool = True
  sum_eqn: Any = None
  eqn: Any = None

  @property
  def is_number(self) -> bool:
    """Whether the value is a known constant."""
    return self.is_constant and self.const is not UNKNOWN

  @property
  def is_constant(self) -> bool:
    """Whether the value depends on no source."""
    return self.is_linear and not self.factors

  @property
  def is_zero(self) -> bool:
    """Whether the value is zero."""
    return self.is_number and not np.any(self.const)


def constant(value: Any, sum_eqn: Any = None) -> ZeroRow:
  """Returns a value that is the same in all rows."""
  return ZeroRow(const=value, sum_eqn=sum_eqn)


def source(number: int) -> ZeroRow:
  """Returns the value of a source."""
  return ZeroRow(factors={number: 1.0})


def evaluate(eqn: Any, inputs: Sequence[ZeroRow]) -> ZeroRow:
  """Returns the result of an element-wise equation with one output."""
  name = eqn.primitive.name
  if all(x.is_number for x in inputs):
    return constant(_compute(eqn, inputs))
  if name in ("add", "add_any"):
    return _add(*inputs)
  if name == "sub":
    return _add(inputs[0], _scale(inputs[1], constant(-1.0)))
  if name == "neg":
    return _scale(inputs[0], constant(-1.0))
  if name == "mul":
    x, y = inputs
    if x.is_zero or y.is_zero:
      return constant(0)
    if y.is_constant:
      return _scale(x, y)
    if x.is_constant:
      return _scale(y, x)
  if name == "div":
    x, y = inputs
    if x.is_zero:
      return constant(0)
    if y.is_number and np.any(y.const):
      return _scale(x, constant(1 / np.asarray(y.const, float)))
    if y.is_constant:
      return _scale(x, constant(UNKNOWN, y.sum_eqn))
  if name in _LINEAR:
    return inputs[0]
  if name == "select_n":
    which, *cases = inputs
    if which.is_number:
      return cases[int(which.const)]
    if which.is_constant or all(x == cases[0] for x in cases):
      return choose(cases, which.sum_eqn)
  if all(x.is_constant for x in inputs):
    return constant(UNKNOWN, _first_sum(inputs))
  return _combine(eqn, inputs)


def choose(cases: Sequence[ZeroRow], sum_eqn: Any) -> ZeroRow:
  """Returns one of several values, which one the program computes.

  Args:
    cases: The values.
    sum_eqn: An equation that sums over rows, on which the choice depends.
  """
  return functools.reduce(
    lambda x, y: x if x == y else _choose(x, y, sum_eqn), cases
  )


def _choose(x: ZeroRow, y: ZeroRow, sum_eqn: Any) -> ZeroRow:
  factors = {
    s: x.factors[s] if _equal(x.factors.get(s), y.factors.get(s)) else UNKNOWN
    for s in {**x.factors, **y.factors}
  }
  return ZeroRow(
    x.const if _equal(x.const, y.const) else UNKNOWN,
    factors,
    x.sources | y.sources,
    x.is_linear and y.is_linear,
    x.sum_eqn or y.sum_eqn or sum_eqn,
    x.eqn or y.eqn,
  )


def _equal(x: Any, y: Any) -> bool:
  return x is not UNKNOWN and y is not UNKNOWN and bool(np.all(x == y))


def _add(x: ZeroRow, y: ZeroRow) -> ZeroRow:
  factors = dict(x.factors)
  for s, factor in y.factors.items():
    factors[s] = _sum(factors.get(s, 0), factor)
  return ZeroRow(
    _sum(x.const, y.const),
    factors,
    x.sources | y.sources,
    x.is_linear and y.is_linear,
    x.sum_eqn or y.sum_eqn,
    x.eqn or y.eqn,
  )


def _scale(x: ZeroRow, by: ZeroRow) -> ZeroRow:
  """Multiplies by a value that depends on no source."""
  return ZeroRow(
    _product(x.const, by.const),
    {s: _product(f, by.const) for s, f in x.factors.items()},
    x.sources,
    x.is_linear,
    x.sum_eqn or by.sum_eqn,
    x.eqn,
  )


def _combine(eqn: Any, inputs: Sequence[ZeroRow]) -> ZeroRow:
  """Returns a result that is no sum of multiples."""
  return ZeroRow(
    UNKNOWN,
    {},
    frozenset().union(*(x.sources | set(x.factors) for x in inputs)),
    False,
    _first_sum(inputs),
    next((x.eqn for x in inputs if x.eqn is not None), eqn),
  )


def _first_sum(inputs: Sequence[ZeroRow]) -> Any:
  return next((x.sum_eqn for x in inputs if x.sum_eqn is not None), None)


def _sum(x: Any, y: Any) -> Any:
  return UNKNOWN if x is UNKNOWN or y is UNKNOWN else x + y


def _product(x: Any, y: Any) -> Any:
  if (x is not UNKNOWN and not np.any(x)) or (
    y is not UNKNOWN and not np.any(y)
  ):
    return 0
  return UNKNOWN if x is UNKNOWN or y is UNKNOWN else x * y


def _compute(eqn: Any, inputs: Sequence[ZeroRow]) -> Any:
  """Computes an equation with scalars."""
  # Inside `jax.jit` too: the constants decide which program is right.
  with jax.ensure_compile_time_eval():
    args = [
      np.asarray(x.const, v.aval.dtype)
      for x, v in zip(inputs, eqn.invars, strict=True)
    ]
    params = {k: v for k, v in eqn.params.items() if k != "sharding"}
    if "sharding" in eqn.params:
      params["sharding"] = None
    result = eqn.primitive.bind(*map(jax.numpy.asarray, args), **params)
    return np.asarray(result[0] if eqn.primitive.multiple_results else result)
