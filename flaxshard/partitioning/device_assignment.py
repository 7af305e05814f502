"""Device assignments: on which cores the replicas of a computation run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from flaxshard.partitioning import coordinates as coordinates_lib
from flaxshard.partitioning import device_layout
from flaxshard.partitioning.coordinates import Lengths
from flaxshard.partitioning.topology import Topology

_MODES = ("auto", "ring", "mesh")


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class DeviceAssignment:
  """Which core of a topology is which logical core of which replica.

  After `tf.tpu.experimental.DeviceAssignment`. A core belongs to one replica at
  most; cores may be left over. Mostly made by `DeviceAssignment.build`.

  Args:
    topology: The cores there are.
    core_assignment: ints [replicas, cores per replica, 4]: coordinates.

  Attributes:
    topology: As given.
    core_assignment: int32 [replicas, cores per replica, 4], read-only.

  Raises:
    ValueError: A wrong shape; coordinates outside of the mesh, of a missing
      device, or given twice.
    TypeError: Something else than a Topology or integers.

  Example:
    >>> topology = Topology((2, 2, 1, 2))
    >>> assignment = DeviceAssignment(topology, [[[0] * 4], [[1, 0, 0, 1]]])
    >>> assignment
    DeviceAssignment(num_replicas=2, num_cores_per_replica=1, topology=\
Topology(mesh_shape=(2, 2, 1, 2), num_tasks=1, num_tpus_per_task=8))
    >>> assignment.tpu_ordinal(replica=1)
    3
  """

  topology: Topology
  core_assignment: np.ndarray
  _indices: np.ndarray

  def __init__(
    self, topology: Topology, core_assignment: npt.ArrayLike
  ) -> None:
    _check_topology("DeviceAssignment", topology)
    where = "DeviceAssignment: core_assignment"
    coordinates = coordinates_lib.integers(
      where, core_assignment, None, None, 4
    )
    coordinates_lib.occupants(where, coordinates, topology.mesh_shape)
    fields = {
      "topology": topology,
      "core_assignment": coordinates_lib.read_only(
        coordinates.astype(np.int32)
      ),
      "_indices": topology.indices_at(coordinates, where),
    }
    for name, value in fields.items():
      object.__setattr__(self, name, value)

  @classmethod
  def build(
    cls,
    topology: Topology,
    computation_shape: npt.ArrayLike | None = None,
    computation_stride: npt.ArrayLike | None = None,
    num_replicas: int = 1,
    device_order_mode: str = "auto",
    *,
    span_slices: bool = False,
  ) -> DeviceAssignment:
    """Lays replicas out on a topology, each on a box of cores.

    After `tf.tpu.experimental.DeviceAssignment.build`, core by core.

    In mesh order, replicas form a grid as near to a cube as fits, its position
    counting the cores of a chip first, then x, y and z; the cores of a replica
    count the cores of a chip first, then z, y and x. In ring order the replicas
    follow one another along a ring of boxes, and the chips of a replica along a
    ring in its box, so that neighbours in number are neighbours in the network.

    Slices are filled one after the other: the slow network between them is
    outermost, and no replica straddles two unless `span_slices` says so. In a
    slice with missing devices, the replicas are runs of devices, task by task,
    instead of boxes.

    Args:
      topology: The cores there are.
      computation_shape: Four ints: the cores of a replica along x, y, z and on
        a chip. None is one core.
      computation_stride: Four ints: the distances between them; replicas
        interleave. None is all ones.
      num_replicas: How many replicas, at least 1.
      device_order_mode: `"ring"`, `"mesh"`, or `"auto"`: rings where they can
        be formed. They take whole chips, stride 1, and slices without missing
        devices that are as full as can be. With an odd side they are none,
        and x is counted through first: `"ring"` warns.
      span_slices: Let replicas lie on several slices: a computation shape that
        is n times a slice along z takes n slices, the same part of each; its
        cores are ordered slice by slice.

    Raises:
      ValueError: The replicas do not fit; the order cannot be had; a value that
        is none of the allowed.
      TypeError: Something else than integers, a string, a Topology.

    Example:
      >>> assignment = DeviceAssignment.build(
      ...   Topology((4, 4, 1, 1)), [2, 2, 1, 1], num_replicas=4
      ... )
      >>> assignment.core_assignment[:, 0].tolist()  # the replicas, in a ring
      [[0, 0, 0, 0], [2, 0, 0, 0], [2, 2, 0, 0], [0, 2, 0, 0]]
    """
    where = "DeviceAssignment.build"
    _check_topology(where, topology)
    shape = _four(f"{where}: computation_shape", computation_shape)
    stride = _four(f"{where}: computation_stride", computation_stride)
    count = coordinates_lib.integer(f"{where}: num_replicas", num_replicas, 1)
    mode = _mode(f"{where}: device_order_mode", device_order_mode)
    if not isinstance(span_slices, bool):
      raise TypeError(
        f"{where}: span_slices must be a bool, got {span_slices!r}."
      )
    cores = device_layout.lay_out(
      topology, shape, stride, count, mode, span_slices
    )
    return cls(topology, cores)

  # -- What there is.

  @property
  def num_replicas(self) -> int:
    """The number of replicas."""
    return self.core_assignment.shape[0]

  @property
  def num_cores_per_replica(self) -> int:
    """The number of logical cores of each replica."""
    return self.core_assignment.shape[1]

  @property
  def devices(self) -> np.ndarray:
    """The jax devices: an object array [replicas, cores per replica].

    Raises:
      ValueError: The topology was made without devices.
    """
    if self.topology.devices is None:
      raise ValueError(
        "DeviceAssignment.devices: the topology must have devices, got "
        f"{self.topology!r} without; Topology.from_devices makes one with them."
      )
    return self.topology.devices.ravel()[self._indices]

  # -- What is where.

  def coordinates(
    self, replica: int, logical_core: int
  ) -> tuple[int, int, int, int]:
    """Returns the coordinates of a logical core of a replica.

    Args:
      replica: From 0 on, in this as in all methods below.
      logical_core: From 0 on, likewise.

    Raises:
      ValueError: There is no such replica, or no such logical core.
      TypeError: An index is not an integer.
    """
    x, y, z, core = self.core_assignment[self._check(replica, logical_core)]
    return int(x), int(y), int(z), int(core)

  def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
    """Returns the replicas that have a logical core on a task, ascending.

    Args:
      task_id: From 0 on.
      logical_core: From 0 on.

    Raises:
      ValueError: No replica has, or there is no such task or logical core.
      TypeError: An index is not an integer.
    """
    tasks = self.topology.num_tasks
    task_id = coordinates_lib.integer("task_id", task_id, 0, tasks)
    _, logical_core = self._check(0, logical_core)
    on_task = self._indices[:, logical_core] // self.topology.num_tpus_per_task
    replicas = np.flatnonzero(on_task == task_id).tolist()
    if not replicas:
      raise ValueError(
        f"task_id must be a task with logical core {logical_core} of a "
        f"replica, one of {np.unique(on_task).tolist()}, got {task_id}."
      )
    return replicas

  def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
    """Returns the number of a logical core's device within its task.

    Args and errors are those of `coordinates`.
    """
    index = int(self._indices[self._check(replica, logical_core)])
    return index % self.topology.num_tpus_per_task

  def host_device(
    self, replica: int = 0, logical_core: int = 0, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of a logical core's host.

    Args:
      replica: From 0 on.
      logical_core: From 0 on.
      job: What the name begins with, `/job:...`, or None.

    Raises:
      ValueError, TypeError: As `coordinates`.
    """
    coordinates = self.coordinates(replica, logical_core)
    return self.topology.cpu_device_name_at_coordinates(coordinates, job)

  def tpu_device(
    self, replica: int = 0, logical_core: int = 0, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of a logical core's device.

    Args and errors are those of `host_device`.
    """
    coordinates = self.coordinates(replica, logical_core)
    return self.topology.tpu_device_name_at_coordinates(coordinates, job)

  def _check(self, replica: int, logical_core: int) -> tuple[int, int]:
    replicas, cores = self.core_assignment.shape[:2]
    return (
      coordinates_lib.integer("replica", replica, 0, replicas),
      coordinates_lib.integer("logical_core", logical_core, 0, cores),
    )

  # -- As a value.

  def _key(self) -> tuple[Any, ...]:
    cores = self.core_assignment
    return self.topology, cores.shape, cores.tobytes()

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, DeviceAssignment):
      return NotImplemented
    return self is other or self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())

  def __repr__(self) -> str:
    return (
      f"DeviceAssignment(num_replicas={self.num_replicas}, "
      f"num_cores_per_replica={self.num_cores_per_replica}, "
      f"topology={self.topology!r})"
    )


# -- Arguments.


def _check_topology(where: str, topology: Any) -> None:
  if not isinstance(topology, Topology):
    raise TypeError(f"{where}: topology must be a Topology, got {topology!r}.")


def _four(argument: str, value: Any) -> Lengths:
  return coordinates_lib.lengths(argument, (1,) * 4 if value is None else value)


def _mode(argument: str, value: Any) -> str:
  allowed = ", ".join(map(repr, _MODES))
  if not isinstance(value, str):
    raise TypeError(f"{argument} must be one of {allowed}, got {value!r}.")
  if value.lower() not in _MODES:
    raise ValueError(f"{argument} must be one of {allowed}, got {value!r}.")
  return value.lower()
