"""Encodes vectors of a commit as bytes, in fewer bits if asked for."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from flaxshard.core import block_quantization

Buffer = bytes | bytearray | memoryview


def encode(
  vector: np.ndarray, fmt: str | None
) -> tuple[memoryview, np.ndarray]:
  """Returns a vector as bytes, and the vector that they decode to.

  Args:
    vector: `[n]`, float32.
    fmt: A format of `block_quantization`; None: float32.

  Example:
    >>> data, decoded = encode(np.array([1.0, -0.3], np.float32), "bfloat16")
    >>> len(data), decoded.tolist()
    (4, [1.0, -0.30078125])
  """
  if fmt is None or not vector.size:
    return np.ascontiguousarray(vector).data.cast("B"), vector
  with on_host():
    data, decoded = map(np.asarray, _encode(vector, fmt))
  return data.data, decoded


def decode(data: Buffer, size: int, fmt: str | None) -> np.ndarray:
  """Returns the vector of `encode`: `[size]`, float32.

  Args:
    data: Its bytes.
    size: The number of its numbers.
    fmt: The format.
  """
  if fmt is None or not size:
    return np.frombuffer(data, np.float32)
  with on_host():
    return np.asarray(_decode(np.frombuffer(data, np.uint8), size, fmt))


def num_bytes(size: int, fmt: str | None) -> int:
  """Returns the number of bytes of an encoded vector.

  Args:
    size: The number of its numbers.
    fmt: The format.
  """
  if fmt is None or not size:
    return 4 * size
  return block_quantization.num_bytes(size, fmt)


# The same code as in compiled commits, so that the bits are the same.
@functools.partial(jax.jit, static_argnums=1)
def _encode(vector: Any, fmt: str) -> tuple[jax.Array, jax.Array]:
  data = block_quantization.encode(vector, fmt)
  return data, block_quantization.decode(data, vector.shape[-1], fmt)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decode(data: Any, size: int, fmt: str) -> jax.Array:
  return block_quantization.decode(data, size, fmt)


@functools.cache
def _host_device() -> jax.Device | None:
  try:
    return jax.local_devices(backend="cpu")[0]
  except RuntimeError:
    return None  # JAX_PLATFORMS excludes the CPU


def on_host() -> Any:
  """Runs programs on the CPU, where the bytes are."""
  return jax.default_device(_host_device())
