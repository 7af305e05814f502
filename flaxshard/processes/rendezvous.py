"""Lets the processes of a program meet before JAX connects them.

JAX's client ends its process with SIGABRT if a process is missing after the
timeout. This meeting, at the same address and over before JAX begins, raises an
error in every process instead, which names the missing ones, two processes with
the same index, or a port that is in use.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

from flaxshard.processes import cluster as cluster_lib

# The first word of each message. The port may be open to the network.
_MAGIC = "flaxshard-1"
_MAX_BYTES = 4096
# Seconds for one message of a peer that has connected.
_MESSAGE_TIMEOUT = 5.0
# Seconds for process 0 to start JAX's service after the meeting.
_SERVICE_TIMEOUT = 30.0


def meet(
  cluster: cluster_lib.Cluster, timeout: float, bind_address: str | None = None
) -> None:
  """Returns once all processes have called it.

  Args:
    cluster: The processes, with a coordinator's address.
    timeout: Seconds to wait for the others.
    bind_address: The address on which process 0 listens; by default all
      addresses of the machine, on the coordinator's port.

  Raises:
    ValueError: The coordinator's port cannot be opened, two processes have the
      same index, or they differ in the number of processes.
    TimeoutError: Not all processes came, or the coordinator was not reached.
  """
  deadline = time.monotonic() + timeout
  if cluster.process_id == 0:
    with _listen(cluster, bind_address) as server:
      peers = _gather(server, cluster, deadline, timeout)
    # The port is closed before the others go on to connect to JAX's service.
    for peer in peers.values():
      _send(peer, {})
      peer.close()
  else:
    _join(cluster, deadline, timeout)
    # Until JAX's service listens.
    deadline = max(deadline, time.monotonic() + _SERVICE_TIMEOUT)
    _connect(cluster, deadline, timeout).close()


def _listen(
  cluster: cluster_lib.Cluster, bind_address: str | None
) -> socket.socket:
  address = str(cluster.coordinator_address)
  host, port = cluster_lib.split_address("coordinator_address", address)
  if bind_address is not None:
    host, port = cluster_lib.split_address("bind_address", bind_address)
  else:
    host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
  try:
    if host == "::":
      return socket.create_server(
        ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
      )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)
  except OSError as e:
    raise ValueError(
      f"process 0 cannot open port {port} of coordinator_address={address!r}: "
      f"{e.strerror or e}. Another program, or an earlier run, may be using "
      "it; choose another port."
    ) from e


def _gather(
  server: socket.socket,
  cluster: cluster_lib.Cluster,
  deadline: float,
  timeout: float,
) -> dict[int, socket.socket]:
  """Returns the connection of each process, by its index."""
  peers: dict[int, socket.socket] = {}
  try:
    while True:
      if len(peers) == cluster.num_processes - 1:
        # A process may have given up, or have ended, since it came.
        peers = {i: peer for i, peer in peers.items() if not _is_closed(peer)}
      if len(peers) == cluster.num_processes - 1:
        return peers
      server.settimeout(max(deadline - time.monotonic(), 0.01))
      peer, _ = server.accept()
      hello = _receive(peer, _MESSAGE_TIMEOUT)
      index = hello.get("process_id") if hello else None
      if hello is None or not isinstance(index, int):
        peer.close()  # not one of our processes
        continue
      count = hello.get("num_processes")
      if count != cluster.num_processes:
        raise ValueError(
          f"process {index} has num_processes={count}, process 0 has "
          f"num_processes={cluster.num_processes}."
        )
      if index == 0 or (index in peers and not _is_closed(peers[index])):
        raise ValueError(
          f"two processes have process_id={index} at coordinator_address="
          f"{cluster.coordinator_address!r}."
        )
      peers[index] = peer
  except TimeoutError:
    missing = sorted({*range(1, cluster.num_processes)} - {*peers})
    shown = ", ".join(map(str, missing[:20]))
    error = TimeoutError(
      f"{len(missing)} of {cluster.num_processes} processes have not connected "
      f"to coordinator_address={cluster.coordinator_address!r} within "
      f"{timeout:g} s: {shown}{', ...' if missing[20:] else ''}. Process 0 "
      "must run on that host, and the others must be able to reach the port."
    )
    _reject(peers, error)
    raise error from None
  except ValueError as e:
    _reject(peers, e)
    _send(peer, {"error": str(e)})
    raise


def _reject(peers: dict[int, socket.socket], error: Exception) -> None:
  kind = "timeout" if isinstance(error, TimeoutError) else "error"
  for peer in peers.values():
    _send(peer, {kind: str(error)})
    peer.close()


def _join(
  cluster: cluster_lib.Cluster, deadline: float, timeout: float
) -> None:
  """Reports this process to process 0 and waits until all have done so."""
  while True:
    peer = _connect(cluster, deadline, timeout)
    with peer:
      _send(
        peer,
        {
          "process_id": cluster.process_id,
          "num_processes": cluster.num_processes,
        },
      )
      # Process 0 gives up first, and says which processes are missing.
      reply = _receive(peer, deadline - time.monotonic() + _MESSAGE_TIMEOUT)
    if reply is not None:
      if "timeout" in reply:
        raise TimeoutError(reply["timeout"])
      if "error" in reply:
        raise ValueError(reply["error"])
      return
    if time.monotonic() > deadline:
      raise TimeoutError(
        f"process {cluster.process_id} has waited {timeout:g} s at "
        f"coordinator_address={cluster.coordinator_address!r} for the other "
        "processes; process 0 was reached and still waits."
      )
    # Process 0 has ended; it may be started again.
    time.sleep(0.2)


def _connect(
  cluster: cluster_lib.Cluster, deadline: float, timeout: float
) -> socket.socket:
  """Connects to process 0, which may start later than this process."""
  address = cluster_lib.split_address(
    "coordinator_address", cluster.coordinator_address
  )
  reason = "process 0 closed the connection"
  while (left := deadline - time.monotonic()) > 0:
    try:
      return socket.create_connection(address, timeout=min(left, 10))
    except OSError as e:
      reason = e.strerror or str(e)
    time.sleep(min(0.1, max(left, 0)))
  raise TimeoutError(
    f"process {cluster.process_id} has not reached process 0 at "
    f"coordinator_address={cluster.coordinator_address!r} within {timeout:g} "
    f"s: {reason}."
  )


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
  # A peer that has ended does not read it.
  with contextlib.suppress(OSError):
    peer.sendall(f"{_MAGIC} {json.dumps(message)}\n".encode())


def _receive(peer: socket.socket, timeout: float) -> dict[str, Any] | None:
  """Returns the message of a peer; None if it is not ours, or has ended."""
  peer.settimeout(max(timeout, 0.01))
  received = b""
  try:
    while not received.endswith(b"\n") and len(received) < _MAX_BYTES:
      part = peer.recv(_MAX_BYTES)
      if not part:
        return None
      received += part
    magic, _, text = received.decode().partition(" ")
    message = json.loads(text) if magic == _MAGIC else None
  except (OSError, ValueError):
    return None
  return message if isinstance(message, dict) else None


def _is_closed(peer: socket.socket) -> bool:
  peer.settimeout(0.0)
  try:
    return not peer.recv(1, socket.MSG_PEEK)
  except BlockingIOError:
    return False
  except OSError:
    return True
