"""Devices of JAX: their slices, and their coordinates in a mesh of cores."""

from __future__ import annotations

from collections.abc import Iterable
import math
from typing import Any

import jax
import numpy as np

from flaxshard.partitioning import coordinates as coordinates_lib
from flaxshard.partitioning.coordinates import Lengths

_NOT_TPU = ("cpu", "gpu", "cuda", "rocm")


def check_devices(argument: str, devices: Any) -> list[Any]:
  """Returns devices as a list.

  Args:
    argument: Name of the argument, for error messages.
    devices: An iterable of JAX devices.

  Raises:
    TypeError: `devices` is not iterable, or an element is not a device.
    ValueError: There are no devices, or a device is given twice.
  """
  if not isinstance(devices, Iterable):
    raise TypeError(f"{argument} must be a list of devices, got {devices!r}.")
  devices = list(devices)
  for i, device in enumerate(devices):
    # Not isinstance(jax.Device): descriptions of devices are accepted too.
    if not hasattr(device, "process_index"):
      raise TypeError(f"{argument}[{i}] must be a JAX device, got {device!r}.")
  if not devices:
    raise ValueError(f"{argument} must have at least one device, got none.")
  # JAX has one object for each device.
  if len({id(device) for device in devices}) != len(devices):
    raise ValueError(f"{argument} must not have a device twice, got {devices}.")
  return devices


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


def read_topology(
  devices: Iterable[jax.Device], mesh_shape: Any
) -> tuple[Lengths, np.ndarray, np.ndarray, int]:
  """Reads the arguments of a `Topology` from devices.

  Args:
    devices: JAX devices.
    mesh_shape: Four lengths, or None; see `Topology.from_devices`.

  Returns:
    The shape of the mesh, the coordinates [processes, devices per process, 4],
    the devices [processes, devices per process], and the number of slices.
  """
  argument = "Topology.from_devices: devices"
  checked = check_devices(argument, devices)
  # NumPy would turn a list of sequence-like objects into a 2D array.
  flat = np.empty(len(checked), object)
  flat[:] = checked
  # `np.unique` numbers the processes and slices without gaps.
  processes = [device.process_index for device in flat]
  tasks = np.unique(processes, return_inverse=True)[1]
  slices = np.unique([slice_index(d) for d in flat], return_inverse=True)[1]
  num_slices = int(slices.max()) + 1
  per_task = _check_equal_counts(argument, "processes", tasks)
  if mesh_shape is not None:
    mesh_shape = coordinates_lib.mesh_lengths(
      "Topology.from_devices: mesh_shape", mesh_shape
    )
  are_tpus = [is_tpu(device) for device in flat]
  if any(are_tpus):
    if not all(are_tpus):
      raise ValueError(
        f"{argument} must all be TPUs or none, got "
        f"{flat[are_tpus.index(True)]!r} and {flat[are_tpus.index(False)]!r}."
      )
    shape, coordinates = _read_tpu_coordinates(argument, flat, slices)
    if mesh_shape not in (None, shape):
      raise ValueError(
        "Topology.from_devices: mesh_shape must be the shape of the TPUs, "
        f"{shape}, got {mesh_shape}."
      )
  else:
    per_slice = _check_equal_counts(argument, "slices", slices)
    shape = mesh_shape or (per_task, per_slice // per_task, num_slices, 1)
    if math.prod(shape) != len(flat):
      raise ValueError(
        "Topology.from_devices: the product of mesh_shape must be the number "
        f"of devices, {len(flat)}, got {shape}."
      )
    coordinates = np.empty((len(flat), 4), np.int64)
    by_slice_and_task = np.lexsort((tasks, slices))
    coordinates[by_slice_and_task] = coordinates_lib.all_coordinates(shape)
  x, y, z, core = coordinates.T
  # The last key of lexsort is the primary one.
  order = np.lexsort((core, x, y, z, tasks)).reshape(-1, per_task)
  return shape, coordinates[order], flat[order], num_slices


def _check_equal_counts(argument: str, kind: str, numbers: np.ndarray) -> int:
  """Returns the number of devices of each process or slice, if all are equal.

  Args:
    argument: Name of the devices, for the error message.
    kind: "processes" or "slices".
    numbers: int [devices], the number of each device's process or slice.
  """
  counts = np.bincount(numbers)
  if counts.min() != counts.max():
    raise ValueError(
      f"{argument} must be equally many in all {kind}, got {counts.tolist()}."
    )
  return int(counts[0])


def _read_tpu_coordinates(
  argument: str, devices: np.ndarray, slices: np.ndarray
) -> tuple[Lengths, np.ndarray]:
  """Returns the shape of the mesh of TPUs, and each device's coordinates."""
  raw = [(*d.coords, getattr(d, "core_on_chip", 0)) for d in devices]
  coordinates = coordinates_lib.integer_array(
    f"{argument}' coords and core_on_chip", raw, None, 4
  )
  num_slices = int(slices.max()) + 1
  shapes = []
  for number in range(num_slices):
    in_slice = slices == number
    # A slice may be a part of a larger torus, and then not start at zeros.
    coordinates[in_slice] -= coordinates[in_slice].min(axis=0)
    shapes.append((coordinates[in_slice].max(axis=0) + 1).tolist())
  if any(shape != shapes[0] for shape in shapes):
    raise ValueError(
      f"{argument} must be slices of equal shape, got the shapes {shapes}."
    )
  x, y, z, cores = shapes[0]
  coordinates[:, 2] += z * slices
  shape = coordinates_lib.mesh_lengths(
    f"{argument}' mesh", (x, y, z * num_slices, cores)
  )
  # `Topology` checks for two devices in one place too, but its error would name
  # an argument that the caller did not pass.
  coordinates_lib.lookup_table(argument, coordinates, shape)
  return shape, coordinates
