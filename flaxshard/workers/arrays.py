"""Arrays by name in a message: their shapes in its fields, then their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flaxshard.workers.encoding import Buffer

Header = list[list[Any]]


def pack(arrays: Mapping[str, Any]) -> tuple[Header, bytes]:
  """Returns the names, dtypes and shapes of arrays, and their bytes.

  Args:
    arrays: Arrays by name.

  Example:
    >>> header, data = pack({"w": np.ones(2, np.float32)})
    >>> header, len(data)
    ([['w', 'float32', [2]]], 8)
  """
  host = {name: np.asarray(x) for name, x in arrays.items()}
  header = [[name, str(x.dtype), list(x.shape)] for name, x in host.items()]
  # As bytes, because NumPy's own views know no bfloat16.
  return header, b"".join(x.tobytes() for x in host.values())


def unpack(header: Header, data: Buffer) -> dict[str, np.ndarray]:
  """Undoes `pack`.

  Args:
    header: The names, dtypes and shapes.
    data: The bytes; those that are left over are ignored.

  Raises:
    ValueError: There are too few bytes.
  """
  arrays, start = {}, 0
  for name, dtype, shape in header:
    found = np.dtype(jnp.dtype(dtype))
    size = int(np.prod(shape, dtype=np.int64))
    arrays[name] = np.frombuffer(data, found, size, start).reshape(shape)
    start += size * found.itemsize
  return arrays
