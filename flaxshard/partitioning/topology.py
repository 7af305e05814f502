"""Topologies: which task's device lies where in a mesh of cores."""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from flaxshard.partitioning import coordinates as coordinates_lib
from flaxshard.partitioning import topology_proto


@dataclasses.dataclass(frozen=True, init=False, eq=False, repr=False)
class Topology:
  """A mesh of cores, and which of them each task drives.

  After `tf.tpu.experimental.Topology`. A mesh has four dimensions: x, y and z
  of a chip, and the core on the chip. The tasks are the processes, all with the
  same number of devices. Places of the mesh may have no device.

  Several slices, which a slower network connects, are stacked along z: with Z
  chips along z in a slice, chip z of slice s has the coordinate `z + s * Z`.

  Args:
    mesh_shape: Four lengths: x, y, z and the cores of a chip.
    device_coordinates: ints [tasks, devices per task, 4]. None is one task with
      a device in every place: cores innermost, then x, y and z.
    devices: jax devices [tasks, devices per task], or None.
    num_slices: How many slices are stacked along z.

  Attributes:
    mesh_shape: A tuple of four ints.
    device_coordinates: int32 [tasks, devices per task, 4], read-only.
    devices: An object array [tasks, devices per task], read-only, or None.
    num_slices: An int.

  Raises:
    ValueError: A wrong shape, coordinates outside of the mesh, two devices in
      one place or one device twice, slices that do not divide z.
    TypeError: Something else than integers.

  Example:
    >>> topology = Topology((2, 2, 1, 2))
    >>> topology
    Topology(mesh_shape=(2, 2, 1, 2), num_tasks=1, num_tpus_per_task=8)
    >>> topology.tpu_device_name_at_coordinates((1, 0, 0, 1))
    '/task:0/device:TPU:3'
  """

  mesh_shape: tuple[int, int, int, int]
  device_coordinates: np.ndarray
  devices: np.ndarray | None
  num_slices: int
  _occupants: np.ndarray

  def __init__(
    self,
    mesh_shape: npt.ArrayLike,
    device_coordinates: npt.ArrayLike | None = None,
    devices: Any = None,
    num_slices: int = 1,
  ) -> None:
    shape = coordinates_lib.lengths("Topology: mesh_shape", mesh_shape)
    num_slices = coordinates_lib.integer("Topology: num_slices", num_slices, 1)
    if shape[2] % num_slices:
      raise ValueError(
        "Topology: mesh_shape[2] must be a multiple of num_slices="
        f"{num_slices}, as slices are stacked along z, got {shape[2]}."
      )
    where = "Topology: device_coordinates"
    if device_coordinates is None:
      coordinates = coordinates_lib.count_through(shape)[None]
    else:
      coordinates = coordinates_lib.integers(
        where, device_coordinates, None, None, 4
      )
    fields = {
      "mesh_shape": shape,
      "device_coordinates": coordinates_lib.read_only(
        coordinates.astype(np.int32)
      ),
      "devices": _device_array(devices, coordinates.shape[:2]),
      "num_slices": num_slices,
      "_occupants": coordinates_lib.occupants(where, coordinates, shape),
    }
    for name, value in fields.items():
      object.__setattr__(self, name, value)

  @classmethod
  def from_devices(
    cls,
    devices: Iterable[jax.Device] | None = None,
    mesh_shape: npt.ArrayLike | None = None,
  ) -> Topology:
    """Reads a topology off jax devices.

    Tasks are the processes, ascending. TPUs tell where they are; the least
    coordinates of each slice become zeros. Other devices lie in a mesh of shape
    (devices per process, processes per slice, slices, 1), each process' devices
    as they are given. A GPU's slice is what JAX calls so: its node. Within a
    task, devices are numbered with cores innermost, then x, y and z.

    Args:
      devices: None is `jax.devices()`.
      mesh_shape: Four lengths for devices other than TPUs, which fill that
        mesh slice by slice, process by process: cores innermost, then x, y and
        z. So can eight CPU devices rehearse a TPU layout, (2, 2, 1, 2) say. For
        TPUs it must be the shape that they have.

    Raises:
      ValueError: No devices; two in one place; processes with different numbers
        of devices; slices of different shapes; another number of devices than
        the mesh has places.
      TypeError: Something else than devices.

    Example:
      >>> Topology.from_devices(jax.devices()[:1]).mesh_shape
      (1, 1, 1, 1)
    """
    return cls(
      *coordinates_lib.of_devices(
        jax.devices() if devices is None else devices, mesh_shape
      )
    )

  @classmethod
  def from_serialized(cls, serialized: bytes) -> Topology:
    """Reads what `serialized` wrote, or TensorFlow's `TopologyProto`.

    Args:
      serialized: The bytes.

    Raises:
      ValueError: The bytes are no topology.
      TypeError: Something else than bytes.

    Example:
      >>> topology = Topology((4, 4, 1, 2))
      >>> Topology.from_serialized(topology.serialized()) == topology
      True
    """
    mesh_shape, coordinates, num_slices = topology_proto.decode(serialized)
    return cls(mesh_shape, coordinates, num_slices=num_slices)

  def serialized(self) -> bytes:
    """Returns the topology as TensorFlow's `TopologyProto`, but its devices.

    `num_slices` is written where it is not 1, in a field that TensorFlow skips.
    """
    return topology_proto.encode(
      self.mesh_shape, self.device_coordinates, self.num_slices
    )

  # -- What there is.

  @property
  def mesh_rank(self) -> int:
    """The number of dimensions of the mesh: 4."""
    return len(self.mesh_shape)

  @property
  def slice_shape(self) -> tuple[int, int, int, int]:
    """The mesh of one slice."""
    x, y, z, cores = self.mesh_shape
    return x, y, z // self.num_slices, cores

  @property
  def num_tasks(self) -> int:
    """The number of tasks."""
    return self.device_coordinates.shape[0]

  @property
  def num_tpus_per_task(self) -> int:
    """The number of devices of each task, of whatever kind."""
    return self.device_coordinates.shape[1]

  @functools.cached_property
  def missing_devices(self) -> np.ndarray:
    """int64 [missing, 4], read-only: the places without a device."""
    return coordinates_lib.read_only(np.argwhere(self._occupants < 0))

  # -- What is where.

  def indices_at(
    self, coordinates: np.ndarray, argument: str = "coordinates"
  ) -> np.ndarray:
    """Returns which devices are at coordinates, counted through all tasks.

    Args:
      coordinates: ints [..., 4].
      argument: What holds them, for errors.

    Returns:
      int32 [...]: the device's number plus its task's number times
      `num_tpus_per_task`.

    Raises:
      ValueError: Coordinates outside of the mesh, or of a missing device.
    """
    coordinates_lib.check_inside(argument, coordinates, self.mesh_shape)
    found = self._occupants[tuple(np.moveaxis(coordinates, -1, 0))]
    wanted = "must be where the topology has a device"
    coordinates_lib.refuse(found < 0, argument, coordinates, wanted)
    return found

  def _task_and_tpu(self, coordinates: npt.ArrayLike) -> tuple[int, int]:
    checked = coordinates_lib.integers("device_coordinates", coordinates, 4)
    index = int(self.indices_at(checked, "device_coordinates"))
    return divmod(index, self.num_tpus_per_task)

  def task_ordinal_at_coordinates(
    self, device_coordinates: npt.ArrayLike
  ) -> int:
    """Returns the number of the task that has the device at coordinates.

    Args:
      device_coordinates: Four ints, in this as in all methods below.

    Raises:
      ValueError: They are outside of the mesh, or a missing device's.
      TypeError: They are not integers.
    """
    return self._task_and_tpu(device_coordinates)[0]

  def tpu_device_ordinal_at_coordinates(
    self, device_coordinates: npt.ArrayLike
  ) -> int:
    """Returns the number of the device at coordinates within its task.

    Args and errors are those of `task_ordinal_at_coordinates`.
    """
    return self._task_and_tpu(device_coordinates)[1]

  def cpu_device_name_at_coordinates(
    self, device_coordinates: npt.ArrayLike, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of the host of the device at coordinates.

    Args:
      device_coordinates: Four ints.
      job: What the name begins with, `/job:...`, or None.

    Raises:
      ValueError, TypeError: As `task_ordinal_at_coordinates`.
    """
    task, _ = self._task_and_tpu(device_coordinates)
    return f"{_job(job)}/task:{task}/device:CPU:0"

  def tpu_device_name_at_coordinates(
    self, device_coordinates: npt.ArrayLike, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of the device at coordinates.

    Args and errors are those of `cpu_device_name_at_coordinates`.
    """
    task, tpu = self._task_and_tpu(device_coordinates)
    return f"{_job(job)}/task:{task}/device:TPU:{tpu}"

  def device_at(self, device_coordinates: npt.ArrayLike) -> jax.Device:
    """Returns the jax device at coordinates.

    Args are those of `task_ordinal_at_coordinates`, and so are its errors.

    Raises:
      ValueError: The topology was made without `devices`.
    """
    if self.devices is None:
      raise ValueError(
        "Topology.device_at: the topology must have devices, got "
        f"{self!r} without; Topology.from_devices makes one with them."
      )
    return self.devices[self._task_and_tpu(device_coordinates)]

  # -- As a value.

  def _key(self) -> tuple[Any, ...]:
    cores, devices = self.device_coordinates, self.devices
    # There is one object for a device, so its id says which it is.
    ids = None if devices is None else tuple(id(d) for d in devices.flat)
    return self.mesh_shape, self.num_slices, cores.shape, cores.tobytes(), ids

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Topology):
      return NotImplemented
    return self is other or self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())

  def __repr__(self) -> str:
    slices = f", num_slices={self.num_slices}" if self.num_slices > 1 else ""
    return (
      f"Topology(mesh_shape={self.mesh_shape}, num_tasks={self.num_tasks}, "
      f"num_tpus_per_task={self.num_tpus_per_task}{slices})"
    )


def _job(job: str | None) -> str:
  if job is not None and not isinstance(job, str):
    raise TypeError(f"job must be a string or None, got {job!r}.")
  return "" if job is None else f"/job:{job}"


def _device_array(devices: Any, shape: tuple[int, ...]) -> np.ndarray | None:
  if devices is None:
    return None
  array = np.array(devices, dtype=object)
  if array.shape != shape:
    raise ValueError(
      "Topology: devices must have the shape of device_coordinates without its "
      f"last dimension, {list(shape)}, got {list(array.shape)}."
    )
  numbers = {id(device): i for i, device in enumerate(array.flat)}
  for i, device in enumerate(array.flat):
    # Of a device given twice, the later one is left in the dict.
    if device is None or numbers[id(device)] != i:
      index = [int(n) for n in np.unravel_index(i, shape)]
      raise ValueError(
        f"Topology: devices{index} must be a device that is nowhere else, "
        f"got {device!r}."
      )
  return coordinates_lib.read_only(array)
