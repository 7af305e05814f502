"""Lets the processes of a program meet before JAX connects them.

JAX's client ends its process with SIGABRT, and names nobody, if a process is
missing after the timeout. This meeting, at the same address and over before JAX
begins, raises an error in every process instead, which names the missing ones,
two processes with the same index, or a port that is in use.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import json
import selectors
import socket
import time
from typing import Any

from flaxshard.processes import cluster as cluster_lib

# The first word of each message: the port may be open to the network.
_MAGIC = "flaxshard-1"
_MAX_BYTES = 4096
# Seconds that the others wait longer than process 0, whose error names the
# missing processes.
_REPLY_MARGIN = 5.0
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
  if cluster.process_id == 0:
    _receive_all(_listen(cluster, bind_address), cluster, timeout)
  else:
    _report(cluster, timeout)
    # Until JAX's service listens.
    _connect(cluster, _SERVICE_TIMEOUT).close()


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
    return socket.create_server(
      (host, port),
      family=socket.AF_INET6 if ":" in host else socket.AF_INET,
      dualstack_ipv6=host == "::" and socket.has_dualstack_ipv6(),
      backlog=1024,
    )
  except OSError as e:
    raise ValueError(
      f"process 0 cannot open port {port} of coordinator_address={address!r}: "
      f"{e.strerror or e}. Another program, or an earlier run, may be using "
      "it; choose another port."
    ) from e


def _receive_all(
  server: socket.socket, cluster: cluster_lib.Cluster, timeout: float
) -> None:
  """Waits for the reports of all other processes, and replies to them."""
  reply: Mapping[str, Any] = {}
  with selectors.DefaultSelector() as selector:
    server.setblocking(False)
    selector.register(server, selectors.EVENT_READ)
    try:
      _wait_for_reports(selector, server, cluster, timeout)
      reply = {"complete": True}
    except (ValueError, TimeoutError) as e:
      reply = {type(e).__name__: str(e)}
      raise
    finally:
      # Before the others go on to connect to JAX's service at this port.
      selector.unregister(server)
      server.close()
      for key in list(selector.get_map().values()):
        assert isinstance(key.fileobj, socket.socket)
        _send(key.fileobj, reply)
        key.fileobj.close()


def _wait_for_reports(
  selector: selectors.BaseSelector,
  server: socket.socket,
  cluster: cluster_lib.Cluster,
  timeout: float,
) -> None:
  deadline = time.monotonic() + timeout
  peers: dict[int, socket.socket] = {}
  while len(peers) < cluster.num_processes - 1:
    left = deadline - time.monotonic()
    if left <= 0:
      raise TimeoutError(_describe_missing(cluster, peers, timeout))
    for key, _ in selector.select(left):
      if key.fileobj is server:
        # It may have gone again.
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
          selector.register(server.accept()[0], selectors.EVENT_READ)
        continue
      peer = key.fileobj
      assert isinstance(peer, socket.socket)
      report = _receive(peer)
      if report is None:
        # Not one of our processes, or one that has ended since it reported.
        selector.unregister(peer)
        peer.close()
        peers = {i: other for i, other in peers.items() if other is not peer}
        continue
      index, count = report["process_id"], report["num_processes"]
      if count != cluster.num_processes:
        raise ValueError(
          f"process {index} has num_processes={count}, process 0 has "
          f"num_processes={cluster.num_processes}."
        )
      if index == 0 or index in peers:
        raise ValueError(
          f"two processes have process_id={index} at coordinator_address="
          f"{cluster.coordinator_address!r}."
        )
      peers[index] = peer


def _describe_missing(
  cluster: cluster_lib.Cluster, peers: Mapping[int, Any], timeout: float
) -> str:
  missing = [i for i in range(1, cluster.num_processes) if i not in peers]
  shown = ", ".join(map(str, missing[:20])) + ", ..." * (len(missing) > 20)
  return (
    f"{len(missing)} of {cluster.num_processes} processes have not connected "
    f"to coordinator_address={cluster.coordinator_address!r} within "
    f"{timeout:g} s: {shown}. Process 0 must run on that host, and the others "
    "must be able to reach the port."
  )


def _report(cluster: cluster_lib.Cluster, timeout: float) -> None:
  """Reports this process to process 0, and waits for its reply."""
  deadline = time.monotonic() + timeout
  report = {
    "process_id": cluster.process_id,
    "num_processes": cluster.num_processes,
  }
  while True:
    with _connect(cluster, deadline - time.monotonic()) as peer:
      _send(peer, report)
      left = max(deadline - time.monotonic(), 0)
      peer.settimeout(left + _REPLY_MARGIN)
      reply = _receive(peer) or {}
    if "complete" in reply:
      return
    for kind in (ValueError, TimeoutError):
      if kind.__name__ in reply:
        raise kind(reply[kind.__name__])
    # Process 0 may have ended, and start again. A port where nobody listens may
    # also have connected to itself.
    time.sleep(0.2)
    if time.monotonic() > deadline:
      raise TimeoutError(
        f"process {cluster.process_id} has connected to coordinator_address="
        f"{cluster.coordinator_address!r}, but within {timeout:g} s no process "
        "0 has replied there that all processes have started. Another program, "
        "or a run that trains already, may be using the port."
      )


def _connect(cluster: cluster_lib.Cluster, seconds: float) -> socket.socket:
  """Connects to the coordinator's address, where nobody may listen yet."""
  address = cluster_lib.split_address(
    "coordinator_address", cluster.coordinator_address
  )
  deadline = time.monotonic() + seconds
  # At most 10,000 attempts per second reach process 0.
  pause = max(0.1, 1e-4 * cluster.num_processes)
  while True:
    timeout = min(max(deadline - time.monotonic(), 0.1), 10.0)
    try:
      return socket.create_connection(address, timeout=timeout)
    except OSError as e:
      reason = e.strerror or str(e)
    if time.monotonic() + pause > deadline:
      raise TimeoutError(
        f"process {cluster.process_id} has not reached process 0 at "
        f"coordinator_address={cluster.coordinator_address!r} within "
        f"{seconds:g} s: {reason}."
      )
    time.sleep(pause)


def _send(peer: socket.socket, message: Mapping[str, Any]) -> None:
  # A peer that has ended does not read it.
  with contextlib.suppress(OSError):
    peer.sendall(f"{_MAGIC} {json.dumps(message)}\n".encode())


def _receive(peer: socket.socket) -> dict[str, Any] | None:
  """Returns the message of a peer; None if it has ended or is not ours.

  A message is so short that it arrives in one piece; a process whose message
  does not is disconnected, and reports again.
  """
  try:
    magic, _, text = peer.recv(_MAX_BYTES).decode().partition(" ")
    message = json.loads(text) if magic == _MAGIC else None
  except (OSError, ValueError):
    return None
  return message if isinstance(message, dict) else None
