"""Events that one process sends and all processes of a program receive.

An event is a numbered key of the key-value store of JAX's coordination service,
which process 0 runs. Each process reads the events in the order of the numbers.
Other keys hold facts about each process, by its index.
"""

from __future__ import annotations

from collections.abc import Iterable
import json
import os
import socket
from typing import Any

import jax

from flaxshard.core import multihost

_PREFIX = "flaxshard/failures"

# Milliseconds in which the service returns a key that exists.
_READ_MS = 1000


class Closed(Exception):
  """This process has left the coordination service."""


class Unavailable(Exception):
  """Process 0, which runs the coordination service, does not answer."""


class Events:
  """The events and facts of the processes of a program."""

  def __init__(self) -> None:
    self.index = multihost.process_index()
    self.count = multihost.process_count()
    self.name = f"process {self.index} ({_here()})"
    self._client = multihost.coordination_client()

  def send(
    self, event: dict[str, Any], number: int
  ) -> tuple[int, dict[str, Any]]:
    """Sends an event, unless another process has sent a similar one.

    Args:
      event: The event, with its `kind`.
      number: The first number that the event may have.

    Returns:
      The number of the event, and the event: that of another process if it is
      of the same kind or a failure.

    Raises:
      Closed, Unavailable: See the classes.
    """
    event = {**event, "process": self.index}
    while not self.set(f"event/{number}", json.dumps(event)):
      other = self.receive(number, _READ_MS)
      if other is not None:
        same_kind = other["kind"] in (event["kind"], "failure")
        if same_kind and other["process"] != self.index:
          return number, other
        number += 1
    return number, event

  def receive(self, number: int, timeout_ms: int) -> dict[str, Any] | None:
    """Returns an event, or None if it is not sent within the timeout.

    Args:
      number: The number of the event.
      timeout_ms: Milliseconds to wait.

    Raises:
      Closed, Unavailable: See the classes.
    """
    text = self.get(f"event/{number}", timeout_ms)
    return None if text is None else dict(json.loads(text))

  def get(self, key: str, timeout_ms: int) -> str | None:
    """Returns a value, or None if it is not set within the timeout.

    Args:
      key: The key.
      timeout_ms: Milliseconds to wait.

    Raises:
      Closed, Unavailable: See the classes.
    """
    try:
      value = self._client.blocking_key_value_get(
        f"{_PREFIX}/{key}", timeout_ms
      )
    except jax.errors.JaxRuntimeError as e:
      # The error has no code apart from its message.
      if str(e).startswith("DEADLINE_EXCEEDED"):
        return None
      raise _service_error(e) from e
    return str(value)

  def set(self, key: str, value: str = "", *, overwrite: bool = False) -> bool:
    """Sets a value; returns False if the key has one already.

    Args:
      key: The key.
      value: The value.
      overwrite: Whether to replace a value.

    Raises:
      Closed, Unavailable: See the classes.
    """
    try:
      self._client.key_value_set(
        f"{_PREFIX}/{key}", value, allow_overwrite=overwrite
      )
    except jax.errors.JaxRuntimeError as e:
      if str(e).startswith("ALREADY_EXISTS"):
        return False
      raise _service_error(e) from e
    return True

  def add(self, key: str, value: str = "") -> None:
    """Sets this process's value of a key.

    Args:
      key: The key; the index of this process is appended.
      value: The value.
    """
    self.set(f"{key}/{self.index}", value, overwrite=True)

  def values(self, key: str) -> dict[int, str]:
    """Returns the values that processes have added to a key, by process.

    Args:
      key: The key.
    """
    try:
      found = self._client.key_value_dir_get(f"{_PREFIX}/{key}/")
    except jax.errors.JaxRuntimeError as e:
      if str(e).startswith("NOT_FOUND"):
        return {}
      raise _service_error(e) from e
    return {int(name.rpartition("/")[2]): value for name, value in found}

  def missing(self, key: str) -> list[int]:
    """Returns the processes that have not added their value of a key.

    Args:
      key: The key.
    """
    return sorted(set(range(self.count)) - set(self.values(key)))

  def wait_for_all(self, key: str, timeout_ms: int) -> bool:
    """Waits until all processes wait for the same key.

    Args:
      key: The key.
      timeout_ms: Milliseconds to wait.

    Returns:
      Whether all processes have come within the timeout.
    """
    try:
      self._client.wait_at_barrier(f"{_PREFIX}/{key}", timeout_ms)
    except jax.errors.JaxRuntimeError:
      return False
    return True

  def announce(self) -> None:
    """Publishes the name of this process."""
    self.add("process", self.name)

  def names(self, processes: Iterable[int]) -> str:
    """Returns the names of processes, with host and pid.

    Args:
      processes: The indices of the processes.
    """
    names = self.values("process")
    return ", ".join(names.get(p, f"process {p}") for p in processes)


def _here() -> str:
  return f"host {socket.gethostname()}, pid {os.getpid()}"


def _service_error(error: jax.errors.JaxRuntimeError) -> Exception:
  closed = str(error).startswith("CANCELLED")
  # After jax.distributed.shutdown() in this process.
  if closed or not jax.distributed.is_initialized():
    return Closed(str(error))
  return Unavailable(str(error))
