"""Where a tensor lies among the logical devices of a replica.

The annotations of `TPUStrategy`, on one mesh. Traced, in `Strategy.run` or in
plain `jax.jit`, they are constraints that XLA's partitioner heeds; outside of a
trace they move the array. The values never change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib

PyTree = Any

P = jax.sharding.PartitionSpec


def split(
  mesh: jax.sharding.Mesh, x: Any, partition_dimensions: Sequence[int]
) -> jax.Array:
  """Splits a tensor over the logical devices; see `Strategy`."""
  x = _array("split_to_logical_devices", x)
  pieces = _check_partition(mesh, x.shape, partition_dimensions)
  spec = mesh_lib.partition_spec(mesh, pieces)
  if _is_concrete(x):
    # On the dimensions that stay whole, a split over replicas stays too.
    kept = _replica_spec(mesh, x)
    spec = P(*(own or other for own, other in zip(spec, kept, strict=True)))
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
  mesh = _ambient(mesh)
  if not _is_manual(mesh) and mesh.shape[mesh_lib.REPLICA] > 1:
    # All logical axes are taken: only a split over replicas is left to choose.
    spec = P(*(P.UNCONSTRAINED if own is None else own for own in spec))
  return mesh_lib.constrain(x, jax.sharding.NamedSharding(mesh, spec))


def replicate(mesh: jax.sharding.Mesh, x: Any) -> jax.Array:
  """Puts a whole copy on each logical device; see `Strategy`."""
  x = _array("replicate_to_logical_devices", x)
  if _is_concrete(x):
    spec = P(*_replica_spec(mesh, x))
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
  mesh = _ambient(mesh)
  if _is_manual(mesh) or mesh.shape[mesh_lib.REPLICA] == 1:
    return mesh_lib.constrain(x, jax.sharding.NamedSharding(mesh, P()))
  axes = mesh_lib.logical_axes(mesh)
  if not axes:
    return x
  # A spec would have to name the replicas too; this leaves them as they are.
  same = jax.shard_map(
    lambda x: x,
    mesh=mesh,
    in_specs=P(),
    out_specs=P(),
    axis_names=set(axes),
  )
  return jax.jit(same)(x)  # eager `vmap` comes here too


def assign(
  mesh: jax.sharding.Mesh, x: Any, logical_device_id: int
) -> jax.Array:
  """Puts a tensor on one logical device; see `Strategy`."""
  x = _array("assign_to_logical_device", x)
  _check_device("assign_to_logical_device", mesh, logical_device_id)
  if not _is_concrete(x):
    return on_device(mesh, logical_device_id, lambda x: x, x)
  return _to_device(mesh, x, logical_device_id)


def on_device(
  mesh: jax.sharding.Mesh,
  logical_device_id: int,
  fn: Callable[..., PyTree],
  *args: PyTree,
) -> PyTree:
  """Calls a function on one logical device; see `Strategy`."""
  _check_device("on_logical_device", mesh, logical_device_id)
  if not callable(fn):
    raise TypeError(f"on_logical_device: fn must be callable, got {fn!r}.")
  args = jax.tree.map(lambda x: _array("on_logical_device", x), args)
  if _is_concrete(*jax.tree.leaves(args)):
    return fn(*(_to_device(mesh, x, logical_device_id) for x in args))
  mesh = _ambient(mesh)
  axes = mesh_lib.logical_axes(mesh)
  if not axes:
    return fn(*args)
  kinds: PyTree = None

  def numbers(*args: PyTree) -> PyTree:
    nonlocal kinds
    out = fn(*args)
    kinds = jax.tree.map(_kind, out)
    return jax.tree.map(_numbers, out)

  def body(*args: PyTree) -> PyTree:
    shapes = jax.eval_shape(numbers, *args)
    out = jax.lax.cond(
      jax.lax.axis_index(axes) == logical_device_id,
      numbers,
      lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
      *args,
    )
    return jax.tree.map(lambda x: x[None], out)

  # One result of each logical device, zeros of all but one. They are summed
  # outside, where that is exact in both directions for any number of devices.
  parallel = jax.shard_map(
    body,
    mesh=mesh,
    in_specs=P(),
    out_specs=P(axes),
    axis_names=set(axes),
    # A loop in `fn` may start from constants, which do not vary over devices.
    check_vma=False,
  )
  parts = jax.jit(parallel)(*args)
  return jax.tree.map(_sum, parts, kinds)


def _to_device(mesh: jax.sharding.Mesh, tree: PyTree, index: int) -> PyTree:
  device = mesh_lib.logical_device(mesh, index)

  def put(x: Any) -> jax.Array:
    spec = P(*_replica_spec(mesh, x))
    return jax.device_put(x, jax.sharding.NamedSharding(device, spec))

  return jax.tree.map(put, tree)


def _kind(x: Any) -> Any:
  """Returns a dtype, or the name of a PRNG for its keys."""
  x = jnp.asarray(x)
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return str(jax.random.key_impl(x)) if is_key else x.dtype


def _numbers(x: Any) -> jax.Array:
  """Returns what can be summed with zeros: the data of keys, bools as ints."""
  x = jnp.asarray(x)
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(x)
  return x.astype(jnp.int8) if x.dtype == jnp.bool_ else x


def _sum(parts: jax.Array, kind: Any) -> jax.Array:
  x = jnp.sum(parts, axis=0, dtype=parts.dtype)
  if isinstance(kind, str):
    return jax.random.wrap_key_data(x, impl=kind)
  return x.astype(kind)


def _ambient(mesh: jax.sharding.Mesh) -> Any:
  """Returns the mesh of the trace, in which axes may be manual."""
  ambient = jax.sharding.get_abstract_mesh()
  return mesh if ambient.empty else ambient


def _is_manual(mesh: Any) -> bool:
  """Whether this is traced for each replica on its own."""
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  return types[mesh_lib.REPLICA] == jax.sharding.AxisType.Manual


def _is_concrete(*arrays: Any) -> bool:
  """Whether arrays, and whatever is computed here, have values by now."""
  return all(map(_has_value, (jnp.zeros(()), *arrays)))


def _has_value(x: Any) -> bool:
  # Under `jax.grad` alone a value is there, beside its tangent.
  return not isinstance(_primal(x), jax.core.Tracer)


def _primal(x: Any) -> Any:
  while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
    x = x.primal
  return x


def _replica_spec(mesh: jax.sharding.Mesh, x: Any) -> list[str | None]:
  """Returns which dimensions of a concrete array are split over replicas."""
  sharding = getattr(_primal(x), "sharding", None)
  spec: list[str | None] = [None] * x.ndim
  if isinstance(sharding, jax.sharding.NamedSharding) and (
    sharding.mesh.shape.get(mesh_lib.REPLICA) == mesh.shape[mesh_lib.REPLICA]
  ):
    for i, names in enumerate(sharding.spec):
      if mesh_lib.REPLICA in specs_lib.axes_of(names):
        spec[i] = mesh_lib.REPLICA
  return spec


def _array(where: str, x: Any) -> Any:
  if isinstance(x, (jax.Array, np.ndarray)) and x.dtype != object:
    return x
  try:
    return jnp.asarray(x)
  except (TypeError, ValueError) as e:
    raise TypeError(f"{where} takes an array, got {x!r}.") from e


def _check_partition(
  mesh: jax.sharding.Mesh, shape: tuple[int, ...], partition_dimensions: Any
) -> tuple[int, ...]:
  where = f"partition_dimensions={partition_dimensions!r}"
  if isinstance(partition_dimensions, (str, bytes)) or not hasattr(
    partition_dimensions, "__iter__"
  ):
    raise TypeError(f"{where} must be a list of integers.")
  pieces = tuple(partition_dimensions)
  for count in pieces:
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
      raise TypeError(f"{where} must be integers, got {count!r}.")
    if count < 1:
      raise ValueError(f"{where} must be at least 1 each, got {count}.")
  pieces = tuple(int(count) for count in pieces)
  if len(pieces) != len(shape):
    raise ValueError(
      f"{where} must have one number for each dimension of the tensor, of "
      f"shape {shape}: {len(shape)}, got {len(pieces)}."
    )
  for i, (size, count) in enumerate(zip(shape, pieces, strict=True)):
    if size % count:
      raise ValueError(
        f"{where}: dimension {i} of the tensor, of shape {shape}, cannot be "
        f"divided into {count} pieces."
      )
  logical = mesh_lib.num_logical_devices(mesh)
  if math.prod(pieces) != logical:
    raise ValueError(
      f"{where} must have the product of the number of logical devices, "
      f"{logical}, got {math.prod(pieces)}."
    )
  return pieces


def _check_device(
  where: str, mesh: jax.sharding.Mesh, logical_device_id: Any
) -> None:
  if isinstance(logical_device_id, bool) or not isinstance(
    logical_device_id, (int, np.integer)
  ):
    raise TypeError(
      f"{where}: logical_device_id must be an integer, got "
      f"{logical_device_id!r}."
    )
  logical = mesh_lib.num_logical_devices(mesh)
  if not 0 <= logical_device_id < logical:
    raise ValueError(
      f"{where}: logical_device_id={logical_device_id} is none of the "
      f"{logical} logical devices of a replica; allowed: 0 to {logical - 1}."
    )
