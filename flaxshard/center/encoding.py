"""Arrays in fewer bits: bfloat16, or integers with scales.

`"int8"` and `"int4"` divide an array into blocks of 256 numbers. The scale of a
block, float32, maps its largest absolute value to 127 or 7. NumPy decodes an
array to the same bits on every machine.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_BLOCK = 256
_LARGEST = {"int8": 127, "int4": 7}


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
