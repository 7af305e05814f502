"""Messages between workers: fields and bytes, which nothing unpickles."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Message:
  """A message from one worker to another.

  Attributes:
    fields: Values that msgpack can hold: None, booleans, integers of 64 bits,
      floats, strings, bytes, and lists and dicts with string keys of these.
      Tuples arrive as lists.
    data: Any number of bytes, such as those of an array. They arrive as bytes
      or a bytearray: read them with `np.frombuffer`.
  """

  fields: dict[str, Any] = dataclasses.field(default_factory=dict)
  data: bytes | bytearray | memoryview = b""
