"""Notices the end of the connection to the coordination service at once."""

from __future__ import annotations

import os
import select
import socket
import stat
import time
from typing import Any

# Process 0 may close its connections before the port that it listens at.
_CONNECT_ATTEMPTS = 20
_CONNECT_PAUSE = 0.002


class HangUp:
  """The end of this process's connections to the coordination service.

  When process 0 dies, JAX aborts the other processes within about 50 ms, and
  its calls fail too late to say why. The operating system reports the end of
  the connection before that. Only Linux lists the connections of a process;
  on other systems `wait` returns False.

  Args:
    address: `"host:port"` of the coordination service.
  """

  def __init__(self, address: str):
    self._connections = _connections(int(address.rpartition(":")[2]))
    self._waker, self._wakes = socket.socketpair()

  def wait(self) -> bool:
    """Waits until nobody listens at the other end any more.

    Returns:
      Whether the service has ended. False if `close` was called.
    """
    if not hasattr(select, "POLLRDHUP"):
      return False
    connections = {c.fileno(): (c, peer) for c, peer in self._connections}
    while connections:
      poll = select.poll()
      poll.register(self._wakes, select.POLLIN)
      for fileno in connections:
        poll.register(fileno, select.POLLRDHUP)
      for fileno, _ in poll.poll():
        if fileno == self._wakes.fileno():
          return False
        # gRPC may have closed this connection by itself.
        connection, peer = connections.pop(fileno)
        if _refuses(connection.family, peer):
          return True
    return False

  def close(self) -> None:
    """Makes `wait` return."""
    self._waker.send(b".")


def _connections(port: int) -> list[tuple[socket.socket, Any]]:
  """Returns this process's connections to a remote port, and their peers."""
  found = []
  try:
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
  except OSError:
    return []
  for number in numbers:
    try:
      if stat.S_ISSOCK(os.fstat(number).st_mode):
        connection = socket.socket(fileno=os.dup(number))
        peer = connection.getpeername()
        if peer[1] == port:
          found.append((connection, peer))
    except (OSError, IndexError):
      # Closed meanwhile, not connected, or a socket without ports.
      continue
  return found


def _refuses(family: int, peer: Any) -> bool:
  """Returns whether nobody listens at an address."""
  for _ in range(_CONNECT_ATTEMPTS):
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.settimeout(1.0)
      try:
        probe.connect(peer)
      except ConnectionRefusedError:
        return True
      except OSError:
        return False
    time.sleep(_CONNECT_PAUSE)
  return False
