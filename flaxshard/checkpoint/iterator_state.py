"""Saves and restores the position of a data iterator with a checkpoint."""

from __future__ import annotations

import json
from typing import Any, Protocol

from flaxshard.checkpoint import digests

ITEM = "input_iterator"


class Positioned(Protocol):
  """An iterator with a position: Grain's, or a `DistributedIterator`.

  A position is bytes or a value for JSON. If the iterator has a method
  `start_prefetch`, it is called after `set_state` to begin reading ahead.
  """

  def get_state(self) -> Any:
    """Returns the position."""
    ...

  def set_state(self, state: Any) -> None:
    """Continues from a position."""
    ...


class Position:
  """The position of an iterator, as Grain's checkpoint handler takes it.

  Grain's handler calls `get_state` to save, and `set_state` to restore. The
  file holds the same text as for an iterator of Grain.

  Args:
    data: The iterator. Its position is read at once: an error in the middle of
      a save would make Orbax hang when the process exits.

  Raises:
    TypeError: `data` has no `get_state` or no `set_state`, or its position is
      neither bytes nor a value for JSON.
  """

  def __init__(self, data: Positioned):
    for method in ("get_state", "set_state"):
      if not callable(getattr(data, method, None)):
        raise TypeError(
          f"data must be an iterator with a position, got {data!r}, which has "
          f"no {method}. The iterators of Grain's datasets have it."
        )
    self._data = data
    state = data.get_state()
    self._is_bytes = isinstance(state, bytes)
    try:
      self._text = state if self._is_bytes else _to_json(state)
    except (TypeError, ValueError) as e:
      raise TypeError(
        f"data.get_state() must return bytes or a value for JSON: {e}."
      ) from e

  def get_state(self) -> bytes:
    """Returns the text to save."""
    return self._text

  def set_state(self, text: bytes) -> None:
    """Keeps a text that was read; `apply` sets the iterator to it.

    Raises:
      Damaged: The text is not JSON, and the position of this iterator is.
    """
    try:
      self._read = text if self._is_bytes else json.loads(text)
    except ValueError as e:
      raise digests.Damaged(
        f"the saved position of the data is not JSON: {e}."
      ) from e

  def start_prefetch(self) -> None:
    """Does nothing: `apply` starts reading ahead."""

  def apply(self) -> None:
    """Sets the iterator to the position that was read."""
    self._data.set_state(self._read)
    start_prefetch = getattr(self._data, "start_prefetch", None)
    if start_prefetch is not None:
      start_prefetch()


def _to_json(state: Any) -> bytes:
  return json.dumps(state, indent=4).encode()
