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
      (jnp.zeros(0, index_dtype(self.shape[0])), zeros),
      *self.parts,
      strict=True,
    )
    return jnp.concatenate(indices), jnp.concatenate(values)

  def to_dense(self) -> jax.Array:
    """Returns the whole array."""
    indices, values = self.joined()
    zeros = jnp.zeros(self.shape, self.dtype)
    return zeros.at[indices].add(values, mode="drop")

  def num_rows(self) -> int:
    """Returns the number of rows of all parts."""
    return sum(indices.size for indices, _ in self.parts)

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


def index_dtype(num_rows: int) -> Any:
  """Returns the dtype of row numbers: they and the padding fit into it."""
  return jnp.dtype("int32" if num_rows < 2**31 else "int64")


@dataclasses.dataclass(frozen=True)
class Rule:
  """Evaluates one primitive on `Rows`.

  Attributes:
    operands: Takes an equation and what is known of its inputs (`DENSE`,
      `ROWS` or `ZEROS`). Returns the positions of the inputs that `apply` takes
      as `Rows`, or None if the output cannot be `Rows`.
    apply: From the equation and its inputs, its output as `Rows`, or a list of
      all outputs.
  """

  operands: Callable[[Any, list[str]], tuple[int, ...] | None]
  apply: Callable[..., Rows | list[Rows]]


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


def is_literal_zero(atom: Any) -> bool:
  """Returns whether an input of an equation is the number zero."""
  return isinstance(atom, jax_core.Literal) and not np.any(atom.val)


# -- Sources of rows.


def _zeros_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  if not is_literal_zero(eqn.invars[0]):
    return None
  return () if eqn.outvars[0].aval.shape else None


def _scatter_window(eqn: Any) -> int | None:
  """Returns how many rows an update of a scatter has; None if not whole ones.

  Each update must cover whole rows: all elements of all dimensions but the
  first one.
  """
  dims = eqn.params["dimension_numbers"]
  if dims.operand_batching_dims:
    return None
  shape, updates = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
  inserted = set(dims.inserted_window_dims)
  sizes = iter(dims.update_window_dims)
  window = [
    1 if d in inserted else updates[next(sizes)] for d in range(len(shape))
  ]
  return window[0] if tuple(window[1:]) == tuple(shape[1:]) else None


def _scatter_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  if known[0] == DENSE or _scatter_window(eqn) is None:
    return None
  return (0,)


def _scatter_add(
  eqn: Any, rows: Rows, indices: jax.Array, updates: jax.Array
) -> Rows:
  dims = eqn.params["dimension_numbers"]
  # The dimensions of the updates that count them come first, then a window.
  order = [
    d for d in range(updates.ndim) if d not in dims.update_window_dims
  ] + list(dims.update_window_dims)
  values = updates.transpose(order).reshape(-1, *rows.shape[1:])
  part = _scattered_rows(eqn, indices), values
  return dataclasses.replace(rows, parts=(*rows.parts, part))


def _scattered_rows(eqn: Any, indices: jax.Array) -> jax.Array:
  """Returns the numbers of the rows that a scatter writes."""
  dims, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
  window: Any = _scatter_window(eqn)
  rows = _like(eqn)[0][0]
  indices = indices.reshape(-1, indices.shape[-1])
  start = jnp.zeros(len(indices), index_dtype(rows))
  is_inside = jnp.ones(len(indices), bool)
  for column, d in enumerate(dims.scatter_dims_to_operand_dims):
    last = rows - window if d == 0 else 0
    given = _wide(indices[:, column])
    if mode == lax.GatherScatterMode.CLIP:
      given = jnp.clip(given, 0, last)
    else:
      is_inside &= (given >= 0) & (given <= last)
    if d == 0:
      start = given
  start = jnp.where(is_inside, start, rows).astype(index_dtype(rows))
  if window == 1:
    return start
  every = start[:, None] + jnp.arange(window, dtype=start.dtype)
  return jnp.where(is_inside[:, None], every, rows).reshape(-1)


def _overwrite_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  # The gradient of what `table.at[ids].set(...)` overwrites is zero.
  if known[2] != ZEROS or known[0] == DENSE or _scatter_window(eqn) is None:
    return None
  return (0,)


def _overwrite(eqn: Any, rows: Rows, indices: jax.Array, _: Any) -> Rows:
  gone = _scattered_rows(eqn, indices)
  keep = lambda i, v: jnp.where(_like_rows(jnp.isin(i, gone), v), 0, v)
  return rows.map(keep)


def _like_rows(x: jax.Array, rows: jax.Array) -> jax.Array:
  """Returns numbers `[n]` in a shape that is broadcast to `[n, ...]`."""
  return x.reshape(-1, *[1] * (rows.ndim - 1))


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
  count = len(update)
  # As JAX does, it moves a slice that would end outside.
  start = jnp.clip(_wide(start), 0, rows.shape[0] - count)
  indices = start.astype(index_dtype(rows.shape[0])) + jnp.arange(
    count, dtype=index_dtype(rows.shape[0])
  )
  return dataclasses.replace(rows, parts=((indices, update),))


def _pad_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  config = eqn.params["padding_config"]
  if not config or not is_literal_zero(eqn.invars[1]):
    return None
  if known[0] != DENSE:
    return (0,)
  low, high, _ = config[0]
  if any(tuple(c) != (0, 0, 0) for c in config[1:]) or min(low, high) < 0:
    return None
  # A slice of most rows is no lookup.
  used, rows = eqn.invars[0].aval.shape[0], eqn.outvars[0].aval.shape[0]
  return () if 2 * used <= rows else None


def _pad(eqn: Any, x: Any, zero: Any) -> Rows:
  low, _, between = map(int, eqn.params["padding_config"][0])
  shape, dtype = _like(eqn)
  if not isinstance(x, Rows):
    indices = jnp.arange(len(x), dtype=index_dtype(shape[0]))
    return Rows(((low + (1 + between) * indices, x),), shape, dtype)
  rows = _move_rows(x, lambda i: low + (1 + between) * i, shape)
  config = [(0, 0, 0), *eqn.params["padding_config"][1:]]
  return rows.map(lambda _, v: lax.pad(v, jnp.zeros((), dtype), config))


def _move_rows(
  rows: Rows, move: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]
) -> Rows:
  """Returns rows with other numbers.

  Args:
    rows: The rows.
    move: From old row numbers to new ones. Those that are outside of the new
      array are dropped.
    shape: The shape of the new array.
  """
  dtype = index_dtype(max(rows.shape[0], shape[0]))

  def new(indices: jax.Array) -> jax.Array:
    moved = move(indices.astype(dtype))
    is_row = (indices < rows.shape[0]) & (moved >= 0) & (moved < shape[0])
    return jnp.where(is_row, moved, shape[0]).astype(index_dtype(shape[0]))

  return Rows(tuple((new(i), v) for i, v in rows.parts), shape, rows.dtype)


# -- Sums, factors and casts of rows.


def _add(eqn: Any, x: Rows, y: Rows) -> Rows:
  return dataclasses.replace(x, parts=x.parts + y.parts)


def _mul_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  return next(((i,) for i, x in enumerate(known) if x != DENSE), None)


def _select_rows(factor: jax.Array, indices: jax.Array) -> jax.Array:
  """Returns the rows of an array that stands beside `Rows`."""
  if not factor.ndim:
    return factor
  return factor.at[indices].get(mode="clip")


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


# -- Other shapes.


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


def _broadcast_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  if known[0] == DENSE:
    return _zeros_operands(eqn, known)
  old, (new, _) = eqn.invars[0].aval.shape, _like(eqn)
  places = eqn.params["broadcast_dimensions"]
  return (0,) if places[0] == 0 and old[0] == new[0] else None


def _broadcast(eqn: Any, x: Any, *_: Any) -> Rows:
  shape, dtype = _like(eqn)
  if not isinstance(x, Rows):
    return Rows((), shape, dtype)
  places = eqn.params["broadcast_dimensions"]
  wide = lambda _, v: lax.broadcast_in_dim(v, (len(v), *shape[1:]), places)
  return x.map(wide, shape)


def _sum_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  return None if known[0] == DENSE or 0 in eqn.params["axes"] else (0,)


def _reduce_sum(eqn: Any, x: Rows) -> Rows:
  axes = eqn.params["axes"]
  shape, _ = _like(eqn)
  return x.map(lambda _, v: v.sum(axes, dtype=v.dtype), shape)


def _slice_operands(eqn: Any, known: list[str]) -> tuple[int, ...] | None:
  strides = eqn.params["strides"]
  if known[0] == DENSE or (strides is not None and strides[0] != 1):
    return None
  return (0,)


def _slice(eqn: Any, x: Rows) -> Rows:
  start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
  shape, _ = _like(eqn)
  rows = _move_rows(x, lambda i: i - int(start[0]), shape)
  return rows.map(
    lambda _, v: lax.slice(
      v, (0, *start[1:]), (len(v), *limit[1:]), eqn.params["strides"]
    )
  )


def _split(eqn: Any, x: Rows) -> list[Rows]:
  axis, outputs, start = eqn.params["axis"], [], 0
  for size, var in zip(eqn.params["sizes"], eqn.outvars, strict=True):
    shape = tuple(var.aval.shape)
    if axis == 0:
      move = lambda i, start=start: i - start
      outputs.append(_move_rows(x, move, shape))
    else:
      cut = lambda _, v, start=start, size=size: lax.slice_in_dim(
        v, start, start + size, axis=axis
      )
      outputs.append(x.map(cut, shape))
    start += size
  return outputs


def _concatenate(eqn: Any, *given: Rows) -> Rows:
  axis, (shape, dtype) = eqn.params["dimension"], _like(eqn)
  parts: list[Any] = []
  start = 0
  for x in given:
    parts += _place(x, start, axis, shape).parts
    start += x.shape[axis]
  return Rows(tuple(parts), shape, dtype)


def _place(x: Rows, start: int, axis: int, shape: tuple[int, ...]) -> Rows:
  """Returns rows as a part of an array, from a position along an axis."""
  if axis == 0:
    return _move_rows(x, lambda i: i + start, shape)
  config = [(0, 0, 0)] * len(shape)
  config[axis] = (start, shape[axis] - start - x.shape[axis], 0)
  zero = jnp.zeros((), x.dtype)
  return x.map(lambda _, v: lax.pad(v, zero, config), shape)


RULES = {
  "add": Rule(_all, _add),
  "add_any": Rule(_all, _add),
  "broadcast_in_dim": Rule(_broadcast_operands, _broadcast),
  "concatenate": Rule(_all, _concatenate),
  "convert_element_type": Rule(_first, _convert),
  "copy": Rule(_first, _same),
  "copy_p": Rule(_first, _same),
  "div": Rule(_first, _div),
  "dynamic_update_slice": Rule(_update_operands, _dynamic_update_slice),
  "name": Rule(_first, _same),
  "mul": Rule(_mul_operands, _mul),
  "neg": Rule(_first, lambda eqn, x: x.map(lambda _, v: -v)),
  "pad": Rule(_pad_operands, _pad),
  "reduce_sum": Rule(_sum_operands, _reduce_sum),
  "reshape": Rule(_keeps_rows, _reshape),
  "scatter": Rule(_overwrite_operands, _overwrite),
  "scatter-add": Rule(_scatter_operands, _scatter_add),
  "select_n": Rule(_select_operands, _select_n),
  "sharding_constraint": Rule(_first, _same),
  "slice": Rule(_slice_operands, _slice),
  "split": Rule(_first, _split),
  "squeeze": Rule(_keeps_rows, _reshape),
}


def padding_part(num_rows: int, shape: tuple[int, ...], dtype: Any) -> Any:
  """Returns a part of `Rows` with padding alone."""
  indices = jnp.full(num_rows, shape[0], index_dtype(shape[0]))
  return indices, jnp.zeros((num_rows, *shape[1:]), dtype)
