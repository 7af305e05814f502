"""Calls and questions over gRPC."""

import contextlib
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from flaxshard.workers import membership as membership_lib
from flaxshard.workers import transport as transport_lib
from flaxshard.workers.messages import Message


@contextlib.contextmanager
def _track(cancel):
  yield


class Server:
  """Answers calls with what it got; one with the field `wait` waits."""

  def __init__(self, bind="127.0.0.1:0"):
    self.began, self.end = threading.Event(), threading.Event()
    self.transport = transport_lib.Transport(
      bind, 1.0, self._answer_call, self._answer_question
    )
    self.address = f"127.0.0.1:{self.transport.port}"

  def call(self, header, message, timeout=None, track=_track):
    return self.transport.call(self.address, header, message, timeout, track)

  def _answer_call(self, header, read):
    if header.get("refuse"):
      return {"refused": True}, Message()
    message = read()
    if header.get("wait"):
      self.began.set()
      self.end.wait(20.0)
    return {"got": header}, message

  def _answer_question(self, question):
    return {"got": question}

  def ask(self, question, address=None):
    answers, answered = [], threading.Event()

    def done(answer):
      answers.append(answer)
      answered.set()

    self.transport.ask(address or self.address, question, 5.0, done)
    assert answered.wait(10.0)
    return answers


@pytest.fixture
def server():
  created = Server()
  yield created
  created.end.set()
  created.transport.close()


@pytest.mark.parametrize("size", [0, 1, 2**20, 5 * 2**20 + 7])
def test_call_carries_any_number_of_bytes(server, size):
  data = np.random.default_rng(0).bytes(size)
  fields = {"a": None, "b": [1, 2.5, "c", b"d"], "e": {"f": True}}
  header, answer = server.call({"x": 1}, Message(fields, data))
  assert header == {"got": {"x": 1}}
  assert answer.fields == fields and bytes(answer.data) == data


def test_call_carries_an_array(server):
  array = np.arange(6, dtype=np.float32).reshape(2, 3)
  _, answer = server.call({}, Message({}, array.data))
  np.testing.assert_array_equal(
    np.frombuffer(answer.data, np.float32).reshape(2, 3), array
  )


def test_refused_call_does_not_wait_for_its_data(server):
  data = bytes(50 * 2**20)
  assert server.call({"refuse": True}, Message({}, data)) == (
    {"refused": True},
    Message(),
  )


def test_question_is_answered_while_calls_wait(server):
  threads = [
    threading.Thread(
      target=lambda: server.call({"wait": True}, Message()), daemon=True
    )
    for _ in range(40)
  ]
  for thread in threads:
    thread.start()
  assert server.began.wait(5.0)
  assert server.ask({"y": 2}) == [{"got": {"y": 2}}]
  server.end.set()
  for thread in threads:
    thread.join(10.0)


def test_call_is_cancelled(server):
  cancels = []

  @contextlib.contextmanager
  def track(cancel):
    cancels.append(cancel)
    yield

  errors = []

  def call():
    try:
      server.call({"wait": True}, Message(), track=track)
    except ConnectionError as e:
      errors.append(e)

  thread = threading.Thread(target=call)
  thread.start()
  assert server.began.wait(5.0)
  cancels[0]()
  thread.join(5.0)
  assert len(errors) == 1


def test_call_times_out(server):
  with pytest.raises(TimeoutError, match="DEADLINE_EXCEEDED"):
    server.call({"wait": True}, Message(), timeout=0.1)


def test_worker_that_does_not_listen(server):
  gone = Server()
  gone.transport.close()
  with pytest.raises(ConnectionError, match=re.escape(gone.address)):
    server.transport.call(gone.address, {}, Message(), 5.0, _track)
  assert server.ask({}, gone.address) == [None]


def test_worker_that_ends_during_a_call(server):
  other = Server()
  errors = []

  def call():
    try:
      server.transport.call(
        other.address, {"wait": True}, Message(), None, _track
      )
    except ConnectionError as e:
      errors.append(e)

  thread = threading.Thread(target=call)
  thread.start()
  assert other.began.wait(5.0)
  began = time.monotonic()
  other.transport.close()
  thread.join(5.0)
  assert len(errors) == 1
  # A handler that still waits does not hold it up.
  assert time.monotonic() - began < 2.0
  other.end.set()


def test_worker_that_comes_back_at_the_same_address(server):
  other = Server()
  assert server.transport.call(other.address, {}, Message(), 5.0, _track)
  other.transport.close()
  assert server.ask({}, other.address) == [None]
  other = Server(other.address)
  end = time.monotonic() + 5.0
  while server.ask({}, other.address) == [None]:
    assert time.monotonic() < end
    time.sleep(0.02)
  assert server.transport.call(other.address, {}, Message(), 5.0, _track)
  other.transport.close()


def test_closed_transport_sends_nothing(server):
  server.transport.close()
  with pytest.raises(ConnectionError, match="closed"):
    server.call({}, Message())
  assert server.ask({}) == [None]


def test_port_in_use_is_an_error(server):
  with pytest.raises(OSError, match="FLAXSHARD_WORKER_BIND='host:port'"):
    Server(server.address)


@pytest.mark.parametrize(
  ("advertised", "expected"),
  [
    ("127.0.0.1:0", "127.0.0.1:0"),
    ("localhost:8476", "localhost:8476"),
    ("[::1]:8476", "[::1]:8476"),
    ("worker-2.example.com:8476", "ANY:8476"),
    (None, "ANY:0"),
  ],
)
def test_where_a_worker_listens(advertised, expected):
  address = transport_lib.listening_address(advertised)
  assert re.sub(r"^(0\.0\.0\.0|\[::\])", "ANY", address) == expected


def test_address_of_the_host_can_be_reached():
  server = Server(transport_lib.listening_address(None))
  host = transport_lib.host_address()
  assert server.ask({}, f"{host}:{server.transport.port}") == [{"got": {}}]
  server.transport.close()


def test_membership_over_grpc(tmp_path, monkeypatch):
  monkeypatch.setenv("FLAXSHARD_WORKER_ADDRESS", "127.0.0.1:0")
  workers = [
    membership_lib.Membership(str(tmp_path), k, 3, heartbeat=0.5)
    for k in range(3)
  ]
  began, end = threading.Event(), threading.Event()

  def handle(sender, message):
    if message.fields["wait"]:
      began.set()
      end.wait(20.0)
    return Message({"sender": sender}, message.data)

  for worker in workers:
    worker.register("method", handle)
    worker.join()
  members = workers[2].view.members
  assert {m.address.rpartition(":")[0] for m in members} == {"127.0.0.1"}
  data = bytes(3 * 2**20)
  answer = workers[2].call(0, "method", Message({"wait": False}, data))
  assert answer.fields == {"sender": 2} and answer.data == data
  errors = []

  def call():
    try:
      workers[2].call(0, "method", Message({"wait": True}))
    except membership_lib.PeerLost as e:
      errors.append(e)

  thread = threading.Thread(target=call)
  thread.start()
  assert began.wait(5.0)
  killed = time.monotonic()
  workers[0].close()
  thread.join(10.0)
  assert len(errors) == 1 and time.monotonic() - killed < 0.5 + 2.0
  assert workers[2].view.worker_ids == (1, 2)
  end.set()
  for worker in workers[1:]:
    worker.close()


def test_addresses_from_the_environment(tmp_path, monkeypatch):
  monkeypatch.setenv("FLAXSHARD_WORKER_ADDRESS", "relay.example.com:8476")
  monkeypatch.setenv("FLAXSHARD_WORKER_BIND", "127.0.0.1:0")
  worker = membership_lib.Membership(str(tmp_path), 0, 2)
  assert worker.join().members[0].address == "relay.example.com:8476"
  worker.close()


# A worker that is not closed, with a call and a handler that wait.
_PROGRAM = """
import sys, threading, time
from flaxshard.workers.membership import Membership
from flaxshard.workers.messages import Message
began = threading.Event()
workers = [Membership(sys.argv[1], k, 2, heartbeat=1.0) for k in range(2)]
for worker in workers:
  worker.register("wait", lambda s, m: (began.set(), time.sleep(600))[1])
  worker.join()
def call():
  workers[1].call(0, "wait", Message())
threading.Thread(target=call, daemon=True).start()
assert began.wait(10)
print("ready", flush=True)
if sys.argv[2] == "error":
  raise ValueError("an error")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "error"])
def test_interpreter_exits_without_close(end, tmp_path):
  program = subprocess.Popen(
    [sys.executable, "-c", _PROGRAM, str(tmp_path), end],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert program.stdout.readline() == "ready\n"
  began = time.monotonic()
  _, errors = program.communicate(timeout=20)
  assert time.monotonic() - began < 5.0
  assert program.returncode == (1 if end == "error" else 0)
  assert ("an error" in errors) == (end == "error")
  assert "Fatal" not in errors


@pytest.mark.slow
def test_grpc_missing_names_the_extra():
  program = """
import sys
sys.modules["grpc"] = None
from flaxshard.workers import transport
"""
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True
  )
  assert "pip install 'flaxshard[host]'" in result.stderr
