"""Trees of arrays as bytes, and arrays in fewer bits.

`"int8"` and `"int4"` divide an array into blocks of 256 numbers. The scale of a
block, float32, maps its largest absolute value to 127 or 7. NumPy decodes an
array to the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping
import json
import math
from typing import Any
import zlib

import jax.numpy as jnp
import ml_dtypes
import numpy as np

# The key of an array in a header.
_ARRAY = "@array"

_BLOCK = 256
_LARGEST = {"int8": 127, "int4": 7}


class DamagedError(ValueError):
  """An object is not what was written."""


def pack(tree: Any) -> bytes:
  """Returns a tree of dicts with NumPy arrays and values of JSON as bytes.

  The bytes are a checksum, the length of a header, the header in JSON, in which
  arrays are a dtype, a shape and a place, and the arrays one after another. A
  general serializer would copy them twice, for as long as a disk takes.
  """
  buffers: list[Any] = []

  def describe(x: Any) -> Any:
    """Returns what JSON has in the place of an array."""
    x = np.asarray(x, order="C")
    buffers.append(x.reshape(-1).view(np.uint8))
    return {_ARRAY: [x.dtype.name, list(x.shape)]}

  header = json.dumps(tree, default=describe).encode()
  body = [len(header).to_bytes(8, "little"), header, *buffers]
  checksum = 0
  for part in body:
    checksum = zlib.crc32(part, checksum)
  return b"".join([checksum.to_bytes(4, "little"), *body])


def unpack(key: str, content: bytes) -> Any:
  """Undoes `pack`; the arrays are read-only views of the bytes.

  Args:
    key: The key of the object, for the error.
    content: Its content.

  Raises:
    DamagedError: The checksum is another one.
  """
  view = memoryview(content)
  if zlib.crc32(view[4:]).to_bytes(4, "little") != view[:4]:
    raise DamagedError(f"{key} is damaged: its checksum is wrong.")
  place = 12 + int.from_bytes(view[4:12], "little")

  def restore(x: dict[str, Any]) -> Any:
    """Reads an array, if it is one; called in the order of the header."""
    nonlocal place
    if _ARRAY not in x:
      return x
    name, shape = x[_ARRAY]
    # jnp knows bfloat16 and float8.
    dtype, count = jnp.dtype(name), math.prod(shape)
    found = np.frombuffer(view, dtype, count, place).reshape(shape)
    place += count * dtype.itemsize
    return found

  try:
    return json.loads(bytes(view[12:place]), object_hook=restore)
  except ValueError as e:
    raise DamagedError(f"{key} is damaged: {e!r}") from e


def encode(x: np.ndarray, dtype: str | None) -> Any:
  """Returns an array in a dtype of `Store.commit_dtype`.

  Scalars, integers and complex numbers stay as they are.

  Example:
    >>> decode(encode(np.array([1.0, -0.3, 0.5], np.float32), "bfloat16"))
    array([ 1.        , -0.30078125,  0.5       ], dtype=float32)
  """
  if dtype is None or not x.size or not x.ndim or x.dtype.kind not in "fV":
    return x
  if dtype == "bfloat16":
    return x.astype(ml_dtypes.bfloat16)
  flat = x.astype(np.float32).ravel()
  blocks = np.pad(flat, (0, -flat.size % _BLOCK)).reshape(-1, _BLOCK)
  scales = np.abs(blocks).max(1) / np.float32(_LARGEST[dtype])
  # A block of zeros, or of numbers so small that their scale is zero.
  divisors = np.where(scales == 0, np.float32(1), scales)[:, None]
  numbers = np.rint(blocks / divisors).astype(np.int8)
  if dtype == "int4":
    pairs = (numbers + 8).astype(np.uint8).reshape(-1, 2)
    numbers = pairs[:, 0] | (pairs[:, 1] << 4)
  numbers = numbers.ravel()
  stored = flat.size if dtype == "int8" else -(-flat.size // 2)
  return {"numbers": numbers[:stored], "scales": scales, "shape": list(x.shape)}


def decode(encoded: Any) -> np.ndarray:
  """Returns the array of `encode`; what was encoded is float32."""
  if not isinstance(encoded, dict):
    x = np.asarray(encoded)
    return x.astype(np.float32) if x.dtype == ml_dtypes.bfloat16 else x
  numbers, shape = encoded["numbers"], tuple(encoded["shape"])
  size = int(np.prod(shape))
  if numbers.dtype == np.uint8:
    pairs = np.stack([numbers & 15, numbers >> 4], -1)
    numbers = pairs.astype(np.int8).ravel()[:size] - np.int8(8)
  scales = np.repeat(encoded["scales"], _BLOCK)[:size]
  return (numbers.astype(np.float32) * scales).reshape(shape)


def add_change(arrays: Mapping[str, Any], change: Mapping[str, Any]) -> Any:
  """Returns changed arrays, to the same bits on every machine.

  Args:
    arrays: The arrays before, of JAX or NumPy, by path.
    change: By path, the encoded difference of a parameter, and the new value of
      another array.
  """
  return {
    path: (np.asarray(arrays[path]) + decode(x)).astype(arrays[path].dtype)
    if path.split("/")[0] == "params"
    else x
    for path, x in change.items()
  }
