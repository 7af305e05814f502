"""The commit of one cell of the center as a message."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from flaxshard.workers import arrays as arrays_lib
from flaxshard.workers import encoding
from flaxshard.workers.messages import Message
from flaxshard.workers.parts import finite_difference

Arrays = Mapping[str, np.ndarray]


def encode(
  commit: Arrays, quantized: Collection[str], fmt: str | None
) -> tuple[Message, dict[str, np.ndarray]]:
  """Returns a commit as a message, and what encoding has cut off, by key.

  Args:
    commit: Arrays by key.
    quantized: Keys of float32 arrays that are sent in fewer bits.
    fmt: The format of these; None: as they are.
  """
  flat = {k: np.asarray(x) for k, x in commit.items() if k in quantized}
  header, raw = arrays_lib.pack(
    {k: x for k, x in commit.items() if k not in flat}
  )
  vector = np.concatenate(
    [np.zeros(0, np.float32), *(x.ravel() for x in flat.values())]
  )
  data, decoded = encoding.encode(vector, fmt)
  shapes = [[key, list(x.shape)] for key, x in flat.items()]
  message = Message(
    {"quantized": shapes, "plain": header}, b"".join((data, raw))
  )
  if not flat:
    return message, {}
  return message, _split(finite_difference(vector, decoded), shapes)


def decode(message: Message, fmt: str | None) -> dict[str, np.ndarray]:
  """Returns the arrays of a commit by key.

  Args:
    message: The message of `encode`.
    fmt: The format.
  """
  shapes, data = message.fields["quantized"], memoryview(message.data)
  size = sum(int(np.prod(shape)) for _, shape in shapes)
  end = encoding.num_bytes(size, fmt)
  vector = encoding.decode(data[:end], size, fmt)
  return _split(vector, shapes) | arrays_lib.unpack(
    message.fields["plain"], data[end:]
  )


def _split(vector: np.ndarray, shapes: list[Any]) -> dict[str, np.ndarray]:
  """Returns the arrays that follow each other in a vector."""
  arrays, start = {}, 0
  for key, shape in shapes:
    size = int(np.prod(shape))
    arrays[key] = vector[start : start + size].reshape(shape)
    start += size
  return arrays
