"""Prints how long it takes to assign replicas to 8,960 chips.

The mesh has 16 x 20 x 28 chips with one core each, and eight chips per host.
The topology is created beforehand and timed separately. If TensorFlow is
installed, the script prints its times too. Both are measured in turn, and the
script checks that their assignments are equal.

  python benchmarks/device_assignment.py
"""

import argparse
from collections.abc import Callable
import logging
import math
import statistics
import time
from typing import Any

import numpy as np

import flaxshard as fs

try:
  from tensorflow.python.tpu import device_assignment as tf_assignment
  from tensorflow.python.tpu import topology as tf_topology
except ImportError:
  tf_assignment = tf_topology = None

MESH = (16, 20, 28, 1)
HOST = (2, 2, 2)

# Computation shape, number of replicas, order.
CASES = [
  ((1, 1, 1, 1), 8960, "ring"),
  ((1, 1, 1, 1), 8960, "mesh"),
  ((2, 2, 1, 1), 2240, "ring"),
  ((2, 2, 2, 1), 1120, "ring"),
  ((2, 2, 2, 1), 1120, "mesh"),
  ((4, 4, 4, 1), 140, "auto"),
  ((16, 20, 28, 1), 1, "ring"),
  ((16, 20, 28, 1), 1, "mesh"),
]


def host_coordinates() -> np.ndarray:
  """Returns coordinates [hosts, chips per host, 4].

  Hosts and the chips of a host are numbered with x fastest.
  """
  blocks = [n // m for n, m in zip(MESH, HOST, strict=False)]
  z, y, x = np.indices(blocks[::-1]).reshape(3, -1, 1)
  dz, dy, dx = np.indices(HOST[::-1]).reshape(3, 1, -1)
  chips = [x * HOST[0] + dx, y * HOST[1] + dy, z * HOST[2] + dz]
  return np.stack([*chips, np.zeros_like(chips[0])], axis=-1)


def milliseconds(runs: int, *functions: Callable[[], Any]) -> list[float]:
  """Returns the median milliseconds of each function, called in turn."""
  times: list[list[float]] = [[] for _ in functions]
  for _ in range(runs + 1):
    for function, taken in zip(functions, times, strict=True):
      start = time.perf_counter()
      function()
      taken.append((time.perf_counter() - start) * 1e3)
  # The first run fills the caches.
  return [statistics.median(taken[1:]) for taken in times]


def main() -> None:
  """Prints a table."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--runs", type=int, default=7)
  runs = parser.parse_args().runs
  logging.disable(logging.WARNING)  # TensorFlow warns of odd sides

  coordinates = host_coordinates()
  topology = fs.Topology(MESH, coordinates)
  constructors: list[Callable[[], Any]] = [
    lambda: fs.Topology(MESH, coordinates)
  ]
  rows = [("topology", constructors)]
  if tf_topology is not None:
    tensorflow_topology = tf_topology.Topology(None, MESH, coordinates)
    constructors.append(lambda: tf_topology.Topology(None, MESH, coordinates))
  for shape, count, order in CASES:
    builds: list[Callable[[], Any]] = [
      lambda s=shape, n=count, o=order: fs.DeviceAssignment.build(
        topology, s, num_replicas=n, device_order_mode=o
      )
    ]
    if tf_assignment is not None:
      mode = tf_assignment.DeviceOrderMode[order.upper()]
      builds.append(
        lambda s=shape, n=count, m=mode: tf_assignment.device_assignment(
          tensorflow_topology, s, num_replicas=n, device_order_mode=m
        )
      )
      actual, expected = (build().core_assignment for build in builds)
      np.testing.assert_array_equal(actual, expected)
    box = "x".join(map(str, shape[:3]))
    rows.append((f"{count} x {box}, {order}", builds))

  print(f"{math.prod(MESH)} chips, {runs} runs, medians in ms.\n")
  print("| replicas and order    | flaxshard | TensorFlow |")
  print("|----------------------:|----------:|-----------:|")
  for name, functions in rows:
    times = [f"{t:.2f}" for t in milliseconds(runs, *functions)]
    times += ["-"] * (2 - len(times))
    print(f"| {name:>21} | {times[0]:>9} | {times[1]:>10} |")


if __name__ == "__main__":
  main()
