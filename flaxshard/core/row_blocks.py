"""Reads and writes rows of arrays, in blocks for the parts of a split array.

A compiler that sees `x[indices]` for an array whose rows are split over devices
does not know which device has which row: it sums over the devices what each of
them finds. If the row numbers form one block for each part of the array, the
i-th with the rows of the i-th part, each device reads and writes its own part,
without communication.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def split(
  indices: jax.Array, values: jax.Array, num_rows: int, parts: int
) -> tuple[jax.Array, jax.Array]:
  """Returns row numbers and rows in blocks, one for each part of an array.

  Args:
    indices: Distinct row numbers `[n]`; `num_rows` is padding.
    values: The rows `[n, ...]`.
    num_rows: The number of rows of the array.
    parts: The number of parts, which divides `num_rows`.

  Returns:
    Row numbers `[parts * n]` and rows `[parts * n, ...]`. A block has a place
    for each row; the rows of other parts are padding there.
  """
  part = jnp.arange(parts, dtype=indices.dtype)[:, None]
  # Padding is in no part.
  is_own = indices // (num_rows // parts) == part
  blocks = jnp.where(is_own, indices, num_rows)
  is_own = is_own.reshape(*is_own.shape, *[1] * (values.ndim - 1))
  rows = jnp.where(is_own, values, 0)
  return blocks.reshape(-1), rows.reshape(-1, *values.shape[1:])


def take(x: jax.Array, indices: jax.Array, parts: int = 1) -> jax.Array:
  """Returns rows of an array; padding takes the last row, or that of a part.

  Args:
    x: The array `[num_rows, ...]`.
    indices: Row numbers `[n]`, in `parts` blocks; `num_rows` is padding.
    parts: The number of blocks.
  """
  # Padding takes values that occur: zeros could give NaNs.
  take_block = lambda x, indices: x.at[indices].get(mode="clip")
  if parts == 1:
    return take_block(x, indices)
  taken = jax.vmap(take_block)(_parts_of(x, parts), *_blocks(x, indices, parts))
  return taken.reshape(-1, *x.shape[1:])


def put(
  x: jax.Array, indices: jax.Array, rows: jax.Array, parts: int = 1
) -> jax.Array:
  """Returns an array with new rows, in place if XLA may reuse its memory.

  Args:
    x: The array `[num_rows, ...]`.
    indices: Distinct row numbers `[n]`, in `parts` blocks; each block is sorted
      but for padding, `num_rows`.
    rows: The new rows `[n, ...]`. Those of padding are dropped.
    parts: The number of blocks.
  """

  def put_block(x: jax.Array, indices: jax.Array, rows: jax.Array) -> jax.Array:
    return x.at[indices].set(
      rows.astype(x.dtype),
      mode="drop",
      # A block has padding before its rows too.
      indices_are_sorted=parts == 1,
      unique_indices=True,
    )

  if parts == 1:
    return put_block(x, indices, rows)
  new = jax.vmap(put_block)(
    _parts_of(x, parts), *_blocks(x, indices, parts, rows)
  )
  return new.reshape(x.shape)


def _parts_of(x: jax.Array, parts: int) -> jax.Array:
  return x.reshape(parts, -1, *x.shape[1:])


def _blocks(
  x: jax.Array, indices: jax.Array, parts: int, *rows: Any
) -> tuple[jax.Array, ...]:
  """Returns row numbers within each part, and rows, by block."""
  num_rows = x.shape[0]
  size = num_rows // parts
  part = jnp.arange(parts, dtype=indices.dtype)[:, None]
  blocks = _parts_of(indices, parts)
  local = jnp.where(blocks < num_rows, blocks - part * size, size)
  return local, *(_parts_of(r, parts) for r in rows)
