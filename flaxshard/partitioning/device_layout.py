"""The layout of a device assignment: the positions of replicas and cores.

Positions and sizes agree with TensorFlow's, also where other choices would be
as good; see `DeviceAssignment.build`.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

import numpy as np

from flaxshard.core import checks
from flaxshard.partitioning import coordinates as coordinates_lib
from flaxshard.partitioning.coordinates import Lengths
from flaxshard.partitioning.topology import Topology

# The public function whose arguments the errors are about.
_WHERE = "DeviceAssignment.build"


def lay_out(
  topology: Topology,
  shape: Lengths,
  stride: Lengths,
  num_replicas: int,
  mode: str,
) -> np.ndarray:
  """Returns the coordinates of the cores of all replicas.

  Args:
    topology: The topology.
    shape: The computation shape, checked.
    stride: The computation stride, checked.
    num_replicas: Number of replicas, at least 1.
    mode: "auto", "ring" or "mesh".

  Returns:
    int64 [replicas, cores per replica, 4].

  Raises:
    ValueError: The arguments do not fit together, or do not fit the topology.
  """
  slice_shape = topology.slice_shape
  # The box that `stride` interleaved replicas along each axis share.
  footprint = np.multiply(shape, stride)
  if (footprint > slice_shape).any():
    raise ValueError(
      f"{_WHERE}: computation_shape times computation_stride must fit in "
      f"{slice_shape}, a slice of {topology!r}, got {shape} times {stride}."
    )
  # The most replicas that fit along each axis of a slice.
  counts = (slice_shape // footprint * stride).tolist()
  capacity = math.prod(counts)
  if num_replicas > capacity * topology.num_slices:
    raise ValueError(
      f"{_WHERE}: num_replicas must be at most "
      f"{capacity * topology.num_slices}, with computation_shape {shape} and "
      f"computation_stride {stride} in {topology!r}, got {num_replicas}."
    )
  # All replicas have one order, so every slice must have rings.
  has_rings = (
    shape[3] == slice_shape[3]
    and max(stride) == 1
    and num_replicas % capacity == 0
  )
  if mode == "ring" and not has_rings:
    raise ValueError(
      f"{_WHERE}: device_order_mode must be 'auto' or 'mesh' here, got 'ring': "
      "rings need whole chips, stride 1, and slices that are full of replicas "
      f"({capacity}); got {num_replicas} replicas of shape {shape} and stride "
      f"{stride} in {topology!r}."
    )
  if mode == "ring" and not (_has_ring(counts[:3]) and _has_ring(shape[:3])):
    checks.warn(
      f"{_WHERE}: device_order_mode='ring': a box with an odd side has no "
      "ring, so its chips are numbered with x fastest; the sides are "
      f"{shape[:3]} chips, {tuple(counts[:3])} replicas.",
    )
  slices = []
  for number in range(-(-num_replicas // capacity)):
    if has_rings and mode != "mesh":
      boxes = _ring_order(shape, counts)
    else:
      count = min(capacity, num_replicas - number * capacity)
      boxes = _mesh_order(shape, stride, counts, count)
    # Slices are stacked along z.
    slices.append(boxes + np.array([0, 0, number * slice_shape[2], 0]))
  return np.concatenate(slices)


def _mesh_order(
  shape: Lengths, stride: Lengths, counts: Sequence[int], num_replicas: int
) -> np.ndarray:
  """Returns the cores in mesh order: int64 [replicas, cores, 4].

  The grid of the replicas is as close to a cube as fits. Its sides are chosen
  in the order of `counts`, the smallest first. Of equal counts the cores of a
  chip are first, then x, y and z, so that replicas with neighboring numbers are
  on one chip, or else on one host.
  """
  grid = [1] * 4
  remaining = num_replicas
  for i, axis in enumerate(sorted((3, 0, 1, 2), key=lambda a: counts[a])):
    # In floating point, as in TensorFlow: it rounds some exact roots up.
    side = math.ceil(remaining ** (1 / (4 - i)))
    grid[axis] = min(side, counts[axis])
    remaining = -(-remaining // grid[axis])
  position = coordinates_lib.all_coordinates(grid)[:num_replicas]
  # `stride` replicas interleave along each axis of a footprint.
  footprint, strides = np.multiply(shape, stride), np.array(stride)
  first_core = position // strides * footprint + position % strides
  offsets = np.indices(shape).reshape(4, -1).T * strides
  return first_core[:, None] + offsets


def _ring_order(shape: Lengths, counts: Sequence[int]) -> np.ndarray:
  """Returns the cores of a full slice in ring order: [replicas, cores, 4]."""
  boxes = _ring_of_chips(counts[:3]) * shape[:3]
  chips = _ring_of_chips(shape[:3])
  order = np.empty((len(boxes), len(chips), shape[3], 4), np.int64)
  order[..., :3] = (boxes[:, None] + chips)[:, :, None]
  order[..., 3] = np.arange(shape[3])
  return order.reshape(len(boxes), -1, 4)


def _ring_of_chips(sides: Sequence[int]) -> np.ndarray:
  """Orders the chips of a box so that each is one hop from the next.

  The last chip is one hop from the first one too. In an all-reduce along such a
  ring, where every chip sends to the next one, no two transfers share a link.

  The chips with x = 0 are kept for the way back. The path goes through each row
  along x = 1, 2, ..., and through every second row backwards. After the last
  row of a layer it returns along x = 0 to the corner (0, 0): a ring through the
  layer. The layers are joined along z in the same way: every second one is
  traversed backwards, and the path returns along the corners. The order of the
  chips in a box of 4 x 2 x 2:

      z = 0:  0  1  2  3      z = 1:  15 14 13 12
              7  6  5  4               8  9 10 11

  A box with a single side longer than 1 is a line, which the torus closes. A
  box with an odd side has no such ring; its chips are numbered with x fastest,
  as in TensorFlow.

  Args:
    sides: The three side lengths of the box.

  Returns:
    int64 [chips, 3].
  """
  if not _has_ring(sides):
    return coordinates_lib.all_coordinates((*sides, 1))[:, :3]
  path = np.zeros((0, 3), np.int64)
  for axis in range(3):
    unit = np.eye(3, dtype=np.int64)[axis]
    # The chips on this axis, without the origin.
    line = np.arange(1, sides[axis])[:, None] * unit
    if not len(path):
      path = line
      continue
    layers = [path[:: 1 - 2 * (i % 2)] + i * unit for i in range(sides[axis])]
    path = np.concatenate([*layers, line[::-1]])
  return np.concatenate([np.zeros((1, 3), np.int64), path])


def _has_ring(sides: Sequence[int]) -> bool:
  """Returns whether a box is a line, or has only even sides longer than 1."""
  long_sides = [side for side in sides if side > 1]
  return len(long_sides) < 2 or not any(side % 2 for side in long_sides)
