"""A TCP relay between workers, whose links can be cut, delayed and throttled.

Each worker listens at its own port and advertises a port of the relay. The
relay looks up which process has opened a connection, so that each link between
two workers can be treated alone. Linux only: it reads /proc/net/tcp.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import threading
import time

# Bytes that are read at once.
_CHUNK = 1 << 16
_POLL_SECONDS = 0.02


@dataclasses.dataclass
class Link:
  """What happens to the bytes between two workers, in both directions.

  Attributes:
    is_cut: Holds all bytes back, as a network that drops packets does: what TCP
      would send again comes through once the link is there again.
    delay: Seconds that each chunk takes.
    rate: Bytes per second in each direction; None for no limit.
  """

  is_cut: bool = False
  delay: float = 0.0
  rate: float | None = None


class Relay:
  """Relays all connections between workers on this machine.

  Args:
    num_workers: Number of workers.

  Attributes:
    bytes: Bytes that were relayed, by the pair of worker that has opened the
      connection and worker that it leads to.
  """

  def __init__(self, num_workers: int):
    self.bytes: dict[tuple[int, int], int] = {}
    self._links = {
      pair(a, b): Link() for a in range(num_workers) for b in range(a)
    }
    self._pids: dict[int, int] = {}
    self._advertised = [_listen() for _ in range(num_workers)]
    self._bound = [_free_port() for _ in range(num_workers)]
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def environment(self, worker: int) -> dict[str, str]:
    """Returns the variables that send a worker's connections through here."""
    port = self._advertised[worker].getsockname()[1]
    return {
      "FLAXSHARD_WORKER_ADDRESS": f"127.0.0.1:{port}",
      "FLAXSHARD_WORKER_BIND": f"127.0.0.1:{self._bound[worker]}",
    }

  def register(self, worker: int, pid: int) -> None:
    """Says which process is a worker."""
    self._pids[worker] = pid

  def link(self, a: int, b: int) -> Link:
    """Returns the link between two workers, to be changed."""
    return self._links[pair(a, b)]

  def split(self, *groups: Iterable[int]) -> None:
    """Cuts all links between workers of different groups."""
    group_of = {worker: i for i, group in enumerate(groups) for worker in group}
    for (a, b), link in self._links.items():
      link.is_cut = group_of[a] != group_of[b]

  def heal(self) -> None:
    """Brings all links back."""
    for link in self._links.values():
      link.is_cut = False

  def slow_down(self, *, delay: float, rate: float | None = None) -> None:
    """Delays and throttles all links."""
    for link in self._links.values():
      link.delay, link.rate = delay, rate

  def close(self) -> None:
    """Closes all connections."""
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    for listening in self._advertised:
      listening.close()

  def _run(self) -> None:
    asyncio.set_event_loop(self._loop)
    for worker, listening in enumerate(self._advertised):

      async def serve(reader, writer, worker=worker):
        await self._serve(worker, reader, writer)

      self._loop.run_until_complete(
        asyncio.start_server(serve, sock=listening, limit=_CHUNK)
      )
    self._loop.run_forever()
    # Streams report that their connections are cancelled.
    self._loop.set_exception_handler(lambda *_: None)
    tasks = asyncio.all_tasks(self._loop)
    for task in tasks:
      task.cancel()
    self._loop.run_until_complete(
      asyncio.gather(*tasks, return_exceptions=True)
    )
    self._loop.close()

  async def _serve(
    self,
    target: int,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
  ) -> None:
    """Relays one connection."""
    source = self._source(writer)
    if source == target:
      link = Link()
    elif source is None:  # has ended already
      writer.close()
      return
    else:
      link = self.link(source, target)
    while link.is_cut:
      await asyncio.sleep(_POLL_SECONDS)
    try:
      there, back = await asyncio.open_connection(
        "127.0.0.1", self._bound[target], limit=_CHUNK
      )
    except OSError:
      writer.close()
      return
    key = source, target
    await asyncio.gather(
      self._pipe(reader, back, link, key), self._pipe(there, writer, link, key)
    )

  async def _pipe(
    self,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    link: Link,
    key: tuple[int, int],
  ) -> None:
    """Relays one direction of a connection."""
    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

    async def send() -> None:
      while True:
        arrival, data = await queue.get()
        await asyncio.sleep(max(arrival - time.monotonic(), 0))
        while link.is_cut:
          await asyncio.sleep(_POLL_SECONDS)
        if not data:
          break
        writer.write(data)
        await writer.drain()
        self.bytes[key] = self.bytes.get(key, 0) + len(data)
      if writer.can_write_eof():
        writer.write_eof()

    async def receive() -> None:
      free = time.monotonic()  # when the link has sent all that it has
      while data := await reader.read(_CHUNK):
        free = max(free, time.monotonic())
        if link.rate is not None:
          free += len(data) / link.rate
          await asyncio.sleep(free - time.monotonic())
        await queue.put((free + link.delay, data))
      await queue.put((time.monotonic(), b""))

    tasks = [asyncio.ensure_future(x) for x in (send(), receive())]
    try:
      with contextlib.suppress(OSError):
        await asyncio.gather(*tasks)
    finally:
      for task in tasks:
        task.cancel()
      with contextlib.suppress(RuntimeError):  # the loop is closed
        writer.close()

  def _source(self, writer: asyncio.StreamWriter) -> int | None:
    """Returns the worker that has opened a connection."""
    inode = _inode(writer.get_extra_info("peername")[1], writer)
    for worker, pid in self._pids.items():
      folder = pathlib.Path(f"/proc/{pid}/fd")
      with contextlib.suppress(OSError):
        for name in os.listdir(folder):
          with contextlib.suppress(OSError):
            if os.readlink(folder / name) == f"socket:[{inode}]":
              return worker
    return None


def pair(a: int, b: int) -> tuple[int, int]:
  """Returns two workers in order."""
  return min(a, b), max(a, b)


def _inode(port: int, writer: asyncio.StreamWriter) -> str | None:
  """Returns the inode of the socket at the other end of a connection."""
  mine = writer.get_extra_info("sockname")[1]
  pattern = re.compile(
    rf" *\d+: [0-9A-F]+:{port:04X} [0-9A-F]+:{mine:04X} "
    r"(?:\S+ +){6}(\d+)"
  )
  for path in ("/proc/net/tcp", "/proc/net/tcp6"):
    with contextlib.suppress(OSError):
      for line in pathlib.Path(path).read_text().splitlines():
        if found := pattern.match(line):
          return found[1]
  return None


def _listen() -> socket.socket:
  listening = socket.socket()
  listening.bind(("127.0.0.1", 0))
  return listening


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    return s.getsockname()[1]
