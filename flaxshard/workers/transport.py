"""gRPC between workers: calls with any number of bytes, and short questions.

Generic handlers with msgpack stand in for protocol buffers, so nothing is
generated. A call is a stream of chunks in both directions. Questions, such as
signs of life, have a connection of their own: a large call does not hold them
up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
import contextlib
import os
import socket
import threading
from typing import Any

from flaxshard.workers.messages import Message

# Otherwise gRPC writes lines to stderr whenever a connection ends.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
try:
  import grpc
  import msgpack
except ImportError as e:
  raise ImportError(
    f"AGN(transport='host') needs the package {e.name}: "
    "pip install 'flaxshard[host]'."
  ) from e

_SERVICE = "flaxshard.Workers"
_CHUNK_BYTES = 2**20

Header = dict[str, Any]
# Gets the header of a call and a function that receives its message.
AnswerCall = Callable[[Header, Callable[[], Message]], tuple[Header, Message]]
AnswerQuestion = Callable[[Header], Header]


class Transport:
  """Sends calls and questions to workers, and answers theirs.

  Args:
    bind: `"host:port"` to listen at; port 0 is any free port.
    heartbeat: Seconds without a sign of life after which a worker is dead.
    answer_call: Answers a call, in a thread of its own.
    answer_question: Answers a question, in a thread of its own.

  Attributes:
    port: The port.

  Raises:
    OSError: The port cannot be opened.
  """

  def __init__(
    self,
    bind: str,
    heartbeat: float,
    answer_call: AnswerCall,
    answer_question: AnswerQuestion,
  ):
    self._answer_call = answer_call
    self._answer_question = answer_question
    self._heartbeat = heartbeat
    self._mutex = threading.Lock()
    self._channels: dict[tuple[str, str], grpc.Channel] = {}
    self._is_closed = False
    self._server = grpc.server(_DaemonThreads(), options=_server_options())
    self._server.add_generic_rpc_handlers(
      [
        grpc.method_handlers_generic_handler(
          _SERVICE,
          {
            "Call": grpc.stream_stream_rpc_method_handler(self._serve_call),
            "Ask": grpc.unary_unary_rpc_method_handler(self._serve_question),
          },
        )
      ]
    )
    try:
      self.port = self._server.add_insecure_port(bind)
    except RuntimeError as e:
      raise OSError(
        f"cannot listen at {bind!r}: another program may be using the port. "
        "FLAXSHARD_WORKER_BIND='host:port' says where to listen."
      ) from e
    self._server.start()

  def call(
    self,
    address: str,
    header: Header,
    message: Message,
    timeout: float | None,
    track: Callable[[Callable[[], None]], contextlib.AbstractContextManager],
  ) -> tuple[Header, Message]:
    """Sends a call, and waits for its answer.

    Args:
      address: `"host:port"` of the worker.
      header: Values for msgpack.
      message: The message.
      timeout: Seconds to wait; None: without end.
      track: Is entered with a function that cancels the call.

    Returns:
      The header and the message of the answer.

    Raises:
      TimeoutError: There was no answer within `timeout`.
      ConnectionError: The worker cannot be reached, or the call was cancelled.
    """
    with _as_connection_error(address):
      call = self._method(address, "Call")(
        _frames(header, message), timeout=timeout
      )
      try:
        with track(call.cancel):
          first = msgpack.unpackb(next(call))
          return first["header"], _receive(first, call)
      finally:
        call.cancel()  # no effect on one that is complete

  def ask(
    self,
    address: str,
    question: Header,
    timeout: float,
    done: Callable[[Header | None], None],
  ) -> None:
    """Sends a question, and does not wait.

    Args:
      address: `"host:port"` of the worker.
      question: Values for msgpack.
      timeout: Seconds until it fails.
      done: Is called with the answer, or None, from another thread.
    """

    def finish(call: Any) -> None:
      try:
        answer = msgpack.unpackb(call.result())
      except (grpc.RpcError, grpc.FutureCancelledError):
        answer = None
      done(answer)

    try:
      ask = self._method(address, "Ask")
      ask.future(msgpack.packb(question), timeout=timeout).add_done_callback(
        finish
      )
    except (ConnectionError, ValueError):  # the channel is closed
      done(None)

  def forget(self, address: str) -> None:
    """Closes the connections to a worker, and cancels what is under way."""
    with self._mutex:
      channels = [
        self._channels.pop(key)
        for key in list(self._channels)
        if key[0] == address
      ]
    for channel in channels:
      channel.close()

  def close(self) -> None:
    """Closes all connections; handlers that still run are not waited for."""
    with self._mutex:
      self._is_closed = True
      addresses = {address for address, _ in self._channels}
    for address in addresses:
      self.forget(address)
    self._server.stop(None)

  def _method(self, address: str, name: str) -> Any:
    with self._mutex:
      if self._is_closed:
        raise ConnectionError("closed")
      channel = self._channels.get((address, name))
      if channel is None:
        channel = grpc.insecure_channel(
          address, options=_channel_options(name, self._heartbeat)
        )
        self._channels[address, name] = channel
    path = f"/{_SERVICE}/{name}"
    return (
      channel.stream_stream(path)
      if name == "Call"
      else channel.unary_unary(path)
    )

  def _serve_call(self, frames: Any, context: Any) -> Iterator[bytes]:
    del context
    first = msgpack.unpackb(next(frames))
    yield from _frames(
      *self._answer_call(first["header"], lambda: _receive(first, frames))
    )

  def _serve_question(self, question: bytes, context: Any) -> bytes:
    del context
    return msgpack.packb(self._answer_question(msgpack.unpackb(question)))


def listening_address(address: str | None) -> str:
  """Returns where to listen, for an address that is advertised.

  Args:
    address: `"host:port"` or None.
  """
  host, _, port = (address or ":0").rpartition(":")
  if host in ("127.0.0.1", "[::1]", "localhost"):
    return f"{host}:{port}"
  anywhere = "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"
  return f"{anywhere}:{port}"


def host_address() -> str:
  """Returns the address of this host in its network, 127.0.0.1 without one."""
  for family, unused in (
    # Addresses of documentation: connecting a UDP socket sends nothing, and
    # chooses the interface.
    (socket.AF_INET, "192.0.2.1"),
    (socket.AF_INET6, "2001:db8::1"),
  ):
    with (
      contextlib.suppress(OSError),
      socket.socket(family, socket.SOCK_DGRAM) as s,
    ):
      s.connect((unused, 9))
      host = s.getsockname()[0]
      return f"[{host}]" if ":" in host else host
  return "127.0.0.1"


class _DaemonThreads(futures.Executor):
  """Runs each call in a new daemon thread.

  Handlers wait for other workers, so any fixed number of threads could be used
  up. And the interpreter waits at its exit for the threads of a
  `ThreadPoolExecutor`.
  """

  def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
    future: futures.Future[Any] = futures.Future()

    def run() -> None:
      try:
        future.set_result(fn(*args, **kwargs))
      except BaseException as e:
        future.set_exception(e)

    threading.Thread(target=run, name="flaxshard_call", daemon=True).start()
    return future


def _frames(header: Header, message: Message) -> Iterator[bytes]:
  """Yields a header with fields, then the data in chunks."""
  data = memoryview(message.data)
  size = data.nbytes
  yield msgpack.packb(
    {"header": header, "fields": message.fields, "size": size}
  )
  if size:
    data = data.cast("B")
    for start in range(0, size, _CHUNK_BYTES):
      yield bytes(data[start : start + _CHUNK_BYTES])


def _receive(first: Header, frames: Iterator[bytes]) -> Message:
  """Returns the message of `_frames`."""
  data = bytearray(first["size"])
  position = 0
  for frame in frames:
    data[position : position + len(frame)] = frame
    position += len(frame)
  if position != first["size"]:
    raise ConnectionError(f"received {position} of {first['size']} bytes")
  return Message(first["fields"], data)


@contextlib.contextmanager
def _as_connection_error(address: str) -> Iterator[None]:
  try:
    yield
  except grpc.RpcError as e:
    code = e.code() if isinstance(e, grpc.Call) else None
    text = f"{address}: {code}: {getattr(e, 'details', str)()}"
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
      raise TimeoutError(text) from e
    raise ConnectionError(text) from e
  except (StopIteration, ValueError) as e:
    # Closed on the other side, or the channel on this one.
    raise ConnectionError(f"{address}: closed") from e


def _server_options() -> list[tuple[str, int]]:
  return [
    *_UNLIMITED,
    # Two programs would share a port, and each get a part of the calls.
    ("grpc.so_reuseport", 0),
    # Otherwise the server closes connections for too many pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
  ]


def _channel_options(name: str, heartbeat: float) -> list[tuple[str, int]]:
  """Returns the options of a channel for calls or questions."""
  # After a cut, the retransmissions of TCP come minutes apart: better a new
  # connection. Large calls on a slow link may hold up a ping for long.
  patience = heartbeat / 2 if name == "Ask" else max(2 * heartbeat, 20.0)
  milliseconds = int(1000 * patience)
  return [
    *_UNLIMITED,
    # Channels with the same address share a connection otherwise.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", milliseconds),
    ("grpc.keepalive_timeout_ms", milliseconds),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # The time that connecting may take.
    ("grpc.min_reconnect_backoff_ms", int(1000 * max(heartbeat, 1.0))),
    # Calls are sent again where it is known what that means.
    ("grpc.enable_retries", 0),
  ]


_UNLIMITED = [
  ("grpc.max_receive_message_length", -1),
  ("grpc.max_send_message_length", -1),
]
