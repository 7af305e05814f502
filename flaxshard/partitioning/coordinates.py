"""Coordinates in a mesh of cores: checked, counted, read off devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import math
from typing import Any

import jax
import numpy as np

Lengths = tuple[int, int, int, int]

# More than any machine has: a slip of the pen allocates no terabytes.
_MOST_CORES = 2**24

_NO_TPUS = ("cpu", "gpu", "cuda", "rocm")


def integer(
  argument: str, value: Any, least: int, below: int | None = None
) -> int:
  """Checks an integer from `least` on and, unless None, under `below`."""
  if isinstance(value, (bool, np.bool_)) or not isinstance(
    value, (int, np.integer)
  ):
    raise TypeError(f"{argument} must be an integer, got {value!r}.")
  if below is None:
    allowed, fits = f"at least {least}", value >= least
  else:
    allowed, fits = f"between {least} and {below - 1}", least <= value < below
  if not fits:
    raise ValueError(f"{argument} must be {allowed}, got {value!r}.")
  return int(value)


def integers(argument: str, value: Any, *shape: int | None) -> np.ndarray:
  """Checks an array of integers; a None in `shape` is any length from 1 on."""
  lengths = ", ".join("n" if n is None else str(n) for n in shape)
  wanted = f"{argument} must be integers of shape [{lengths}], got"
  try:
    array = np.asarray(value)
  except ValueError as e:  # rows of different lengths
    raise ValueError(f"{wanted} {value!r}.") from e
  if array.ndim != len(shape) or not all(
    m == n or (n is None and m) for m, n in zip(array.shape, shape, strict=True)
  ):
    raise ValueError(f"{wanted} shape {list(array.shape)}.")
  if array.dtype.kind not in "iu":
    raise TypeError(f"{wanted} {value!r}.")
  return array.astype(np.int64)


def lengths(argument: str, value: Any) -> Lengths:
  """Checks four positive integers, a mesh's shape or a part's."""
  x, y, z, cores = map(int, integers(argument, value, 4))
  if min(x, y, z, cores) < 1 or x * y * z * cores > _MOST_CORES:
    raise ValueError(
      f"{argument} must be four positive integers with a product of at most "
      f"{_MOST_CORES}, got {(x, y, z, cores)}."
    )
  return x, y, z, cores


def refuse(
  bad: np.ndarray | np.bool_,
  argument: str,
  coordinates: np.ndarray,
  wanted: str,
) -> None:
  """Raises a ValueError with the first of `coordinates` that is `bad`.

  Args:
    bad: bool [...].
    argument: What holds the coordinates.
    coordinates: ints [..., 4].
    wanted: What they must be: the middle of the message.
  """
  if bad.any():
    index = np.unravel_index(int(bad.argmax()), bad.shape)
    name = f"{argument}[{', '.join(map(str, index))}]" if index else argument
    raise ValueError(f"{name} {wanted}, got {coordinates[index].tolist()}.")


def count_through(shape: Sequence[int]) -> np.ndarray:
  """Returns all coordinates of a mesh: cores innermost, then x, y and z.

  The order in which the cores of a TPU host are numbered.

  Args:
    shape: Four lengths.

  Returns:
    int64 [product of `shape`, 4].

  Example:
    >>> count_through((2, 2, 1, 1)).tolist()
    [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]
  """
  x, y, z, cores = shape
  index = np.indices((z, y, x, cores)).reshape(4, -1)
  return index[[2, 1, 0, 3]].T


def check_inside(
  argument: str, coordinates: np.ndarray, mesh_shape: Sequence[int]
) -> None:
  """Raises a ValueError for coordinates [..., 4] outside of a mesh."""
  outside = np.logical_or(coordinates < 0, coordinates >= np.array(mesh_shape))
  wanted = f"must be from 0 on and below the mesh's {list(mesh_shape)}"
  refuse(outside.any(axis=-1), argument, coordinates, wanted)


def occupants(
  argument: str, coordinates: np.ndarray, mesh_shape: Sequence[int]
) -> np.ndarray:
  """Returns which row of `coordinates` is where in a mesh.

  Args:
    argument: What holds the coordinates, for errors.
    coordinates: ints [..., 4]; rows are numbered through the leading axes.
    mesh_shape: The lengths of the mesh.

  Returns:
    int32 of shape `mesh_shape`: the number of a row, or -1.

  Raises:
    ValueError: Coordinates outside of the mesh, or the same ones twice.
  """
  check_inside(argument, coordinates, mesh_shape)
  places = tuple(np.moveaxis(coordinates, -1, 0))
  rows = np.arange(places[0].size, dtype=np.int32).reshape(places[0].shape)
  table = np.full(mesh_shape, -1, np.int32)
  # Of two rows with one place, only the later one is left in the table.
  table[places] = rows
  wanted = "must have a place of its own, but another one has the same"
  refuse(table[places] != rows, argument, coordinates, wanted)
  return table


def read_only(array: np.ndarray) -> np.ndarray:
  """Returns the array, which can no longer be written to."""
  array.flags.writeable = False
  return array


def of_devices(
  devices: Iterable[jax.Device], mesh_shape: Any
) -> tuple[Lengths, np.ndarray, np.ndarray, int]:
  """Returns where jax devices lie; see `Topology.from_devices`.

  Args:
    devices: jax devices.
    mesh_shape: Four lengths, or None.

  Returns:
    The arguments of a Topology: the mesh's shape, the coordinates, the devices
    and the number of slices.
  """
  where = "Topology.from_devices: devices"
  every = _device_array(where, devices)
  # Numbers without gaps for the processes and slices among these devices.
  processes = [device.process_index for device in every]
  tasks = np.unique(processes, return_inverse=True)[1]
  slices = np.unique([_slice_of(d) for d in every], return_inverse=True)[1]
  num_slices = int(slices.max()) + 1
  per_task = _equal_parts(where, "processes", tasks)
  if mesh_shape is not None:
    mesh_shape = lengths("Topology.from_devices: mesh_shape", mesh_shape)
  if any(tpus := [_is_tpu(device) for device in every]):
    if not all(tpus):
      raise ValueError(
        f"{where} must all be TPUs or none, got {every[tpus.index(True)]!r} "
        f"and {every[tpus.index(False)]!r}."
      )
    shape, coordinates = _physical(where, every, slices)
    if mesh_shape not in (None, shape):
      raise ValueError(
        f"Topology.from_devices: mesh_shape must be that of the TPUs, {shape}, "
        f"got {mesh_shape}."
      )
  else:
    per_slice = _equal_parts(where, "slices", slices)
    shape = mesh_shape or (per_task, per_slice // per_task, num_slices, 1)
    if math.prod(shape) != len(every):
      raise ValueError(
        "Topology.from_devices: mesh_shape must have a place for each of the "
        f"{len(every)} devices and no more, got {shape}."
      )
    coordinates = np.empty((len(every), 4), np.int64)
    coordinates[np.lexsort((tasks, slices))] = count_through(shape)
  x, y, z, core = coordinates.T
  order = np.lexsort((core, x, y, z, tasks)).reshape(-1, per_task)
  return shape, coordinates[order], every[order], num_slices


def _device_array(where: str, devices: Any) -> np.ndarray:
  if not isinstance(devices, Iterable):
    raise TypeError(f"{where} must be a list of devices, got {devices!r}.")
  listed = list(devices)
  for i, device in enumerate(listed):
    if not hasattr(device, "process_index"):
      raise TypeError(f"{where}[{i}] must be a jax device, got {device!r}.")
  if not listed:
    raise ValueError(f"{where} must be at least one, got none.")
  every = np.empty(len(listed), object)
  every[:] = listed
  return every


def _slice_of(device: Any) -> int:
  # jax.distributed calls it partition_index by now; CPU devices have neither.
  partition = getattr(device, "partition_index", None)
  return getattr(device, "slice_index", partition) or 0


def _is_tpu(device: Any) -> bool:
  # GPUs may have coords as well, which say nothing about distances.
  platform = getattr(device, "platform", "tpu")
  return hasattr(device, "coords") and platform not in _NO_TPUS


def _equal_parts(where: str, parts: str, numbers: np.ndarray) -> int:
  """Returns how many devices each process or slice has: all the same."""
  sizes = np.bincount(numbers)
  if sizes.min() != sizes.max():
    raise ValueError(
      f"{where} must be equally many in all {parts}, got {sizes.tolist()}."
    )
  return int(sizes[0])


def _physical(
  where: str, every: np.ndarray, slices: np.ndarray
) -> tuple[Lengths, np.ndarray]:
  """Reads a mesh and coordinates off TPUs, slices stacked along z."""
  read = [(*d.coords, getattr(d, "core_on_chip", 0)) for d in every]
  coordinates = integers(f"{where}' coords and core_on_chip", read, None, 4)
  numbers = range(int(slices.max()) + 1)
  for number in numbers:
    # Where a slice begins does not matter: it may be part of a larger torus.
    coordinates[slices == number] -= coordinates[slices == number].min(axis=0)
  shapes = [
    (coordinates[slices == n].max(axis=0) + 1).tolist() for n in numbers
  ]
  if any(shape != shapes[0] for shape in shapes):
    raise ValueError(
      f"{where} must be slices of one shape, got the shapes {shapes}."
    )
  x, y, z, cores = shapes[0]
  coordinates[:, 2] += z * slices
  shape = lengths(f"{where}' mesh", (x, y, z * len(shapes), cores))
  occupants(where, coordinates, shape)
  return shape, coordinates
