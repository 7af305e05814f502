"""Decides whether an optimizer updates each row of a table by itself.

The update is traced twice, with tables of different numbers of rows, and the
programs are compared equation by equation. Row `i` of a result may depend on
row `i` of the tables, and on sums over rows to which rows with a zero gradient
add nothing, such as the global norm of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.extend import core as jax_core
import numpy as np

from flaxshard.core import programs
from flaxshard.sparse import zero_rows
from flaxshard.sparse.zero_rows import ZeroRow


@dataclasses.dataclass(frozen=True)
class Value:
  """Facts about a value in the program of whole tables.

  Attributes:
    dim: The dimension that has the rows; None if it has no rows.
    table: The number of the table; None if all rows are equal, or `dim` is.
    zero: The value in the rows whose gradient is zero. If `dim` is None, the
      value itself.
  """

  zero: ZeroRow
  dim: int | None = None
  table: int | None = None


class MixedRowsError(Exception):
  """An equation mixes rows, or depends on their number.

  Attributes:
    eqn: The equation, or None if there is none.
    tables: The numbers of the tables of its inputs.
  """

  def __init__(self, eqn: Any = None, tables: frozenset[int] = frozenset()):
    super().__init__()
    self.eqn = eqn
    self.tables = tables


def evaluate(
  whole: jax_core.ClosedJaxpr | jax_core.Jaxpr,
  part: jax_core.ClosedJaxpr | jax_core.Jaxpr,
  inputs: Sequence[Value],
) -> list[Value]:
  """Returns what is known of the outputs of a program.

  Args:
    whole: The program of whole tables.
    part: The program of tables with another number of rows.
    inputs: What is known of its inputs.

  Raises:
    MixedRowsError: The programs differ, or an equation mixes rows.
  """
  consts = [getattr(p, "consts", ()) for p in (whole, part)]
  if not _same_constants(*consts):
    raise MixedRowsError
  whole, part = programs.open_program(whole), programs.open_program(part)
  known = dict(zip(whole.invars, inputs, strict=True))
  for var, value in zip(whole.constvars, consts[0], strict=False):
    known[var] = _constant(value)

  def read(atom: Any) -> Value:
    if isinstance(atom, jax_core.Literal):
      return _constant(atom.val)
    return known.get(atom, _GLOBAL)

  if len(whole.eqns) != len(part.eqns):
    raise MixedRowsError(whole.eqns[0] if whole.eqns else None)
  for eqn, other in zip(whole.eqns, part.eqns, strict=True):
    if eqn.primitive is not other.primitive or not programs.same_values(
      programs.literals(eqn), programs.literals(other)
    ):
      raise MixedRowsError(eqn)
    given = [read(x) for x in eqn.invars]
    try:
      new = _evaluate_equation(eqn, other, given)
    except MixedRowsError as e:
      tables = frozenset(x.table for x in given if x.table is not None)
      # Those of the innermost program, if it shows the optimizer's function.
      inner = e.eqn if function_name(e.eqn) else eqn
      raise MixedRowsError(inner, e.tables or tables) from None
    known.update(zip(eqn.outvars, new, strict=True))
  return [read(x) for x in whole.outvars]


def function_name(eqn: Any) -> str | None:
  """Returns the name of the function whose update has an equation, or None.

  Example:
    >>> import optax
    >>> tx = optax.clip_by_block_rms(1.0)
    >>> grads = jax.ShapeDtypeStruct((2,), float)
    >>> program = jax.make_jaxpr(tx.update)(grads, tx.init(grads))
    >>> function_name(program.eqns[0])
    'clip_by_block_rms'
  """
  traceback = None if eqn is None else eqn.source_info.traceback
  if traceback is None:
    return None
  names = [
    frame.function_name
    for frame in traceback.frames
    if "/jax/" not in frame.file_name and "/jaxlib/" not in frame.file_name
  ]
  for name in names:
    if not {"update", "update_fn"}.isdisjoint(name.split(".")[1:]):
      return name.partition(".")[0]
  return names[0] if names else None


_GLOBAL = Value(zero_rows.constant(zero_rows.UNKNOWN))


def _constant(value: Any) -> Value:
  if np.ndim(value) or isinstance(value, jax.core.Tracer):
    return _GLOBAL
  return Value(zero_rows.constant(np.asarray(value)))


def _same_constants(some: Sequence[Any], others: Sequence[Any]) -> bool:
  if len(some) != len(others):
    return False
  return all(
    a is b
    or (
      not (isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer))
      and programs.same_values([a], [b])
    )
    for a, b in zip(some, others, strict=True)
  )


def _evaluate_equation(eqn: Any, other: Any, given: list[Value]) -> list[Value]:
  """Returns what is known of the outputs of an equation.

  Args:
    eqn: The equation of whole tables.
    other: The same equation of tables with another number of rows.
    given: What is known of its inputs.
  """
  name, params = eqn.primitive.name, eqn.params
  if name in programs.CALLS:
    return evaluate(programs.called(eqn), programs.called(other), given)
  if name == "cond" and given[0].dim is None:
    branches = [
      evaluate(a, b, given[1:])
      for a, b in zip(params["branches"], other.params["branches"], strict=True)
    ]
    sum_eqn = given[0].zero.sum_eqn
    return [_choose(values, sum_eqn) for values in zip(*branches, strict=True)]
  if name == "optimization_barrier":
    return given
  if all(x.dim is None for x in given):
    return _evaluate_global(eqn, other, given)
  if name in programs.ELEMENTWISE:
    if programs.semantics(params) != programs.semantics(other.params):
      raise MixedRowsError
    return [_evaluate_elements(eqn, given)]
  if name in ("broadcast_in_dim", "reshape"):
    return [_move_rows(eqn, other, given[0])]
  if name.startswith("reduce_") or name == "dot_general":
    return [_reduce(eqn, given)]
  raise MixedRowsError


def _evaluate_global(eqn: Any, other: Any, given: list[Value]) -> list[Value]:
  """Returns the outputs of an equation whose inputs have no rows."""
  sums = (x.zero.sum_eqn for x in given)
  sum_eqn = next((x for x in sums if x is not None), None)
  shapes = [x.aval.shape for x in eqn.outvars]
  other_shapes = [x.aval.shape for x in other.outvars]
  if shapes != other_shapes:
    if eqn.primitive.name != "broadcast_in_dim":
      raise MixedRowsError
    return [_broadcast(eqn, other, given[0])]
  if programs.semantics(eqn.params) != programs.semantics(other.params):
    raise MixedRowsError
  name = eqn.primitive.name
  if name == "broadcast_in_dim":
    return [given[0]]
  if (
    name in programs.ELEMENTWISE
    and not any(shapes)
    and len(shapes) == 1
    and all(x.zero.is_number for x in given)
  ):
    return [Value(zero_rows.evaluate(eqn, [x.zero for x in given]))]
  unknown = zero_rows.constant(zero_rows.UNKNOWN, sum_eqn)
  return [Value(unknown) for _ in shapes]


def _broadcast(eqn: Any, other: Any, x: Value) -> Value:
  """Returns an array with equal rows, or with those of its input."""
  shape, other_shape = eqn.outvars[0].aval.shape, other.outvars[0].aval.shape
  differ = [
    d for d, (m, n) in enumerate(zip(shape, other_shape, strict=True)) if m != n
  ]
  if len(differ) != 1:
    raise MixedRowsError
  return dataclasses.replace(x, dim=differ[0], table=None)


def _move_rows(eqn: Any, other: Any, x: Value) -> Value:
  """Returns a value whose rows are at another dimension."""
  out, other_out = eqn.outvars[0].aval.shape, other.outvars[0].aval.shape
  shape = eqn.invars[0].aval.shape
  assert x.dim is not None
  if eqn.primitive.name == "broadcast_in_dim":
    dim = eqn.params["broadcast_dimensions"][x.dim]
  else:
    # The rows stay in order if as many elements are before them: their
    # dimension may have been joined with later ones.
    before = math.prod(shape[: x.dim])
    dims = [
      d
      for d in range(len(out))
      if math.prod(out[:d]) == before
      and out[d] != other_out[d]
      and out[d] % shape[x.dim] == 0
    ]
    if len(dims) != 1:
      raise MixedRowsError
    (dim,) = dims
  differ = [
    d for d, (m, n) in enumerate(zip(out, other_out, strict=True)) if m != n
  ]
  if differ != [dim]:
    raise MixedRowsError
  return dataclasses.replace(x, dim=dim)


def _evaluate_elements(eqn: Any, given: list[Value]) -> Value:
  dim, table = _common_rows(
    [x for x, v in zip(given, eqn.invars, strict=True) if v.aval.shape]
  )
  zero = zero_rows.evaluate(eqn, [x.zero for x in given])
  return Value(zero, dim, table)


def _common_rows(values: Sequence[Value]) -> tuple[int | None, int | None]:
  """Returns the dimension and the table of the rows of several values."""
  dims = {x.dim for x in values}
  tables = {x.table for x in values if x.table is not None}
  if len(dims) > 1 or len(tables) > 1:
    raise MixedRowsError
  return dims.pop(), next(iter(tables), None)


def _choose(cases: Sequence[Value], sum_eqn: Any) -> Value:
  """Returns one of several values, which one the program computes."""
  dim, table = _common_rows(cases)
  return Value(zero_rows.choose([x.zero for x in cases], sum_eqn), dim, table)


def _reduce(eqn: Any, given: list[Value]) -> Value:
  """Returns a reduction: within rows, or over rows that add nothing."""
  name = eqn.primitive.name
  if name == "dot_general":
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = list(zip(*contracted, strict=True))
    if any(batch) or (given[0].dim, given[1].dim) not in pairs:
      raise MixedRowsError
    _common_rows([dataclasses.replace(x, dim=0) for x in given])
    if not any(x.zero.is_zero for x in given):
      raise MixedRowsError
    return Value(zero_rows.constant(zero_rows.UNKNOWN, eqn))
  (x,) = given
  axes = eqn.params["axes"]
  assert x.dim is not None
  if x.dim not in axes:
    dim = x.dim - sum(d < x.dim for d in axes)
    zero = x.zero
    if not zero.is_zero and not (
      zero.is_number and name in ("reduce_and", "reduce_or", "reduce_max")
    ):
      # An element is no longer a function of those at its own place.
      zero = ZeroRow(
        zero_rows.UNKNOWN,
        {},
        zero.sources | set(zero.factors),
        False,
        zero.sum_eqn,
        zero.eqn or eqn,
      )
    return Value(zero, dim, x.table)
  neutral = x.zero.is_number and (
    (name == "reduce_sum" and x.zero.is_zero)
    or (name == "reduce_and" and bool(np.all(x.zero.const)))
    or (name == "reduce_or" and x.zero.is_zero)
  )
  if not neutral:
    raise MixedRowsError
  return Value(zero_rows.constant(zero_rows.UNKNOWN, eqn))
