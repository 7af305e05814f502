"""The end of a connection is noticed, and a closed one alone is not enough."""

import select
import socket
import threading

import pytest

from flaxshard.processes import connection

pytestmark = pytest.mark.skipif(
  not hasattr(select, "POLLRDHUP"), reason="only Linux reports it"
)


@pytest.fixture(name="server")
def listen():
  with socket.create_server(("127.0.0.1", 0)) as server:
    yield server


def _wait(hang_up):
  """Returns a thread that waits, and the list that gets the result."""
  results = []
  thread = threading.Thread(target=lambda: results.append(hang_up.wait()))
  thread.start()
  return thread, results


def test_end_of_the_server_is_noticed(server):
  address = server.getsockname()
  with socket.create_connection(address):
    accepted, _ = server.accept()
    hang_up = connection.HangUp(f"127.0.0.1:{address[1]}")
    thread, results = _wait(hang_up)
    server.close()
    accepted.close()
    thread.join(10)
  assert results == [True]


def test_closed_connection_to_a_running_server_is_no_end(server):
  address = server.getsockname()
  with (
    socket.create_connection(address),
    socket.create_connection(address) as other,
  ):
    accepted, _ = server.accept()
    kept, _ = server.accept()
    hang_up = connection.HangUp(f"127.0.0.1:{address[1]}")
    thread, results = _wait(hang_up)
    accepted.close()
    thread.join(0.5)
    assert thread.is_alive() and other and kept
    hang_up.close()
    thread.join(10)
  assert results == [False]
