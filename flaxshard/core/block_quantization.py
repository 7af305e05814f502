"""Encodes rows of numbers as bytes: bfloat16, or integers with scales.

`"int8"` and `"int4"` divide a row into blocks of 256 numbers. The scale of a
block, float32, maps its largest absolute value to 127 or 7. A block with an
infinite or NaN value decodes to NaN. The bytes of a row are its numbers, two
in a byte for int4, and then its scales.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

FORMATS = ("bfloat16", "int8", "int4")

BLOCK = 256

_LARGEST = {"int8": 127, "int4": 7}
_INT4_OFFSET = 8  # int4 numbers are stored as 1 to 15


def encode(rows: jax.Array, fmt: str) -> jax.Array:
  """Returns rows as bytes.

  Args:
    rows: `[..., width]`, float32 or float64.
    fmt: One of `FORMATS`.

  Returns:
    `[..., num_bytes(width, fmt)]`, uint8.

  Example:
    >>> row = jnp.array([1.0, -0.3, 0.5])
    >>> decode(encode(row, "bfloat16"), 3, "bfloat16").tolist()
    [1.0, -0.30078125, 0.5]
  """
  rows = rows.astype(jnp.float32)
  if fmt == "bfloat16":
    return _to_bytes(rows.astype(jnp.bfloat16))
  width = rows.shape[-1]
  padding = [(0, 0)] * (rows.ndim - 1) + [(0, -width % BLOCK)]
  blocks = jnp.pad(rows, padding).reshape(*rows.shape[:-1], -1, BLOCK)
  scales = jnp.abs(blocks).max(-1) / _LARGEST[fmt]
  # A block of zeros, or of numbers so small that their scale is zero.
  divisors = jnp.where(scales == 0, 1, scales)[..., None]
  numbers = jnp.round(blocks / divisors).astype(jnp.int8)
  if fmt == "int4":
    pairs = (numbers + _INT4_OFFSET).astype(jnp.uint8)
    pairs = pairs.reshape(*pairs.shape[:-1], -1, 2)
    numbers = pairs[..., 0] | (pairs[..., 1] << 4)
  numbers = numbers.reshape(*rows.shape[:-1], -1)[..., : _stored(width, fmt)]
  return jnp.concatenate([_to_bytes(numbers), _to_bytes(scales)], -1)


def decode(data: jax.Array, width: int, fmt: str) -> jax.Array:
  """Returns the rows of `encode`: `[..., width]`, float32.

  Args:
    data: The bytes of the rows.
    width: The number of numbers of a row.
    fmt: The format that they were encoded with.
  """
  if fmt == "bfloat16":
    return _from_bytes(data, jnp.bfloat16).astype(jnp.float32)
  stored = _stored(width, fmt)
  numbers = data[..., :stored]
  if fmt == "int4":
    numbers = jnp.stack([numbers & 15, numbers >> 4], -1)
    numbers = numbers.astype(jnp.int8) - _INT4_OFFSET
    numbers = numbers.reshape(*data.shape[:-1], -1)[..., :width]
  else:
    numbers = _from_bytes(numbers, jnp.int8)
  scales = _from_bytes(data[..., stored:], jnp.float32)
  return numbers * jnp.repeat(scales, BLOCK, -1)[..., :width]


def num_bytes(width: int, fmt: str) -> int:
  """Returns the number of bytes of an encoded row.

  Args:
    width: The number of numbers of the row.
    fmt: The format.

  Example:
    >>> num_bytes(1024, "int8"), num_bytes(1024, "int4")
    (1040, 528)
  """
  if fmt == "bfloat16":
    return 2 * width
  return _stored(width, fmt) + 4 * -(-width // BLOCK)


def _stored(width: int, fmt: str) -> int:
  """Returns the number of bytes of the numbers of a row, without scales."""
  return width if fmt == "int8" else -(-width // 2)


def _to_bytes(x: jax.Array) -> jax.Array:
  """Returns `[..., n]` as bytes: `[..., n * itemsize]`."""
  data = jax.lax.bitcast_convert_type(x, jnp.uint8)
  return data if x.dtype.itemsize == 1 else data.reshape(*x.shape[:-1], -1)


def _from_bytes(data: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Undoes `_to_bytes`."""
  size = jnp.dtype(dtype).itemsize
  if size > 1:
    data = data.reshape(*data.shape[:-1], -1, size)
  return jax.lax.bitcast_convert_type(data, dtype)
