"""DeviceAssignment: the cores on which the replicas of a computation run."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from flaxshard.core import checks
from flaxshard.partitioning import coordinates as coordinates_lib
from flaxshard.partitioning.coordinates import Lengths
from flaxshard.partitioning.topology import Topology


class DeviceAssignment:
  """Assigns a core of a topology to each logical core of each replica.

  A core belongs to at most one replica; some cores may be unused. Most programs
  create an assignment with `DeviceAssignment.build`.

  Args:
    topology: The topology with the cores.
    core_assignment: ints [replicas, cores per replica, 4]: the coordinates of
      each logical core.

  Attributes:
    topology: The topology.
    core_assignment: int32 [replicas, cores per replica, 4], read-only.

  Raises:
    ValueError: The array has the wrong shape, or coordinates are outside of the
      mesh, have no device, or are given twice.
    TypeError: A coordinate is not an integer.

  Example:
    >>> import flaxshard as fs
    >>> topology = fs.Topology((2, 2, 1, 2))
    >>> assignment = fs.DeviceAssignment(
    ...     topology, [[[0] * 4], [[1, 0, 0, 1]]])
    >>> assignment
    DeviceAssignment(num_replicas=2, num_cores_per_replica=1, topology=\
Topology(mesh_shape=(2, 2, 1, 2), num_tasks=1, num_tpus_per_task=8))
    >>> assignment.tpu_ordinal(replica=1)
    3

  Source: `tf.tpu.experimental.DeviceAssignment`.
  """

  def __init__(
    self, topology: Topology, core_assignment: npt.ArrayLike
  ) -> None:
    argument = "core_assignment"
    self.topology = topology
    # [replicas, cores per replica]
    self._device_numbers = topology.device_numbers(argument, core_assignment, 3)
    self.core_assignment = coordinates_lib.read_only(core_assignment, np.int32)
    # No two cores may have the same place.
    coordinates_lib.number_places(
      argument, self.core_assignment, topology.mesh_shape
    )

  @classmethod
  def build(
    cls,
    topology: Topology,
    computation_shape: npt.ArrayLike | None = None,
    computation_stride: npt.ArrayLike | None = None,
    num_replicas: int = 1,
    device_order_mode: str = "auto",
  ) -> DeviceAssignment:
    """Assigns a box of cores to each replica, in the order of TensorFlow.

    In mesh order the replicas form a grid that is as close to a cube as fits.
    Replicas are numbered through this grid with the cores of a chip fastest,
    then x, y and z. The cores of a replica are numbered with the cores of a
    chip fastest, then z, y and x.

    In ring order the replicas follow each other along a ring of boxes, and the
    chips of a replica along a ring in its box. Replicas with neighboring
    numbers are then neighbors in the network.

    Slices are filled one after the other, so that the slow network between them
    is outermost. A replica lies within one slice. Write the coordinates by hand
    for one on several slices, or around places without a device.

    Args:
      topology: The topology with the cores.
      computation_shape: Four ints: the number of cores of a replica along x, y,
        z and on a chip. None means one core.
      computation_stride: Four ints: the distances between the cores of a
        replica. Other replicas take the cores in between. None means all ones.
      num_replicas: Number of replicas, at least 1.
      device_order_mode: `"ring"`, `"mesh"`, or `"auto"`, which means rings if
        they are possible. Rings need whole chips, a stride of 1, and slices
        that are full of replicas. A box with an odd side has no ring: its chips
        are numbered with x fastest, and `"ring"` then warns.

    Returns:
      The assignment.

    Raises:
      ValueError: The replicas do not fit, the order is not possible, or an
        argument is out of range.
      TypeError: An argument has the wrong type.

    Example:
      >>> import flaxshard as fs
      >>> assignment = fs.DeviceAssignment.build(
      ...   fs.Topology((4, 4, 1, 1)), [2, 2, 1, 1], num_replicas=4
      ... )
      >>> assignment.core_assignment[:, 0].tolist()  # replicas along a ring
      [[0, 0, 0, 0], [2, 0, 0, 0], [2, 2, 0, 0], [0, 2, 0, 0]]

    Source: `tf.tpu.experimental.DeviceAssignment.build`.
    """
    shape = _lengths_or_ones("computation_shape", computation_shape)
    stride = _lengths_or_ones("computation_stride", computation_stride)
    num_replicas = checks.integer("num_replicas", num_replicas, minimum=1)
    # Accept upper case too, as in TensorFlow's DeviceOrderMode.RING.
    mode = checks.one_of(
      "device_order_mode",
      str(device_order_mode).lower(),
      ("auto", "ring", "mesh"),
    )
    slice_shape = topology.slice_shape
    # The box that `stride` interleaved replicas along each axis share.
    footprint = np.multiply(shape, stride)
    # The most replicas that fit along each axis of a slice.
    counts = (slice_shape // footprint * stride).tolist()
    capacity = math.prod(counts)
    if not capacity:
      raise ValueError(
        f"computation_shape {shape} with computation_stride {stride} does not "
        f"fit into {topology!r}."
      )
    if num_replicas > capacity * topology.num_slices:
      raise ValueError(
        f"num_replicas must be at most {capacity * topology.num_slices}, with "
        f"computation_shape {shape} and computation_stride {stride} in "
        f"{topology!r}, got {num_replicas}."
      )
    # All replicas have one order, so every slice must have rings.
    has_rings = (
      shape[3] == slice_shape[3]
      and max(stride) == 1
      and num_replicas % capacity == 0
    )
    if mode == "ring" and not has_rings:
      raise ValueError(
        "device_order_mode must be 'auto' or 'mesh' here, got 'ring': rings "
        "need whole chips, stride 1, and slices that are full of replicas "
        f"({capacity}); got {num_replicas} replicas of shape {shape} and "
        f"stride {stride} in {topology!r}."
      )
    if mode == "ring" and not (_has_ring(counts[:3]) and _has_ring(shape[:3])):
      checks.warn(
        "device_order_mode='ring': a box with an odd side has no ring, so its "
        f"chips are numbered with x fastest; the sides are {shape[:3]} chips, "
        f"{tuple(counts[:3])} replicas."
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
    return cls(topology, np.concatenate(slices))

  # -- Sizes.

  @property
  def num_replicas(self) -> int:
    """The number of replicas."""
    return self.core_assignment.shape[0]

  @property
  def num_cores_per_replica(self) -> int:
    """The number of logical cores of each replica."""
    return self.core_assignment.shape[1]

  # -- Lookups.

  def coordinates(
    self, replica: int, logical_core: int
  ) -> tuple[int, int, int, int]:
    """Returns the coordinates of a logical core of a replica.

    Args:
      replica: Number of the replica, from 0.
      logical_core: Number of the logical core, from 0.

    Raises:
      ValueError: A number is out of range.
      TypeError: A number is not an integer.
    """
    replica = _index("replica", replica, self.num_replicas)
    core = _index("logical_core", logical_core, self.num_cores_per_replica)
    x, y, z, core = self.core_assignment[replica, core].tolist()
    return x, y, z, core

  def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
    """Returns the replicas whose logical core is on a task, in ascending order.

    Args:
      task_id: Number of the task, from 0.
      logical_core: Number of the logical core, from 0.

    Raises:
      ValueError: A number is out of range, or there is no such replica.
      TypeError: A number is not an integer.
    """
    task_id = _index("task_id", task_id, self.topology.num_tasks)
    core = _index("logical_core", logical_core, self.num_cores_per_replica)
    numbers = self._device_numbers[:, core]
    tasks = numbers // self.topology.num_tpus_per_task
    replicas = np.flatnonzero(tasks == task_id).tolist()
    if not replicas:
      raise ValueError(
        f"task_id must be a task with logical core {logical_core} of a "
        f"replica, one of {np.unique(tasks).tolist()}, got {task_id}."
      )
    return replicas

  def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
    """Returns the number, within its task, of a logical core's device.

    Args:
      replica: Number of the replica, from 0.
      logical_core: Number of the logical core, from 0.

    Raises:
      ValueError: A number is out of range.
      TypeError: A number is not an integer.
    """
    coordinates = self.coordinates(replica, logical_core)
    return self.topology.tpu_device_ordinal_at_coordinates(coordinates)

  def host_device(
    self, replica: int = 0, logical_core: int = 0, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of the host of a logical core.

    Args:
      replica: Number of the replica, from 0.
      logical_core: Number of the logical core, from 0.
      job: The job in the name, as in `/job:worker/task:0`; None leaves it out.

    Raises:
      ValueError: A number is out of range.
      TypeError: A number is not an integer.
    """
    coordinates = self.coordinates(replica, logical_core)
    return self.topology.cpu_device_name_at_coordinates(coordinates, job)

  def tpu_device(
    self, replica: int = 0, logical_core: int = 0, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of the device of a logical core.

    Args:
      replica: Number of the replica, from 0.
      logical_core: Number of the logical core, from 0.
      job: The job in the name, as in `/job:worker/task:0`; None leaves it out.

    Raises:
      ValueError: A number is out of range.
      TypeError: A number is not an integer.
    """
    coordinates = self.coordinates(replica, logical_core)
    return self.topology.tpu_device_name_at_coordinates(coordinates, job)

  def __repr__(self) -> str:
    return (
      f"DeviceAssignment(num_replicas={self.num_replicas}, "
      f"num_cores_per_replica={self.num_cores_per_replica}, "
      f"topology={self.topology!r})"
    )


def _index(argument: str, value: Any, length: int) -> int:
  """Returns `value` as an index from 0 to `length - 1`."""
  return checks.integer(argument, value, minimum=0, maximum=length - 1)


def _lengths_or_ones(argument: str, value: Any) -> Lengths:
  return coordinates_lib.mesh_lengths(
    argument, (1,) * 4 if value is None else value
  )


# -- The layout: the positions of replicas and cores, as in TensorFlow also
# where other choices would be as good.


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
