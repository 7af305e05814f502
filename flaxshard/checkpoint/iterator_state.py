"""Where the data of a training stands, as a checkpoint has it."""

from __future__ import annotations

import json
from typing import Any, Protocol


class Positioned(Protocol):
  """An iterator that knows where it stands: Grain's, a `DistributedIterator`.

  States are bytes, or what JSON can hold. Where it has a `start_prefetch`, that
  is called after `set_state`: it begins to read ahead.
  """

  def get_state(self) -> Any:
    """Returns where it stands."""
    ...

  def set_state(self, state: Any) -> None:
    """Goes on from a state."""
    ...


class Position:
  """A position as the text that Grain's handler writes for its own iterators.

  It is taken when this is made: an error in the middle of a save would leave
  Orbax hanging when the process exits.
  """

  def __init__(self, data: Positioned):
    for method in ("get_state", "set_state"):
      if not callable(getattr(data, method, None)):
        raise TypeError(
          f"data must be an iterator that can tell where it stands, got "
          f"{data!r}, which has no {method}: a Grain dataset's iterator has."
        )
    self._data = data
    state = data.get_state()
    self._is_text = isinstance(state, bytes)
    try:
      self._text = state if self._is_text else _json(state)
    except (TypeError, ValueError) as e:
      raise TypeError(
        f"data.get_state() must be bytes, or what JSON can hold: {e}."
      ) from e

  def get_state(self) -> bytes:
    """Returns where the data stood."""
    return self._text

  def set_state(self, text: bytes) -> None:
    """Keeps what was read; nothing is set yet."""
    self._read = text if self._is_text else json.loads(text)

  def start_prefetch(self) -> None:
    """Does nothing: what is read goes to the data once all is read."""

  def go(self) -> None:
    """Sets the data to what was read."""
    self._data.set_state(self._read)
    if hasattr(self._data, "start_prefetch"):
      self._data.start_prefetch()


def _json(state: Any) -> bytes:
  return json.dumps(state, indent=4).encode()
