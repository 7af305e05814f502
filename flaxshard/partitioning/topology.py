"""Topology: the mesh of cores of a machine, and the tasks that drive them."""

from __future__ import annotations

from collections.abc import Iterable
import functools
import math
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from flaxshard.core import checks
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import coordinates as coordinates_lib
from flaxshard.partitioning.coordinates import Lengths

_NOT_TPU = ("cpu", "gpu", "cuda", "rocm")


class Topology:
  """A mesh of cores, and the task that drives each core.

  The mesh has four dimensions: x, y and z of a chip, and the core on the chip.
  Tasks are processes; all have the same number of devices. A place of the mesh
  may have no device.

  Several slices, connected by a slower network, are stacked along z: with Z
  chips along z in a slice, chip z of slice s has the coordinate `z + s * Z`.

  Args:
    mesh_shape: Four lengths: x, y, z, and the cores of a chip.
    device_coordinates: ints [tasks, devices per task, 4]. None means one task
      that has a device in every place, numbered with cores fastest, then x, y
      and z.
    devices: JAX devices [tasks, devices per task], or None.
    num_slices: Number of slices that are stacked along z.

  Attributes:
    mesh_shape: A tuple of four ints.
    device_coordinates: int32 [tasks, devices per task, 4], read-only.
    devices: An object array [tasks, devices per task], read-only, or None.
    num_slices: An int.

  Raises:
    ValueError: Coordinates are outside of the mesh, two devices have the same
      place, or `num_slices` does not divide the z length.
    TypeError: An array has the wrong shape, or a value is not an integer.

  Example:
    >>> import flaxshard as fs
    >>> topology = fs.Topology((2, 2, 1, 2))
    >>> topology
    Topology(mesh_shape=(2, 2, 1, 2), num_tasks=1, num_tpus_per_task=8)
    >>> topology.tpu_device_name_at_coordinates((1, 0, 0, 1))
    '/task:0/device:TPU:3'

  Source: `tf.tpu.experimental.Topology`.
  """

  def __init__(
    self,
    mesh_shape: npt.ArrayLike,
    device_coordinates: npt.ArrayLike | None = None,
    devices: Any = None,
    num_slices: int = 1,
  ) -> None:
    shape = coordinates_lib.mesh_lengths("mesh_shape", mesh_shape)
    num_slices = checks.integer("num_slices", num_slices, minimum=1)
    if shape[2] % num_slices:
      raise ValueError(
        f"mesh_shape[2] must be a multiple of num_slices={num_slices}, because "
        f"slices are stacked along z, got {shape[2]}."
      )
    if device_coordinates is None:
      device_coordinates = coordinates_lib.all_coordinates(shape)[None]
    argument = "device_coordinates"
    coordinates = coordinates_lib.in_mesh(
      argument, device_coordinates, 3, shape
    )
    self.mesh_shape = shape
    self.device_coordinates = coordinates_lib.read_only(coordinates, np.int32)
    # [*mesh_shape], with -1 where there is no device.
    self._device_numbers = coordinates_lib.number_places(
      argument, coordinates, shape
    )
    if devices is not None:
      devices = coordinates_lib.read_only(devices, object)
      wanted = self.device_coordinates.shape[:2]
      if devices.shape != wanted:
        raise ValueError(
          f"devices must have the shape {list(wanted)}, of tasks and of the "
          f"devices in each, got {list(devices.shape)}."
        )
    self.devices: np.ndarray | None = devices
    self.num_slices = num_slices

  @classmethod
  def from_devices(
    cls,
    devices: Iterable[jax.Device] | None = None,
    mesh_shape: npt.ArrayLike | None = None,
  ) -> Topology:
    """Reads a topology from JAX devices.

    Tasks are the processes in ascending order. The coordinates of TPUs are
    shifted so that each slice starts at zeros. Other devices get a mesh of
    shape (devices per process, processes, 1, 1), and each process keeps the
    order of its devices. Within a task, devices are numbered with cores
    fastest, then x, y and z.

    Args:
      devices: The devices; None means `jax.devices()`.
      mesh_shape: Four lengths. Devices other than TPUs fill this mesh process
        by process, with cores fastest, then x, y and z. Eight CPU devices can
        simulate a TPU of shape (2, 2, 1, 2). For TPUs it must be the shape that
        they have.

    Raises:
      ValueError: There are no devices, two have the same place, processes have
        different numbers of devices, slices have different shapes, or the mesh
        has another number of places than there are devices.
      TypeError: An element is not a device.

    Example:
      >>> import flaxshard as fs, jax
      >>> fs.Topology.from_devices(jax.devices()[:1]).mesh_shape
      (1, 1, 1, 1)
    """
    # Sorting is stable: each process keeps the order of its devices.
    listed = sorted(
      compile_only.all_devices() if devices is None else devices,
      key=lambda device: device.process_index,
    )
    # NumPy would turn a list of sequence-like objects into a 2D array.
    flat = np.empty(len(listed), object)
    flat[:] = listed
    # `np.unique` numbers the processes without gaps.
    processes = [device.process_index for device in listed]
    tasks = np.unique(processes, return_inverse=True)[1]
    counts = np.bincount(tasks).tolist()
    if len(set(counts)) != 1:
      raise ValueError(
        "devices must be equally many in all processes, at least one, got "
        f"{counts}."
      )
    if mesh_shape is not None:
      mesh_shape = coordinates_lib.mesh_lengths("mesh_shape", mesh_shape)
    num_slices = 1
    if all(map(is_tpu, flat)):
      shape, coordinates, num_slices = _read_tpu_coordinates(flat)
    else:
      shape = mesh_shape or (counts[0], len(counts), 1, 1)
      if math.prod(shape) != len(flat):
        raise ValueError(
          "the product of mesh_shape must be the number of devices, "
          f"{len(flat)}, got {shape}."
        )
      coordinates = coordinates_lib.all_coordinates(shape)
    if mesh_shape not in (None, shape):
      raise ValueError(
        f"mesh_shape must be the shape of the TPUs, {shape}, got {mesh_shape}."
      )
    x, y, z, core = coordinates.T
    # The last key of lexsort is the primary one.
    order = np.lexsort((core, x, y, z, tasks)).reshape(len(counts), -1)
    return cls(shape, coordinates[order], flat[order], num_slices)

  @classmethod
  def named(cls, name: str) -> Topology:
    """Returns the topology of TPUs with a name, for compiling alone.

    It needs the TPU compiler, which `pip install "flaxshard[tpu]"` installs,
    and no TPU. Programs are compiled for the devices, but nothing can run on
    them or be stored there.

    Args:
      name: A generation of TPUs (v2, v3, v4, v5e, v5p, v6e, tpu7x), and the
        number of chips of a slice along each axis: `"v5e:2x4"`, `"v5p:4x4x8"`.
        `"2*v5e:4x4"` has two slices, which the data-center network connects.

    Raises:
      ValueError: There is no such topology, or no TPU compiler.

    Source: `jax.experimental.topologies.get_topology_desc`.
    """
    return cls.from_devices(compile_only.named_devices(name))

  # -- Sizes.

  @property
  def mesh_rank(self) -> int:
    """The number of dimensions of the mesh: 4."""
    return len(self.mesh_shape)

  @property
  def slice_shape(self) -> tuple[int, int, int, int]:
    """The shape of the mesh of one slice."""
    x, y, z, cores = self.mesh_shape
    return x, y, z // self.num_slices, cores

  @property
  def num_tasks(self) -> int:
    """The number of tasks."""
    return self.device_coordinates.shape[0]

  @property
  def num_tpus_per_task(self) -> int:
    """The number of devices of each task, TPUs or not."""
    return self.device_coordinates.shape[1]

  @functools.cached_property
  def missing_devices(self) -> np.ndarray:
    """The places without a device: int64 [missing, 4], read-only."""
    missing = np.argwhere(self._device_numbers < 0)
    return coordinates_lib.read_only(missing, np.int64)

  # -- Lookups.

  def device_numbers(
    self, argument: str, coordinates: npt.ArrayLike, ndim: int
  ) -> np.ndarray:
    """Returns the numbers of the devices at coordinates.

    Args:
      argument: Name of the coordinates, for error messages.
      coordinates: ints [..., 4].
      ndim: The number of their dimensions.

    Returns:
      int32 [...]: the number of a task times `num_tpus_per_task`, plus the
      number of the device within the task.

    Raises:
      ValueError: Coordinates are outside of the mesh, or have no device.
      TypeError: The shape is wrong, or they are not integers.
    """
    at = coordinates_lib.in_mesh(argument, coordinates, ndim, self.mesh_shape)
    numbers = self._device_numbers[tuple(np.moveaxis(at, -1, 0))]
    condition = "must be a place with a device"
    coordinates_lib.raise_if_any(numbers < 0, argument, at, condition)
    return numbers

  def _task_and_device(self, coordinates: npt.ArrayLike) -> tuple[int, int]:
    number = self.device_numbers("device_coordinates", coordinates, 1)
    return divmod(int(number), self.num_tpus_per_task)

  def task_ordinal_at_coordinates(
    self, device_coordinates: npt.ArrayLike
  ) -> int:
    """Returns the number of the task that drives the device at coordinates.

    Args:
      device_coordinates: Four ints: x, y, z, and the core.

    Raises:
      ValueError: They are outside of the mesh, or have no device.
      TypeError: They are not integers.
    """
    return self._task_and_device(device_coordinates)[0]

  def tpu_device_ordinal_at_coordinates(
    self, device_coordinates: npt.ArrayLike
  ) -> int:
    """Returns the number, within its task, of the device at coordinates.

    Args:
      device_coordinates: Four ints: x, y, z, and the core.

    Raises:
      ValueError: They are outside of the mesh, or have no device.
      TypeError: They are not integers.
    """
    return self._task_and_device(device_coordinates)[1]

  def cpu_device_name_at_coordinates(
    self, device_coordinates: npt.ArrayLike, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of the host of the device at coordinates.

    Args:
      device_coordinates: Four ints: x, y, z, and the core.
      job: The job in the name, as in `/job:worker/task:0`; None leaves it out.

    Raises:
      ValueError: The coordinates are outside of the mesh, or have no device.
      TypeError: They are not integers.
    """
    task, _ = self._task_and_device(device_coordinates)
    return f"{_job_prefix(job)}/task:{task}/device:CPU:0"

  def tpu_device_name_at_coordinates(
    self, device_coordinates: npt.ArrayLike, job: str | None = None
  ) -> str:
    """Returns TensorFlow's name of the device at coordinates.

    Args:
      device_coordinates: Four ints: x, y, z, and the core.
      job: The job in the name, as in `/job:worker/task:0`; None leaves it out.

    Raises:
      ValueError: The coordinates are outside of the mesh, or have no device.
      TypeError: They are not integers.
    """
    task, device = self._task_and_device(device_coordinates)
    return f"{_job_prefix(job)}/task:{task}/device:TPU:{device}"

  def __repr__(self) -> str:
    slices = f", num_slices={self.num_slices}" if self.num_slices > 1 else ""
    return (
      f"Topology(mesh_shape={self.mesh_shape}, num_tasks={self.num_tasks}, "
      f"num_tpus_per_task={self.num_tpus_per_task}{slices})"
    )


def _job_prefix(job: str | None) -> str:
  return "" if job is None else f"/job:{job}"


def slice_index(device: Any) -> int:
  """Returns the number of a device's slice, or 0 if it has none."""
  # Newer versions of JAX say partition_index; CPU devices have neither.
  partition = getattr(device, "partition_index", None)
  return getattr(device, "slice_index", partition) or 0


def is_tpu(device: Any) -> bool:
  """Returns whether a device has coordinates in a torus of TPUs."""
  # GPUs may have `coords` too, but those say nothing about distances.
  platform = getattr(device, "platform", "tpu")
  return hasattr(device, "coords") and platform not in _NOT_TPU


def _read_tpu_coordinates(
  devices: np.ndarray,
) -> tuple[Lengths, np.ndarray, int]:
  """Returns the mesh of TPUs, each one's coordinates, the number of slices."""
  coordinates = np.array(
    [(*d.coords, getattr(d, "core_on_chip", 0)) for d in devices]
  )
  # Numbered without gaps.
  slices = np.unique(list(map(slice_index, devices)), return_inverse=True)[1]
  num_slices = int(slices.max()) + 1
  shapes = []
  for number in range(num_slices):
    in_slice = slices == number
    # A slice may be a part of a larger torus, and then not start at zeros.
    coordinates[in_slice] -= coordinates[in_slice].min(axis=0)
    shapes.append((coordinates[in_slice].max(axis=0) + 1).tolist())
  if any(shape != shapes[0] for shape in shapes):
    raise ValueError(
      f"devices must be slices of equal shape, got the shapes {shapes}."
    )
  x, y, z, cores = shapes[0]
  coordinates[:, 2] += z * slices
  return (x, y, z * num_slices, cores), coordinates, num_slices
