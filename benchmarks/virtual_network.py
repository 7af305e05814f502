"""Hosts on this machine that are connected by links of a given rate and delay.

Each host is a network namespace with a TUN device. A router in this program
reads the IP packets of the hosts, holds each one back as long as a link would,
and writes it to its receiver. So whatever the programs on the hosts speak runs
over the kernel's own TCP, unchanged.

Each host has a full duplex link to a switch:

- A packet leaves its sender, and enters its receiver, at the rate of the link.
  IP packets count, with the headers that a large packet gets as it is cut into
  packets of 1,500 bytes.
- It arrives `delay` seconds after that.
- A sender that is faster than its link waits, as at a network card. Beyond
  `queue` bytes that wait for a receiver's link, packets are dropped.

Nothing is left behind: a namespace ends with the last program in it.

It needs Linux, `/dev/net/tun`, and the commands `unshare` and `ip`. Without
root, it needs user namespaces.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
import contextlib
import fcntl
import heapq
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

# From linux/if_tun.h.
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2

# struct virtio_net_hdr: flags, type and header length of a large packet, and
# the size of the parts that it is to be cut into.
_VNET = struct.Struct("<BBHHHH")

_SUBNET = "10.77.0.0/24"

_PREFIX = bytes((10, 77, 0))
_IP = _VNET.size  # where the header of IP begins
_AT_ONCE = 16  # packets of a host that are read in turn with those of others


def address(host: int) -> str:
  """Returns the IP address of a host."""
  return f"10.77.0.{host + 1}"


class Network:
  """Hosts that are connected by links; a context manager.

  Attributes:
    sent: Bytes that each host has sent, with the headers of IP and TCP.
    dropped: Number of bytes that were dropped.
    busy: Seconds of CPU time of the router.

  Args:
    rates: Of each host, bits per second of its link in each direction; 0: no
      limit.
    delay: Seconds from one host to another.
    queue: Bytes that may wait for a receiver's link.
  """

  def __init__(
    self, rates: Sequence[float], delay: float, queue: int = 1_500_000
  ):
    self.sent = [0] * len(rates)
    self.dropped = 0
    self.busy = 0.0
    self._seconds_per_byte = [8 / rate if rate else 0.0 for rate in rates]
    self._delay = delay
    self._queue = queue
    self._tuns: list[int | None] = [None] * len(rates)
    self._processes: list[subprocess.Popen[Any]] = []
    self._wake_reader, self._wake_writer = os.pipe()
    self._is_closed = False
    self._router = threading.Thread(target=self._route, daemon=True)

  def __enter__(self) -> Network:
    self._router.start()
    return self

  def __exit__(self, *error: object) -> None:
    for process in self._processes:
      if process.poll() is None:
        process.kill()
      process.wait()
    self._is_closed = True
    os.write(self._wake_writer, b"x")
    self._router.join()
    for tun in (*self._tuns, self._wake_reader, self._wake_writer):
      if tun is not None:
        os.close(tun)

  def start(
    self, host: int, command: Sequence[str], **options: Any
  ) -> subprocess.Popen[Any]:
    """Starts a program on a host, one for each host.

    Args:
      host: Index of the host.
      command: The program and its arguments.
      **options: Those of `subprocess.Popen`.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    unshare = ["unshare", "--net", "--uts"]
    if os.geteuid():
      unshare += ["--user", "--map-root-user"]
    with ours, theirs:
      process = subprocess.Popen(
        [
          *unshare,
          sys.executable,
          __file__,
          str(host),
          str(theirs.fileno()),
          *command,
        ],
        pass_fds=[theirs.fileno()],
        **options,
      )
      self._processes.append(process)
      theirs.close()
      _, tuns, _, _ = socket.recv_fds(ours, 1, 1)
    if not tuns:
      raise RuntimeError(
        f"host {host} has no TUN device: {' '.join(unshare)} failed, or there "
        "is no /dev/net/tun"
      )
    os.set_blocking(tuns[0], False)
    self._tuns[host] = tuns[0]
    os.write(self._wake_writer, b"x")
    return process

  def _route(self) -> None:
    """Moves packets until the network is closed."""
    # So that the busy programs on the hosts do not hold packets up.
    with contextlib.suppress(PermissionError):
      os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    clock = time.perf_counter
    up, down = (
      [_Port(seconds, self._queue) for seconds in self._seconds_per_byte]
      for _ in range(2)
    )
    ports = [*up, *down]
    arriving: collections.deque[tuple[float, _Packet]] = collections.deque()
    while not self._is_closed:
      now = clock()
      for port in up:
        while packet := port.take(now):
          down[packet.receiver].put(packet, port.sent_at)
      for port in down:
        while packet := port.take(now):
          arriving.append((port.sent_at + self._delay, packet))
      while arriving and arriving[0][0] <= now:
        _, packet = arriving.popleft()
        self._write(packet)
      self.dropped = sum(port.dropped for port in ports)
      wake_time = min(port.next_time for port in ports)
      if arriving:
        wake_time = min(wake_time, arriving[0][0])
      tuns = {tun: host for host, tun in enumerate(self._tuns) if tun}
      readable, _, _ = select.select(
        [self._wake_reader, *tuns], [], [], max(min(wake_time - now, 1.0), 0)
      )
      for tun in readable:
        if tun == self._wake_reader:
          os.read(tun, 1)
          continue
        host = tuns[tun]
        for packet in self._read(tun):
          self.sent[host] += packet.size
          up[host].put(packet, clock())
      self.busy = time.thread_time()

  def _read(self, tun: int) -> Iterator[_Packet]:
    """Yields the packets that a host has sent to other hosts."""
    for _ in range(_AT_ONCE):
      try:
        data = os.read(tun, 1 << 17)
      except OSError:  # nothing to read, or the host has ended
        return
      # Others are IPv6 router solicitations and multicasts.
      if data[_IP + 16 : _IP + 19] == _PREFIX and data[_IP] >> 4 == 4:
        receiver = data[_IP + 19] - 1
        if receiver < len(self._tuns):
          yield _Packet(receiver, _wire_size(data), data)

  def _write(self, packet: _Packet) -> None:
    tun = self._tuns[packet.receiver]
    if tun is not None:
      # The host has ended, or has no room.
      with contextlib.suppress(OSError):
        os.write(tun, packet.data)


class _Packet(NamedTuple):
  """A packet, perhaps a large one that stands for several.

  Attributes:
    receiver: Index of the host.
    size: Bytes on the link.
    data: The packet after its virtio header.
  """

  receiver: int
  size: int
  data: bytes

  @property
  def flow(self) -> bytes:
    """Addresses, and ports of TCP: the same in all packets of a connection."""
    return self.data[_IP + 12 : _IP + 24]


class _Port:
  """One direction of a link, with a fair queue.

  Connections share the rate evenly: each packet gets a finish time in a clock
  of bytes that its connection has to itself, and the earliest is sent first
  (self-clocked fair queuing).

  Attributes:
    sent_at: When the last packet that was taken had been sent.
    next_time: When `take` has the next packet.
    dropped: Bytes that found the queue full.

  Args:
    seconds_per_byte: 8 / bits per second.
    limit: Bytes that may wait.
  """

  def __init__(self, seconds_per_byte: float, limit: int):
    self.sent_at = 0.0
    self.next_time = math.inf
    self.dropped = 0
    self._seconds_per_byte = seconds_per_byte
    self._limit = limit
    self._waiting: list[tuple[int, int, _Packet]] = []
    self._sending: _Packet | None = None
    self._num_bytes = 0
    self._number = 0
    self._clock = 0
    self._last: dict[bytes, int] = {}

  def put(self, packet: _Packet, now: float) -> None:
    """Takes a packet at the time `now`, or drops it."""
    if self._num_bytes + packet.size > self._limit:
      self.dropped += packet.size
      return
    self._num_bytes += packet.size
    self._number += 1
    finish = max(self._clock, self._last.get(packet.flow, 0)) + packet.size
    self._last[packet.flow] = finish
    heapq.heappush(self._waiting, (finish, self._number, packet))
    if self._sending is None:
      self._send_next(max(now, self.sent_at))

  def take(self, now: float) -> _Packet | None:
    """Returns the packet that has been sent by now, if any."""
    if self.next_time > now:
      return None
    packet = self._sending
    assert packet is not None
    self._num_bytes -= packet.size
    self.sent_at = self.next_time
    self._sending, self.next_time = None, math.inf
    if self._waiting:
      self._send_next(self.sent_at)
    return packet

  def _send_next(self, start: float) -> None:
    self._clock, _, self._sending = heapq.heappop(self._waiting)
    self.next_time = start + self._sending.size * self._seconds_per_byte


def _wire_size(packet: bytes) -> int:
  """Returns the bytes of the IP packets that a large packet is cut into."""
  _, kind, header, part, _, _ = _VNET.unpack_from(packet)
  size = len(packet) - _VNET.size
  if not kind:
    return size
  count = -(-(size - header) // part)
  return size + (count - 1) * header


def _enter_host(host: int, connection: int, command: list[str]) -> None:
  """Sets up this namespace, and becomes the program that runs on the host."""
  tun = os.open("/dev/net/tun", os.O_RDWR)
  flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
  fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"tun0", flags))
  # The kernel passes on large packets of TCP, which it neither cuts nor sums.
  fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
  for arguments in (
    ("address", "add", f"{address(host)}/24", "dev", "tun0"),
    ("link", "set", "tun0", "up"),
    ("link", "set", "lo", "up"),
    # Linux's default, whatever this machine has.
    ("route", "replace", _SUBNET, "dev", "tun0", "congctl", "cubic"),
  ):
    subprocess.run(["ip", *arguments], check=True)
  # gloo listens on the address of the host's name, which must be known.
  socket.sethostname(address(host))
  with socket.socket(fileno=connection) as s:
    socket.send_fds(s, [b"x"], [tun])
  os.execvp(command[0], command)


if __name__ == "__main__":
  _enter_host(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
