"""TensorFlow's `TopologyProto` as bytes, without TensorFlow.

The wire format of protocol buffers: an integer has 7 bits a byte, lowest first;
a field is its number and its type, then an integer or a length and content.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

_MESH_SHAPE, _NUM_TASKS, _NUM_TPUS_PER_TASK, _COORDINATES = 1, 2, 3, 4
_REPEATED = (_MESH_SHAPE, _COORDINATES)

# Ours: TensorFlow skips what it does not know.
_NUM_SLICES = 100


def encode(
  mesh_shape: Iterable[int], coordinates: np.ndarray, num_slices: int
) -> bytes:
  """Returns the message; see `decode`."""
  fields = {
    _MESH_SHAPE: mesh_shape,
    _NUM_TASKS: coordinates.shape[:1],
    _NUM_TPUS_PER_TASK: coordinates.shape[1:2],
    _COORDINATES: coordinates.ravel().tolist(),
    _NUM_SLICES: [num_slices] if num_slices > 1 else [],
  }
  message = b""
  for number, values in fields.items():
    content = b"".join(map(_varint, values))
    if number in _REPEATED:
      message += _varint(number * 8 + 2) + _varint(len(content)) + content
    elif content:
      message += _varint(number * 8) + content
  return message


def decode(message: bytes) -> tuple[list[int], np.ndarray, int]:
  """Returns what a message says, unchecked.

  Returns:
    The shape of the mesh, coordinates [tasks, devices per task, n], and the
    number of slices.

  Raises:
    ValueError: The bytes are no message, or their numbers do not match.
    TypeError: They are not bytes.
  """
  if not isinstance(message, bytes):
    raise TypeError(f"Topology: serialized must be bytes, got {message!r}.")
  try:
    fields = _parse(message)
    tasks, tpus = fields[_NUM_TASKS][-1], fields[_NUM_TPUS_PER_TASK][-1]
    shape = tasks, tpus, len(fields[_COORDINATES]) // (tasks * tpus)
    coordinates = np.reshape(fields[_COORDINATES], shape)
  except (ArithmeticError, IndexError, ValueError) as e:
    raise ValueError(
      "Topology: serialized must be a whole TopologyProto, got "
      f"{len(message)} bytes: {e}."
    ) from e
  return fields[_MESH_SHAPE], coordinates, [1, *fields[_NUM_SLICES]][-1]


def _varint(value: int) -> bytes:
  written = bytearray()
  while value > 127:
    written.append(value & 127 | 128)
    value >>= 7
  return bytes([*written, value])


def _int32(value: int) -> int:
  return (value + 2**31) % 2**32 - 2**31


def _parse(data: bytes) -> dict[int, list[int]]:
  """Returns the integers of a message by field; nested messages are skipped."""
  fields: dict[int, list[int]] = collections.defaultdict(list)
  at = 0

  def varint() -> int:
    nonlocal at
    value = shift = 0
    while True:
      at += 1
      value |= (data[at - 1] & 127) << shift
      shift += 7
      if data[at - 1] < 128:
        return value

  while at < len(data):
    number, kind = divmod(varint(), 8)
    if kind == 0:
      fields[number].append(_int32(varint()))
    elif kind == 2:  # a length, then that many bytes
      end = varint() + at
      while number in _REPEATED and at < end:
        fields[number].append(_int32(varint()))
      at = end
    else:
      raise ValueError(f"field {number} has the unexpected wire type {kind}")
  if at != len(data):
    raise ValueError("it ends early")
  return fields
