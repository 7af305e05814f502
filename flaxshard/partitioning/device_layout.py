"""Layouts: where a device assignment puts its replicas and their cores."""

from __future__ import annotations

from collections.abc import Sequence
import math
import warnings

import numpy as np

from flaxshard.partitioning import coordinates as coordinates_lib
from flaxshard.partitioning.coordinates import Lengths
from flaxshard.partitioning.topology import Topology

# Whose arguments the errors are about.
_WHERE = "DeviceAssignment.build"


def lay_out(
  topology: Topology,
  shape: Lengths,
  stride: Lengths,
  num_replicas: int,
  mode: str,
  span_slices: bool,
) -> np.ndarray:
  """Returns where the cores are: int64 [replicas, cores per replica, 4].

  The arguments are those of `DeviceAssignment.build`, one by one correct.

  Raises:
    ValueError: Together they are not.
  """
  mesh = topology.slice_shape
  spanned, part = _part(topology, shape, stride) if span_slices else (1, shape)
  footprint = np.multiply(part, stride)
  if (footprint > mesh).any():
    hint = (
      "" if span_slices else "; span_slices=True lets a replica lie on more"
    )
    raise ValueError(
      f"{_WHERE}: computation_shape times computation_stride must fit in "
      f"{mesh}, a slice of {topology!r}, got {shape} times {stride}"
      f"{hint if topology.num_slices > 1 else ''}."
    )
  counts = (mesh // footprint * stride).tolist()
  most, cores = math.prod(counts), math.prod(part)
  slices = _devices_by_slice(topology)
  whole = [len(devices) == math.prod(mesh) for devices in slices]
  room = [
    most if whole[n] else min(most, len(devices) // cores)
    for n, devices in enumerate(slices)
  ]
  taken = _fill(room, spanned, num_replicas)
  if (total := sum(count for _, count in taken)) < num_replicas:
    raise ValueError(
      f"{_WHERE}: num_replicas must be at most {total}, with computation_shape "
      f"{shape} and computation_stride {stride} in {topology!r}, got "
      f"{num_replicas}."
    )
  degraded = not all(whole[n] for group, _ in taken for n in group)
  if degraded and max(stride) > 1:
    raise ValueError(
      f"{_WHERE}: computation_stride must be all ones in slices with missing "
      f"devices, got {stride} in {topology!r}."
    )
  full = part[3] == mesh[3] and all(count == most for _, count in taken)
  rings = full and max(stride) == 1 and not degraded
  if mode == "ring" and not rings:
    raise ValueError(
      f"{_WHERE}: device_order_mode must be 'auto' or 'mesh' here, got 'ring': "
      f"rings take whole chips, stride 1 and slices full of replicas ({most}) "
      f"without missing devices, got {num_replicas} replicas of shape {shape} "
      f"and stride {stride} in {topology!r}."
    )

  if mode == "ring" and not (_folds(counts[:3]) and _folds(part[:3])):
    warnings.warn(
      f"{_WHERE}: device_order_mode='ring': an odd side does not fold into a "
      f"ring, so x is counted through first; the sides are {part[:3]} chips, "
      f"{tuple(counts[:3])} replicas.",
      stacklevel=3,
    )

  def on_slice(n: int, count: int) -> np.ndarray:
    if not whole[n]:
      return slices[n][: count * cores].reshape(count, cores, 4)
    if rings and mode != "mesh":
      boxes = _rings(part, counts)
    else:
      boxes = _grid(part, stride, counts, count)
    return boxes + np.array([0, 0, n * mesh[2], 0])

  return np.concatenate(
    [
      np.concatenate([on_slice(n, count) for n in group], axis=1)
      for group, count in taken
    ]
  )


def _part(
  topology: Topology, shape: Lengths, stride: Lengths
) -> tuple[int, Lengths]:
  """Returns on how many slices a replica lies, and its shape on each."""
  x, y, z, cores = shape
  depth, reach = topology.slice_shape[2], z * stride[2]
  if reach <= depth:
    return 1, shape
  spanned = reach // depth
  if reach % depth or z % spanned or spanned > topology.num_slices:
    raise ValueError(
      f"{_WHERE}: computation_shape[2] times computation_stride[2] must be "
      f"that of one slice, {depth}, or of up to {topology.num_slices} of them, "
      f"the same on each, got {z} times {stride[2]}."
    )
  return spanned, (x, y, z // spanned, cores)


def _devices_by_slice(topology: Topology) -> list[np.ndarray]:
  """Returns coordinates [devices, 4] for each slice, in the order of tasks."""
  devices = topology.device_coordinates.reshape(-1, 4).astype(np.int64)
  numbers = devices[:, 2] // topology.slice_shape[2]
  return [devices[numbers == n] for n in range(topology.num_slices)]


def _fill(
  room: Sequence[int], spanned: int, num_replicas: int
) -> list[tuple[range, int]]:
  """Returns groups of slices and the replicas on each, one after the other.

  A group, of `spanned` slices, takes as many as there is room for in each.
  """
  taken = []
  for first in range(0, len(room) - spanned + 1, spanned):
    group = range(first, first + spanned)
    count = min(num_replicas, *(room[n] for n in group))
    num_replicas -= count
    if count:
      taken.append((group, count))
  return taken


def _grid(
  shape: Lengths, stride: Lengths, counts: Sequence[int], num_replicas: int
) -> np.ndarray:
  """Returns mesh order: int64 [replicas, cores, 4].

  The grid of the replicas is as near to a cube as fits, its scarcest dimension
  chosen first; among equals the cores of a chip, then x, y and z, as replicas
  next to each other should be on one chip, or else on one host.
  """
  grid = [1] * 4
  left = num_replicas
  for i, axis in enumerate(sorted((3, 0, 1, 2), key=lambda a: counts[a])):
    # With floating point, as TensorFlow does it: some roots are rounded up.
    grid[axis] = min(math.ceil(left ** (1 / (4 - i))), counts[axis])
    left = -(-left // grid[axis])
  position = coordinates_lib.count_through(grid)[:num_replicas]
  # Replicas interleave within a footprint, `stride` of them along each axis.
  footprint, strides = np.multiply(shape, stride), np.array(stride)
  first = position // strides * footprint + position % strides
  inside = np.indices(shape).reshape(4, -1).T * strides
  return first[:, None] + inside


def _rings(shape: Lengths, counts: Sequence[int]) -> np.ndarray:
  """Returns ring order: int64 [replicas, cores, 4], all boxes of a slice."""
  boxes, chips = _ring(counts[:3]) * shape[:3], _ring(shape[:3])
  order = np.empty((len(boxes), len(chips), shape[3], 4), np.int64)
  order[..., :3] = (boxes[:, None] + chips)[:, :, None]
  order[..., 3] = np.arange(shape[3])
  return order.reshape(len(boxes), -1, 4)


def _ring(sides: Sequence[int]) -> np.ndarray:
  """Orders the chips of a box so that it is one hop from each to the next.

  And one hop from the last to the first. An all-reduce, in which every chip
  sends to the next one, then shares no link with itself.

  The way back must not be blocked, so the chips with x = 0 are kept for it. In
  a row, walk x = 1, 2, ... Fold the rows over y, each second one backwards, and
  come home along x = 0: a loop through the layer, from and to its corner
  (0, 0). Fold these loops over z, each second one backwards, and come home
  along the corners. A box of 4 x 2 x 2, by the order of its chips:

      z = 0:  0  1  2  3      z = 1:  15 14 13 12
              7  6  5  4               8  9 10 11

  With one side only, the ring is a line: it is the torus that closes it. With
  an odd side, folding ends at the wrong end, and the chips are counted through
  as they are, x first; TensorFlow does the same.

  Args:
    sides: The lengths of the box, three.

  Returns:
    int64 [chips, 3].
  """
  if not _folds(sides):
    return coordinates_lib.count_through((*sides, 1))[:, :3]
  path = np.zeros((0, 3), np.int64)
  for axis in range(3):
    unit = np.eye(3, dtype=np.int64)[axis]
    lane = np.arange(1, sides[axis])[:, None] * unit
    if not len(path):
      path = lane
      continue
    layers = [path[:: 1 - 2 * (i % 2)] + i * unit for i in range(sides[axis])]
    path = np.concatenate([*layers, lane[::-1]])
  return np.concatenate([np.zeros((1, 3), np.int64), path])


def _folds(sides: Sequence[int]) -> bool:
  """Whether a box has a ring: its sides are even, or a line is all it has."""
  wide = [side for side in sides if side > 1]
  return len(wide) < 2 or not any(side % 2 for side in wide)
