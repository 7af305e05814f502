"""One mesh for a strategy: the replicas first, then their logical devices.

Every sharding of a strategy derives from this mesh, as jit refuses to mix two
orders of devices. Without names of their own the logical devices of a replica
get one axis for each prime factor of their number: `m0`, `m1`, ... Any way of
splitting a tensor over all of them is then a choice of axes for each dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
import jax.numpy as jnp
import numpy as np

from flaxshard.partitioning.device_assignment import DeviceAssignment

REPLICA = "replica"

P = jax.sharding.PartitionSpec


def create(
  device_assignment: DeviceAssignment | None,
  devices: Sequence[Any] | None,
  mesh_shape: Mapping[str, int] | None,
  axis_type: jax.sharding.AxisType,
) -> jax.sharding.Mesh:
  """Returns the mesh of a Strategy, whose arguments these are."""
  if device_assignment is not None and not isinstance(
    device_assignment, DeviceAssignment
  ):
    raise TypeError(
      "device_assignment must be a DeviceAssignment, got "
      f"{device_assignment!r}."
    )
  if axis_type not in (
    jax.sharding.AxisType.Auto,
    jax.sharding.AxisType.Explicit,
  ):
    raise ValueError(
      f"axis_type={axis_type!r} must be AxisType.Auto or AxisType.Explicit."
    )
  if devices is not None:
    devices = _check_devices(devices)
  named = None
  if device_assignment is not None:
    laid = assigned_devices(device_assignment, devices)
    if mesh_shape is not None:
      named = named_sizes(mesh_shape, laid.size)
      if named[REPLICA] != len(laid):
        raise ValueError(
          f"mesh_shape={dict(mesh_shape)!r} has {named[REPLICA]} replicas; "
          f"device_assignment has {len(laid)}."
        )
  else:
    every = jax.devices() if devices is None else devices
    if mesh_shape is not None:
      named = named_sizes(mesh_shape, len(every))
    replicas = len(every) if named is None else named[REPLICA]
    if devices is None:
      laid = lay_out(every, len(every) // replicas)
    else:
      laid = np.array(every, object).reshape(replicas, -1)
  if named is not None:
    named.pop(REPLICA)
  return make(laid, named, axis_type)


def make(
  devices: np.ndarray,
  logical_axes: Mapping[str, int] | None = None,
  axis_type: jax.sharding.AxisType = jax.sharding.AxisType.Auto,
) -> jax.sharding.Mesh:
  """Returns the mesh over devices `[replicas, logical devices]`, in that order.

  Args:
    devices: JAX devices, an object array of two dimensions.
    logical_axes: Names and sizes of the axes of the logical devices, the first
      one slowest; None: the prime factors, in ascending order.
    axis_type: The type of every axis.

  Example:
    >>> devices = np.array(jax.devices() * 6)[:6].reshape(1, 6)
    >>> dict(make(devices).shape)
    {'replica': 1, 'm0': 2, 'm1': 3}
  """
  if logical_axes is None:
    logical_axes = prime_axes(devices.shape[1])
  shape = (devices.shape[0], *logical_axes.values())
  names = (REPLICA, *logical_axes)
  return jax.sharding.Mesh(
    devices.reshape(shape), names, axis_types=(axis_type,) * len(names)
  )


def logical_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
  """Returns the names of the axes of a replica's logical devices."""
  return mesh.axis_names[1:]


def num_logical_devices(mesh: jax.sharding.Mesh) -> int:
  """Returns the number of logical devices of a replica."""
  return mesh.devices[0].size if logical_axes(mesh) else 1


def logical_device(mesh: jax.sharding.Mesh, index: int) -> jax.sharding.Mesh:
  """Returns the mesh of logical device `index` of every replica.

  Its axis is Auto: eager computations on a part of the devices cannot enter
  the context that Explicit axes ask for.
  """
  devices = mesh.devices.reshape(mesh.devices.shape[0], -1)[:, index]
  return jax.sharding.Mesh(devices, (REPLICA,))


def replica(mesh: jax.sharding.Mesh, index: int) -> jax.sharding.Mesh:
  """Returns the mesh of the logical devices of replica `index`."""
  return jax.sharding.Mesh(
    mesh.devices[index : index + 1], mesh.axis_names, axis_types=mesh.axis_types
  )


def partition_spec(
  mesh: jax.sharding.Mesh, partition_dimensions: Sequence[int]
) -> P:
  """Returns the spec that splits dimensions over all logical devices.

  Args:
    mesh: The strategy's mesh.
    partition_dimensions: The number of pieces of each dimension; their product
      is the number of logical devices.

  Raises:
    ValueError: The axes are named and do not divide up that way; axes without
      names of one's own always do.

  Example:
    >>> devices = np.array(jax.devices() * 8)[:8].reshape(1, 8)
    >>> partition_spec(make(devices), (1, 2, 4, 1))
    P(None, 'm0', ('m1', 'm2'), None)
  """
  sizes = {name: mesh.shape[name] for name in logical_axes(mesh)}
  spec = _choose(
    [n for n in sizes if sizes[n] > 1], sizes, partition_dimensions
  )
  if spec is None:
    raise ValueError(
      f"partition_dimensions={list(partition_dimensions)!r} cannot be made of "
      f"the mesh axes {sizes}: the pieces of each dimension must be a product "
      "of some of them. A mesh_shape of prime axes has every partition, and so "
      "has a Strategy of a device_assignment, without names."
    )
  return P(*(names[0] if len(names) == 1 else names or None for names in spec))


def put(x: Any, sharding: jax.sharding.NamedSharding) -> jax.Array:
  """Puts an array on the mesh, also where that has other processes' devices.

  Each process gives the same array.
  """
  if sharding.is_fully_addressable or not (
    isinstance(x, jax.Array) and x.is_fully_addressable
  ):
    return jax.device_put(x, sharding)
  # JAX takes NumPy arrays for that, not committed arrays nor keys.
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = put(jax.random.key_data(x), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return jax.device_put(np.asarray(x), sharding)


def constrain(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
  """Lays a traced array out; where axes are Explicit, that is its type."""
  if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
    return jax.sharding.reshard(x, sharding)
  return jax.lax.with_sharding_constraint(x, sharding)


def _choose(
  names: Sequence[str], sizes: Mapping[str, int], pieces: Sequence[int]
) -> list[tuple[str, ...]] | None:
  """Gives each dimension axes of its product, those on the left first."""
  if not pieces:
    return []
  for count in range(len(names) + 1):
    for chosen in itertools.combinations(names, count):
      if math.prod(sizes[n] for n in chosen) != pieces[0]:
        continue
      left = [n for n in names if n not in chosen]
      others = _choose(left, sizes, pieces[1:])
      if others is not None:
        return [chosen, *others]
  return None


def prime_axes(count: int) -> dict[str, int]:
  """Returns the axes of so many logical devices without names of their own.

  Example:
    >>> prime_axes(12)
    {'m0': 2, 'm1': 2, 'm2': 3}
  """
  axes: dict[str, int] = {}
  divisor = 2
  while count > 1:
    while count % divisor == 0:
      axes[f"m{len(axes)}"] = divisor
      count //= divisor
    divisor += 1
  return axes


def assigned_devices(
  assignment: DeviceAssignment, devices: Sequence[Any] | None
) -> np.ndarray:
  """Returns the devices of an assignment, `[replicas, logical devices]`.

  Args:
    assignment: The assignment.
    devices: Instead of those that its topology was made from. For a topology
      made by hand, task t's n-th chip is process t's n-th device; in a single
      process, devices are dealt out in the order of tasks and chips.

  Raises:
    ValueError: There are fewer devices than the topology has.
  """
  topology = assignment.topology
  if devices is None and topology.devices is not None:
    return assignment.devices
  if devices is None:
    devices = jax.devices()
  by_process: dict[int, list[Any]] = {}
  for device in devices:
    by_process.setdefault(device.process_index, []).append(device)
  tasks, chips = topology.num_tasks, topology.num_tpus_per_task
  if len(by_process) == 1:
    (local,) = by_process.values()
    by_process = {t: local[t * chips : (t + 1) * chips] for t in range(tasks)}
  numbers = topology.indices_at(assignment.core_assignment)
  found = np.empty(numbers.shape, object)
  for index, number in np.ndenumerate(numbers):
    task, chip = divmod(int(number), chips)
    if chip >= len(by_process.get(task, ())):
      raise ValueError(
        f"device_assignment has {tasks} tasks of {chips} devices, and needs "
        f"device {chip} of task {task}; devices are {len(devices)} in "
        f"{len({d.process_index for d in devices})} processes."
      )
    found[index] = by_process[task][chip]
  return found


def named_sizes(mesh_shape: Any, num_devices: int) -> dict[str, int]:
  """Checks axis sizes by name; returns them with `"replica"` first.

  Args:
    mesh_shape: Axis sizes; without `"replica"` there is one. One of them may be
      -1, what is left.
    num_devices: The product that they must have.

  Raises:
    ValueError, TypeError: A name or a size that cannot be.

  Example:
    >>> named_sizes({"model": 2, "replica": -1}, 8)
    {'replica': 4, 'model': 2}
  """
  where = f"mesh_shape={mesh_shape!r}"
  if not isinstance(mesh_shape, Mapping):
    raise TypeError(
      f"{where} must be a dict of axis sizes, such as "
      "{'replica': 4, 'model': 2}."
    )
  for name, size in mesh_shape.items():
    if not isinstance(name, str) or not name:
      raise TypeError(f"{where}: an axis name must be a string, got {name!r}.")
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
      raise TypeError(f"{where}: {name!r} must be an integer, got {size!r}.")
    if size < 1 and size != -1:
      raise ValueError(
        f"{where}: {name!r} must be at least 1, or -1 for what is left, "
        f"got {size}."
      )
  sizes = {REPLICA: 1} | {name: int(s) for name, s in mesh_shape.items()}
  open_axes = [name for name, size in sizes.items() if size == -1]
  if len(open_axes) > 1:
    raise ValueError(f"{where}: only one axis may be -1, got {open_axes}.")
  if open_axes:
    known = -math.prod(sizes.values())
    sizes[open_axes[0]] = max(num_devices // known, 1)
  if math.prod(sizes.values()) != num_devices:
    raise ValueError(
      f"{where}: the product of the sizes must be the number of devices, "
      f"{num_devices}."
    )
  return sizes


def lay_out(devices: Sequence[Any], num_logical_devices: int) -> np.ndarray:
  """Orders devices as `[replicas, logical devices]`.

  The logical devices of a replica are neighbours, which on TPUs JAX's own
  `mesh_utils` sees to; the replicas of a slice follow each other, so that the
  slow network is outermost.

  Raises:
    ValueError: A replica would straddle slices.
  """
  slices: dict[int, list[Any]] = {}
  for device in devices:
    slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
  parts = [slices[index] for index in sorted(slices)]
  laid = []
  for part in parts:
    if len(part) % num_logical_devices:
      raise ValueError(
        f"mesh_shape has {num_logical_devices} logical devices a replica; "
        f"slices of {[len(p) for p in parts]} devices are no multiple of that. "
        "A replica that straddles slices takes a device_assignment."
      )
    shape = (len(part) // num_logical_devices, num_logical_devices)
    if part[0].platform == "tpu":
      grid = mesh_utils.create_device_mesh(
        shape, part, allow_split_physical_axes=True
      )
    else:
      grid = np.array(part, object).reshape(shape)
    laid.append(grid)
  return np.concatenate(laid)


def _check_devices(devices: Any) -> list[Any]:
  devices = list(np.ravel(np.array(devices, object)))
  for device in devices:
    if not hasattr(device, "process_index"):
      raise TypeError(f"devices must be JAX devices, got {device!r}.")
  if not devices or len(set(devices)) != len(devices):
    raise ValueError(
      f"devices must be at least one, and none twice, got {devices}."
    )
  return devices
