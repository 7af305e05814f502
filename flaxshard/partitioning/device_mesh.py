"""The device mesh of a strategy: one axis for replicas, then logical axes.

`jax.jit` refuses arrays whose meshes have different device orders, so every
sharding of a strategy uses this mesh. Without names from the user the logical
devices of a replica get one axis for each prime factor of their number: `m0`,
`m1`, ... Any way to split a tensor over all of them is then a choice of axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import itertools
from typing import Any

import jax
from jax.experimental import mesh_utils
import numpy as np

from flaxshard.core import checks
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import topology as topology_lib
from flaxshard.partitioning.device_assignment import DeviceAssignment
from flaxshard.partitioning.mesh import REPLICA
from flaxshard.partitioning.topology import Topology

# What other programs call the axis that batches are split over.
_BATCH_AXES = frozenset(("batch", "data", "dp", "fsdp"))


def create(
  device_assignment: DeviceAssignment | Topology | str | None,
  devices: Sequence[Any] | None,
  mesh_shape: Mapping[str, int] | None,
  axis_type: jax.sharding.AxisType,
) -> jax.sharding.Mesh:
  """Returns the mesh for the arguments of `Strategy`.

  Args:
    device_assignment: The devices of each replica; or a topology or its name,
      whose devices are ordered here; or None.
    devices: The devices in their order, or None.
    mesh_shape: Names and sizes of the axes, or None.
    axis_type: The type of every axis: Auto or Explicit.

  Raises:
    TypeError: `device_assignment` is of another type.
    ValueError: An argument has a wrong value, or they do not fit together.
  """
  is_ordered = devices is not None  # by the user
  if isinstance(device_assignment, str):
    device_assignment = Topology.named(device_assignment)
  if isinstance(device_assignment, Topology):
    if device_assignment.devices is None:
      raise ValueError(
        f"{device_assignment!r} has no devices; create it with "
        "Topology.from_devices or Topology.named."
      )
    devices, is_ordered = device_assignment.devices.tolist(), False
  elif not isinstance(device_assignment, DeviceAssignment | None):
    raise TypeError(
      "device_assignment must be a DeviceAssignment, a Topology or its name, "
      f"got {type(device_assignment).__name__}; devices go to devices=."
    )
  if isinstance(device_assignment, DeviceAssignment):
    grid = assigned_devices(device_assignment, devices)
    axes = {REPLICA: len(grid), **prime_axes(grid.shape[1])}
    if mesh_shape is not None:
      axes = axis_sizes(mesh_shape, grid.size)
    if axes[REPLICA] != len(grid):
      raise ValueError(
        f"mesh_shape={mesh_shape!r} has another number of replicas than "
        f"device_assignment, which has {len(grid)}."
      )
  else:
    # An array of devices may have several dimensions.
    flat = np.array(
      compile_only.all_devices() if devices is None else devices, object
    ).ravel()
    known = {d for d in flat if isinstance(d, jax.Device)}
    if not known or len(known) < flat.size:
      raise ValueError(
        f"devices must be JAX devices, at least one, and each once, got "
        f"{devices!r}."
      )
    # One replica per device.
    axes = axis_sizes(
      {REPLICA: -1} if mesh_shape is None else mesh_shape, flat.size
    )
    grid = flat.reshape(axes[REPLICA], -1)
    if not is_ordered:
      grid = order_devices(flat.tolist(), grid.shape[1])
  # jax.make_mesh would reorder the devices, and its axes are Explicit.
  return jax.sharding.Mesh(
    grid.reshape(tuple(axes.values())),
    tuple(axes),
    axis_types=(axis_type,) * len(axes),
  )


# -- The parts of `create`.


def prime_axes(count: int) -> dict[str, int]:
  """Returns names and sizes of the axes of `count` logical devices.

  Example:
    >>> prime_axes(12)
    {'m0': 2, 'm1': 2, 'm2': 3}
  """
  axes: dict[str, int] = {}
  divisor = 2
  # Only primes divide: `count` has no smaller factors any more.
  while count > 1:
    while count % divisor == 0:
      axes[f"m{len(axes)}"] = divisor
      count //= divisor
    divisor += 1
  return axes


def assigned_devices(
  assignment: DeviceAssignment, devices: Sequence[Any] | None
) -> np.ndarray:
  """Returns the devices of an assignment, [replicas, logical devices].

  Args:
    assignment: The assignment.
    devices: The devices to use; None means those of the topology, or all
      devices if it was made without. Device n of task t in the topology is
      the n-th device of process t. In a program of one process the devices are
      given to the tasks in order.

  Raises:
    ValueError: There are fewer devices than the assignment needs.
  """
  topology = assignment.topology
  cores = assignment.core_assignment
  numbers = topology.device_numbers("core_assignment", cores, 3)
  if devices is None and topology.devices is not None:
    return topology.devices.ravel()[numbers]
  found = Topology.from_devices(devices)
  assert found.devices is not None
  # One process can stand in for all tasks.
  is_complete = found.num_tpus_per_task == topology.num_tpus_per_task
  size = found.devices.size
  if numbers.max() >= size or not (is_complete or found.num_tasks == 1):
    raise ValueError(
      f"device_assignment needs device {numbers.max()} of {topology!r}, got "
      f"{size} devices in {found.num_tasks} processes; all processes must have "
      "the devices of a task."
    )
  return found.devices.ravel()[numbers]


def axis_sizes(mesh_shape: Any, num_devices: int) -> dict[str, int]:
  """Returns the sizes of all axes, with `"replica"` first.

  Args:
    mesh_shape: Axis sizes by name. Without `"replica"` there is one replica;
      an axis with a name such as `"data"` is then a mistake. One size may be
      -1, which means the devices that are left.
    num_devices: The product of the sizes.

  Raises:
    TypeError: `mesh_shape` is not a dict, or a size is not an integer.
    ValueError: A size is out of range, two are -1, the product is wrong, or an
      axis has the name of one for batches, and no axis is `"replica"`.

  Example:
    >>> axis_sizes({"model": 2, "replica": -1}, 8)
    {'replica': 4, 'model': 2}
  """
  where = f"mesh_shape={mesh_shape!r}"
  if not isinstance(mesh_shape, Mapping):
    raise TypeError(
      f"{where} must be a dict of axis sizes, such as "
      "{'replica': 4, 'model': 2}."
    )
  if REPLICA not in mesh_shape:
    message = (
      f"{where} has no axis 'replica', so there is one replica, which computes "
      f"all of each batch on each of {num_devices} devices. Name the axis that "
      "batches are split over 'replica', or write 'replica': 1 as well."
    )
    if not _BATCH_AXES.isdisjoint(mesh_shape):
      raise ValueError(message)
    checks.warn(message)
  sizes = {REPLICA: 1}
  for name, size in mesh_shape.items():
    sizes[name] = checks.integer(f"mesh_shape[{name!r}]", size, minimum=-1)
  try:
    # NumPy finds the size that is -1.
    shape = np.empty(num_devices).reshape(tuple(sizes.values())).shape
  except ValueError as e:
    raise ValueError(f"{where} of {num_devices} devices: {e}.") from e
  return dict(zip(sizes, shape, strict=True))


def order_devices(
  devices: Sequence[Any], num_logical_devices: int
) -> np.ndarray:
  """Arranges devices as a grid [replicas, logical devices].

  The logical devices of a replica are neighbors in the network of a slice. The
  replicas of a slice follow each other, so that the slow network between the
  slices is outermost.

  Args:
    devices: JAX devices.
    num_logical_devices: Number of logical devices of a replica.

  Raises:
    ValueError: A replica would lie on more than one slice.
  """
  number = topology_lib.slice_index
  by_slice = itertools.groupby(sorted(devices, key=number), number)
  slices = [list(in_slice) for _, in_slice in by_slice]
  grids = []
  for in_slice in slices:
    if len(in_slice) % num_logical_devices:
      raise ValueError(
        f"mesh_shape has {num_logical_devices} logical devices per replica, "
        f"which does not divide slices of {[len(s) for s in slices]} devices. "
        "Pass a device_assignment for replicas that lie on several slices."
      )
    shape = (len(in_slice) // num_logical_devices, num_logical_devices)
    grid = np.array(in_slice, object)
    if topology_lib.is_tpu(in_slice[0]):
      # JAX knows the torus of each TPU version. Without splitting physical axes
      # it would refuse a replica that takes only a part of one.
      try:
        grid = mesh_utils.create_device_mesh(
          shape, in_slice, allow_split_physical_axes=True
        )
      except TypeError:
        # For some large tori, such as 16 x 20 x 28, JAX finds no assignment of
        # the axes (JAX 0.10.2). Neighbors along x are then next to each other.
        in_slice.sort(key=lambda d: (*d.coords[::-1], d.core_on_chip))
        grid = np.array(in_slice, object)
    grids.append(grid.reshape(shape))
  return np.concatenate(grids)
