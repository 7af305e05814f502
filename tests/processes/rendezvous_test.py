"""The processes of a program meet, or learn why they do not."""

from concurrent import futures
import contextlib
import socket
import time

import pytest

from flaxshard.processes import cluster
from flaxshard.processes import rendezvous


def free_port() -> int:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]


def meet(*processes: tuple[int, int], timeout=20.0, port=None):
  """Returns the error, or None, of each `(process_id, num_processes)`."""
  address = f"127.0.0.1:{port or free_port()}"

  def call(process):
    index, count = process
    try:
      rendezvous.meet(cluster.Cluster(address, count, index), timeout)
    except (ValueError, TimeoutError) as e:
      return e
    return None

  def serve_after(process):
    error = call(process)
    if error is None and process[0] == 0:
      # As JAX's service does: the others wait until it listens.
      host, port = address.split(":")
      with socket.create_server((host, int(port))) as server:
        server.settimeout(20)
        for _ in range(process[1] - 1):
          server.accept()[0].close()
    return error

  with futures.ThreadPoolExecutor(len(processes)) as pool:
    return list(pool.map(serve_after, processes))


def test_processes_meet_in_any_order():
  assert meet((2, 3), (0, 3), (1, 3)) == [None] * 3


def test_port_in_use_raises():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    (error,) = meet((0, 2), port=port)
  assert isinstance(error, ValueError)
  assert f"127.0.0.1:{port}" in str(error)
  assert "Address already in use" in str(error)


@pytest.mark.slow
def test_missing_processes_are_named_in_all_processes():
  port = free_port()
  errors = meet((0, 4), (2, 4), timeout=1.0, port=port)
  for error in errors:
    assert isinstance(error, TimeoutError)
    assert f"127.0.0.1:{port}" in str(error)
    assert "2 of 4 processes" in str(error)
    assert ": 1, 3." in str(error)


def test_unreachable_coordinator_raises():
  port = free_port()
  (error,) = meet((1, 2), timeout=0.5, port=port)
  assert isinstance(error, TimeoutError)
  assert f"127.0.0.1:{port}" in str(error)
  assert "process 1" in str(error)


@pytest.mark.slow
def test_process_that_has_given_up_is_missing():
  """Process 1 waits less long than process 0 and ends."""
  found = cluster.Cluster(f"127.0.0.1:{free_port()}", 3, 0)
  with futures.ThreadPoolExecutor(1) as pool:
    result = pool.submit(rendezvous.meet, found, 2.0)
    host, port = cluster.split_address("address", found.coordinator_address)
    with connect(host, port) as early:
      early.sendall(b'flaxshard-1 {"process_id": 1, "num_processes": 3}\n')
    with connect(host, port) as other:
      other.sendall(b'flaxshard-1 {"process_id": 2, "num_processes": 3}\n')
      with pytest.raises(TimeoutError, match=r"1 of 3 processes .*: 1\."):
        result.result(timeout=60)


def connect(host, port):
  while True:
    try:
      return socket.create_connection((host, port), timeout=20)
    except ConnectionRefusedError:
      time.sleep(0.05)


@pytest.mark.parametrize(
  "processes, words",
  [
    (((0, 3), (1, 3), (1, 3)), "process_id=1"),
    (((0, 2), (1, 3)), "num_processes=3"),
  ],
)
def test_processes_that_disagree_raise(processes, words):
  errors = meet(*processes, timeout=2.0)
  assert isinstance(errors[0], ValueError)
  assert words in str(errors[0])
  assert any(words in str(e) for e in errors[1:])


def test_other_connections_are_ignored():
  port = free_port()
  with futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as stack:
    result = pool.submit(meet, (0, 3), timeout=10.0, port=port)
    # They keep the connection, and say nothing.
    for _ in range(3):
      stack.enter_context(connect("127.0.0.1", port))
    for text in (b"GET / HTTP/1.0\r\n\r\n", b"flaxshard-1 []\n", b"\xff\n"):
      with connect("127.0.0.1", port) as other:
        other.sendall(text)
        assert not other.recv(100)
    assert meet((2, 3), (1, 3), port=port) == [None, None]
    assert result.result(timeout=60) == [None]


@pytest.mark.slow
@pytest.mark.parametrize("is_echo", [False, True])
def test_another_program_at_the_port_raises(is_echo):
  """JAX's service of a run that trains already, or the process itself.

  Linux may connect a port where nobody listens to itself.
  """
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    server.settimeout(0.2)
    with futures.ThreadPoolExecutor(1) as pool:
      result = pool.submit(meet, (1, 2), timeout=1.0, port=port)
      while not result.done():
        with contextlib.suppress(TimeoutError), server.accept()[0] as peer:
          received = peer.recv(4096)
          peer.sendall(received if is_echo else b"\0\0\x12\4\0")
  (error,) = result.result()
  assert isinstance(error, TimeoutError)
  assert f"127.0.0.1:{port}" in str(error)
  assert "Another program" in str(error)
