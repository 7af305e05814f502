"""Operations of a backward pass on arrays of which only some rows are given.

In a backward pass the gradient of a table starts as zeros. The gradient of each
lookup is added to it with `scatter_add`, and casts, factors and sums follow.
`Rows` stands for such an array, and the rules in `RULES` compute with it.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

# What an analysis knows of a variable. Zeros are rows, too, but none is given.
DENSE, ROWS, ZEROS = "dense", "rows", "zeros"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
  """An array that is zero but for some rows.

  Attributes:
    parts: Pairs of row numbers `[n]` and rows `[n, *shape[1:]]`, whose sum is
      the array. Row numbers are int32, or int64 for 2^31 rows and more. The row
      number `shape[0]` is padding: its row is dropped.
    shape: The shape of the array.
    dtype: The dtype of the array.
  """

  parts: tuple[tuple[jax.Array, jax.Array], ...]
  shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
  dtype: Any = dataclasses.field(metadata=dict(static=True))

  def joined(self) -> tuple[jax.Array, jax.Array]:
    """Returns row numbers and rows of all parts."""
    if len(self.parts) == 1:
      return self.parts[0]
    zeros = jnp.zeros((0, *self.shape[1:]), self.dtype)
    indices, values = zip(
      (jnp.zeros(0, _index_dtype(self.shape[0])), zeros),
      *self.parts,
      strict=True,
    )
    return jnp.concatenate(indices), jnp.concatenate(values)

  def to_dense(self) -> jax.Array:
    """Returns the whole array."""
    indices, values = self.joined()
    zeros = jnp.zeros(self.shape, self.dtype)
    return zeros.at[indices].add(values, mode="drop")

  def map(
    self,
    fn: Callable[[jax.Array, jax.Array], jax.Array],
    shape: tuple[int, ...] | None = None,
    dtype: Any = None,
  ) -> Rows:
    """Applies a function that maps zeros to zeros to the rows of each part.

    Args:
      fn: Takes row numbers and rows, and returns the new rows.
      shape: The new shape of the whole array; None keeps it.
      dtype: The new dtype; None keeps it.
    """
    return Rows(
      tuple((i, fn(i, v)) for i, v in self.parts),
      self.shape if shape is None else shape,
      self.dtype if dtype is None else dtype,
    )

  def with_part(self, indices: jax.Array, values: jax.Array) -> Rows:
    """Returns the sum with further rows."""
    return dataclasses.replace(self, parts=(*self.parts, (indices, values)))


def _index_dtype(num_rows: int) -> Any:
  """Returns the dtype of row numbers: they and the padding fit into it."""
  return jnp.dtype("int32" if num_rows < 2**31 else "int64")


@dataclasses.dataclass(frozen=True)
class Rule:
  """Evaluates one primitive on `Rows`.

  Attributes:
    operands: Takes an equation and what is known of its inputs (`DENSE`,
      `ROWS` or `ZEROS`). Returns the positions of the inputs that `apply` takes
      as `Rows`, or None if the output cannot be `Rows`.
    apply: From the equation and its inputs, its output as `Rows`.
    adds: Whether it adds rows of its own.
  """

  operands: Callable[[Any, list[str]], tuple[int, ...] | None]
  apply: Callable[..., Rows]
  adds: bool = False


def result(eqn: Any, known: list[str]) -> str:
  """Returns what is known of the output of an equation.

  Args:
    eqn: The equation.
    known: What is known of its inputs.
  """
  rule = RULES.get(eqn.primitive.name)
  operands = None if rule is None else rule.operands(eqn, known)
  if rule is None or operands is None:
    return DENSE
  is_zeros = not rule.adds and all(known[i] == ZEROS for i in operands)
  return ZEROS if is_zeros else ROWS


def _first(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  return None if known[0] == DENSE else (0,)


def _all(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  if DENSE in known:
    return None
  return tuple(range(len(known)))


def _like(eqn: Any) -> tuple[tuple[int, ...], Any]:
  """Returns shape and dtype of the output of an equation."""
  aval = eqn.outvars[0].aval
  return tuple(aval.shape), aval.dtype


def _is_literal_zero(atom: Any) -> bool:
  """Returns whether an input of an equation is the number zero."""
  return isinstance(atom, jax_core.Literal) and not np.any(atom.val)


# -- Sources of rows.


def _zeros_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  if not _is_literal_zero(eqn.invars[0]):
    return None
  return () if eqn.outvars[0].aval.shape else None


def _zeros(eqn: Any, *_: Any) -> Rows:
  return Rows((), *_like(eqn))


def _scatters_rows(eqn: Any) -> bool:
  """Returns whether each update of a scatter covers one whole row."""
  dims = eqn.params["dimension_numbers"]
  if dims.operand_batching_dims:
    return False
  shape, updates = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
  sizes = iter(dims.update_window_dims)
  window = [
    1 if d in dims.inserted_window_dims else updates[next(sizes)]
    for d in range(len(shape))
  ]
  return tuple(window) == (1, *shape[1:])


def _scatter_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  return (0,) if known[0] != DENSE and _scatters_rows(eqn) else None


def _scatter_add(
  eqn: Any, rows: Rows, indices: jax.Array, updates: jax.Array
) -> Rows:
  dims = eqn.params["dimension_numbers"]
  # The dimensions of the updates that count them come first, then a row.
  order = [
    d for d in range(updates.ndim) if d not in dims.update_window_dims
  ] + list(dims.update_window_dims)
  values = updates.transpose(order).reshape(-1, *rows.shape[1:])
  return rows.with_part(_scattered_rows(eqn, indices), values)


def _scattered_rows(eqn: Any, indices: jax.Array) -> jax.Array:
  """Returns the numbers of the rows that a scatter writes."""
  dims, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
  rows = _like(eqn)[0][0]
  indices = indices.reshape(-1, indices.shape[-1])
  start = jnp.zeros(len(indices), _index_dtype(rows))
  is_inside = jnp.ones(len(indices), bool)
  for column, d in enumerate(dims.scatter_dims_to_operand_dims):
    last = rows - 1 if d == 0 else 0
    given = _wide(indices[:, column])
    if mode == lax.GatherScatterMode.CLIP:
      given = jnp.clip(given, 0, last)
    else:
      is_inside &= (given >= 0) & (given <= last)
    if d == 0:
      start = given
  return jnp.where(is_inside, start, rows).astype(_index_dtype(rows))


def _overwrite_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  # The gradient of what `table.at[ids].set(...)` overwrites is zero.
  return _scatter_operands(eqn, known) if known[2] == ZEROS else None


def _overwrite(eqn: Any, rows: Rows, indices: jax.Array, _: Any) -> Rows:
  gone = _scattered_rows(eqn, indices)

  def keep(i: jax.Array, v: jax.Array) -> jax.Array:
    is_gone = jnp.isin(i, gone).reshape(-1, *[1] * (v.ndim - 1))
    return jnp.where(is_gone, 0, v)

  return rows.map(keep)


def _wide(indices: jax.Array) -> jax.Array:
  """Returns indices in a dtype into which the number of any row fits."""
  return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices


def _update_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  table, rows = (x.aval.shape for x in eqn.invars[:2])
  # It overwrites rows that are given already.
  if known[0] != ZEROS or not table or table[1:] != rows[1:]:
    return None
  return (0,)


def _dynamic_update_slice(
  eqn: Any, rows: Rows, update: jax.Array, start: jax.Array, *_: Any
) -> Rows:
  count, dtype = len(update), _index_dtype(rows.shape[0])
  # As JAX does, it moves a slice that would end outside.
  start = jnp.clip(_wide(start), 0, rows.shape[0] - count)
  return rows.with_part(
    start.astype(dtype) + jnp.arange(count, dtype=dtype), update
  )


def _pad_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  """Accepts the gradient of a slice of rows."""
  config = eqn.params["padding_config"]
  if not config or not _is_literal_zero(eqn.invars[1]):
    return None
  low, high, _ = config[0]
  if any(tuple(c) != (0, 0, 0) for c in config[1:]) or min(low, high) < 0:
    return None
  # A slice of most rows is no lookup.
  used, rows = eqn.invars[0].aval.shape[0], eqn.outvars[0].aval.shape[0]
  return () if 2 * used <= rows else None


def _pad(eqn: Any, x: jax.Array, zero: Any) -> Rows:
  low, _, between = map(int, eqn.params["padding_config"][0])
  indices = jnp.arange(len(x), dtype=_index_dtype(_like(eqn)[0][0]))
  return _zeros(eqn).with_part(low + (1 + between) * indices, x)


# -- Sums, factors, casts and shapes of rows.


def _add(eqn: Any, x: Rows, y: Rows) -> Rows:
  return dataclasses.replace(x, parts=x.parts + y.parts)


def _mul_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  return next(((i,) for i, x in enumerate(known) if x != DENSE), None)


def _select_rows(factor: jax.Array, indices: jax.Array) -> jax.Array:
  """Returns the rows of an array that stands beside `Rows`."""
  return factor.at[indices].get(mode="clip") if factor.ndim else factor


def _mul(eqn: Any, x: Any, y: Any) -> Rows:
  rows, factor = (x, y) if isinstance(x, Rows) else (y, x)
  return rows.map(lambda i, v: v * _select_rows(factor, i))


def _div(eqn: Any, x: Rows, y: jax.Array) -> Rows:
  return x.map(lambda i, v: v / _select_rows(y, i))


def _select_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  if DENSE in known[1:]:
    return None
  return tuple(range(1, len(known)))


def _select_n(eqn: Any, which: jax.Array, *cases: Rows) -> Rows:
  parts: list[Any] = []
  for k, case in enumerate(cases):

    def keep(i: jax.Array, v: jax.Array, k: int = k) -> jax.Array:
      return jnp.where(_select_rows(which, i) == k, v, 0)

    parts += case.map(keep).parts
  return Rows(tuple(parts), *_like(eqn))


def _convert(eqn: Any, x: Rows) -> Rows:
  dtype = eqn.params["new_dtype"]
  return x.map(lambda _, v: v.astype(dtype), dtype=jnp.dtype(dtype))


def _same(eqn: Any, x: Rows) -> Rows:
  return x


def _keeps_rows(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  """Accepts a `reshape` or `squeeze` that keeps the first dimension."""
  old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
  if known[0] == DENSE or not new or old[0] != new[0]:
    return None
  # A `reshape` with dimensions transposes. A `squeeze` has the dimensions that
  # it removes.
  dims = eqn.params.get("dimensions")
  keeps = dims is None or (eqn.primitive.name == "squeeze" and 0 not in dims)
  return (0,) if keeps else None


def _reshape(eqn: Any, x: Rows) -> Rows:
  shape, _ = _like(eqn)
  return x.map(lambda _, v: v.reshape(-1, *shape[1:]), shape)


RULES = {
  "add": Rule(_all, _add),
  "add_any": Rule(_all, _add),
  "broadcast_in_dim": Rule(_zeros_operands, _zeros),
  "convert_element_type": Rule(_first, _convert),
  "copy": Rule(_first, _same),
  "copy_p": Rule(_first, _same),
  "div": Rule(_first, _div),
  "dynamic_update_slice": Rule(
    _update_operands, _dynamic_update_slice, adds=True
  ),
  "name": Rule(_first, _same),
  "mul": Rule(_mul_operands, _mul),
  "neg": Rule(_first, lambda eqn, x: x.map(lambda _, v: -v)),
  "pad": Rule(_pad_operands, _pad, adds=True),
  "reshape": Rule(_keeps_rows, _reshape),
  "scatter": Rule(_overwrite_operands, _overwrite),
  "scatter-add": Rule(_scatter_operands, _scatter_add, adds=True),
  "select_n": Rule(_select_operands, _select_n),
  "sharding_constraint": Rule(_first, _same),
  "squeeze": Rule(_keeps_rows, _reshape),
}
