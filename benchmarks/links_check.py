"""Measures the links of `virtual_network` with plain sockets."""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import threading
import time

import virtual_network

_PORT = 5000
_CHUNK = 1 << 18


def check(
  hosts: int, rate: float, delay: float, seconds: float, busy: bool
) -> dict:
  """Measures idle round trips and the throughput of every link at once.

  Every host sends to the next one, so that all links are full in both
  directions.

  Args:
    hosts: Number of hosts.
    rate: Bits per second.
    delay: Seconds one way.
    seconds: How long to send.
    busy: Whether the hosts compute at the same time.

  Returns:
    Round trip in milliseconds, megabits per second of each host, the CPU
    time of the router as a share of a core, and dropped bytes.
  """
  with virtual_network.Network(hosts, rate, delay) as network:
    processes = [
      network.start(
        k,
        [
          sys.executable,
          __file__,
          str(k),
          str(hosts),
          str(seconds),
          str(int(busy)),
        ],
        stdout=subprocess.PIPE,
        text=True,
      )
      for k in range(hosts)
    ]
    start = time.perf_counter(), network.busy
    outs = [p.communicate(timeout=60 + 5 * seconds)[0] for p in processes]
    share = (network.busy - start[1]) / (time.perf_counter() - start[0])
    results = [json.loads(out) for out in outs]
    return {
      "round_trip_ms": statistics.median(r["round_trip_ms"] for r in results),
      "mbit": [round(r["mbit"], 1) for r in results],
      "router": share,
      "dropped": network.dropped,
      "sent": network.sent,
    }


def _run_host(k: int, hosts: int, seconds: float, busy: bool) -> None:
  listener = socket.create_server((virtual_network.address(k), _PORT))
  results = {}

  def serve() -> None:
    connection, _ = listener.accept()
    with connection:
      for _ in range(20):
        connection.sendall(connection.recv(1))
      # The first second is TCP's start.
      start, received = None, 0
      while data := connection.recv(_CHUNK):
        now = time.perf_counter()
        if start is None:
          start = now
        if now - start > 1:
          if not received:
            first = now
          received += len(data)
          last = now
      results["mbit"] = 8e-6 * received / (last - first)

  server = threading.Thread(target=serve)
  server.start()
  if busy:
    # Another process: a thread would hold up the sockets by Python's lock.
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
  address = virtual_network.address((k + 1) % hosts), _PORT
  while True:
    try:
      sender = socket.create_connection(address)
      break
    except ConnectionRefusedError:
      time.sleep(0.1)
  sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  sender_congestion = sender.getsockopt(
    socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16
  ).rstrip(b"\0")
  trips = []
  for _ in range(20):
    start = time.perf_counter()
    sender.sendall(b"x")
    sender.recv(1)
    trips.append(1e3 * (time.perf_counter() - start))
  data = bytes(_CHUNK)
  end = time.perf_counter() + seconds + 1
  while time.perf_counter() < end:
    sender.sendall(data)
  sender.close()
  server.join()
  if busy:
    burner.kill()
    burner.wait()
  assert sender_congestion == b"cubic", sender_congestion
  print(json.dumps({"round_trip_ms": statistics.median(trips), **results}))


if __name__ == "__main__":
  number, hosts, seconds, busy = sys.argv[1:]
  _run_host(int(number), int(hosts), float(seconds), busy == "1")
