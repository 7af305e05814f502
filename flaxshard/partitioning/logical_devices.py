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

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib

PyTree = Any

P = jax.sharding.PartitionSpec


def split(
  mesh: jax.sharding.Mesh, x: Any, partition_dimensions: Sequence[int]
) -> jax.Array:
  """Splits a tensor over the logical devices; see `Strategy`."""
  where = "split_to_logical_devices"
  x = _array(f"{where}: tensor", x)
  spec = partition_spec(mesh, x.shape, partition_dimensions)
  if _is_concrete(x):
    return jax.device_put(x, _keeping_replicas(mesh, spec, x))
  mesh = _ambient(where, mesh)
  if not _is_auto(mesh):
    return mesh_lib.constrain(x, _keeping_replicas(mesh, spec, x))
  if mesh.shape[mesh_lib.REPLICA] > 1:
    # All logical axes are taken: only a split over replicas is left to choose.
    spec = P(*(P.UNCONSTRAINED if own is None else own for own in spec))
  return mesh_lib.constrain(x, jax.sharding.NamedSharding(mesh, spec))


def replicate(mesh: jax.sharding.Mesh, x: Any) -> jax.Array:
  """Puts a whole copy on each logical device; see `Strategy`."""
  where = "replicate_to_logical_devices"
  x = _array(f"{where}: tensor", x)
  spec = P(*[None] * x.ndim)
  if _is_concrete(x):
    return jax.device_put(x, _keeping_replicas(mesh, spec, x))
  mesh = _ambient(where, mesh)
  if not _is_auto(mesh) or mesh.shape[mesh_lib.REPLICA] == 1:
    return mesh_lib.constrain(x, _keeping_replicas(mesh, spec, x))
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
  where = "assign_to_logical_device"
  x = _array(f"{where}: tensor", x)
  _check_device(where, mesh, logical_device_id)
  if not _is_concrete(x):
    mesh = _ambient(where, mesh)
    return _in_one_branch(where, mesh, logical_device_id, lambda x: x, x)
  return _to_device(mesh_lib.logical_device(mesh, logical_device_id), x)


def on_device(
  mesh: jax.sharding.Mesh,
  logical_device_id: int,
  fn: Callable[..., PyTree],
  *args: PyTree,
) -> PyTree:
  """Calls a function on one logical device; see `Strategy`."""
  where = "on_logical_device"
  _check_device(where, mesh, logical_device_id)
  if not callable(fn):
    raise TypeError(f"{where}: fn must be callable, got {fn!r}.")
  args = _arrays(f"{where}: args", args)
  if not _is_concrete(*jax.tree.leaves(args)):
    mesh = _ambient(where, mesh)
    return _in_one_branch(where, mesh, logical_device_id, fn, *args)
  device = mesh_lib.logical_device(mesh, logical_device_id)
  # What `fn` makes out of nothing is made there too.
  with jax.default_device((*device.local_devices, None)[0]):
    out = _arrays(f"{where}: what fn returns", fn(*_to_device(device, args)))
  return _to_device(device, out)


def _in_one_branch(
  where: str,
  mesh: Any,
  logical_device_id: int,
  fn: Callable[..., PyTree],
  *args: PyTree,
) -> PyTree:
  """Traces a conditional that only one logical device takes."""
  axes = mesh_lib.logical_axes(mesh)
  if not axes:
    return fn(*args)
  explicit = jax.sharding.AxisType.Explicit
  if mesh.axis_types[0] == explicit:
    raise ValueError(
      f"{where} in jax.jit takes a Strategy of axis_type="
      f"{jax.sharding.AxisType.Auto}, got {explicit}: there the branches of a "
      "conditional would differ in type. In Strategy.run and eagerly it works."
    )
  if explicit in mesh.axis_types:
    whole = jax.sharding.NamedSharding(mesh, P())
    args = jax.tree.map(lambda x: mesh_lib.constrain(x, whole), args)
  kinds: PyTree = None

  def numbers(*args: PyTree) -> PyTree:
    nonlocal kinds
    out = _arrays("on_logical_device: what fn returns", fn(*args))
    kinds = jax.tree.map(_kind, out)
    return jax.tree.map(_numbers, out)

  # Traced ahead, for the shapes and for what `fn` closes over.
  ahead, shapes = jax.make_jaxpr(numbers, return_shape=True)(
    *jax.tree.map(_shape, args)
  )
  _check_closed_over(ahead.consts)

  def body(*args: PyTree) -> PyTree:
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
  return jax.tree.map(_sum, jax.jit(parallel)(*args), kinds)


def _to_device(device: jax.sharding.Mesh, tree: PyTree) -> PyTree:
  """Moves arrays to a logical device, which has one device of each replica."""

  def put(x: Any) -> jax.Array:
    spec = P(*_replica_spec(device, x))
    return jax.device_put(x, jax.sharding.NamedSharding(device, spec))

  return jax.tree.map(put, tree)


def _shape(x: Any) -> jax.ShapeDtypeStruct:
  weak = getattr(x, "weak_type", False)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=weak)


def _check_closed_over(values: Sequence[Any]) -> None:
  """Raises for what JAX cannot take from the mesh outside into a branch."""
  for x in values:
    if isinstance(x, jax.core.Tracer) and not jax.typeof(x).sharding.mesh.empty:
      raise ValueError(
        f"on_logical_device: fn closes over a traced {jax.typeof(x)}; hand it "
        "in as an argument: on_logical_device(logical_device_id, fn, *args)."
      )


def _kind(x: Any) -> Any:
  """Returns a dtype, or the name of a PRNG for its keys."""
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return str(jax.random.key_impl(x)) if is_key else x.dtype


def _numbers(x: Any) -> jax.Array:
  """Returns what can be summed with zeros: the data of keys, bools as ints."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return jax.random.key_data(x)
  return x.astype(jnp.int8) if x.dtype == jnp.bool_ else x


def _sum(parts: jax.Array, kind: Any) -> jax.Array:
  x = jnp.sum(parts, axis=0, dtype=parts.dtype)
  if isinstance(kind, str):
    return jax.random.wrap_key_data(x, impl=kind)
  return x.astype(kind)


def _ambient(where: str, mesh: jax.sharding.Mesh) -> Any:
  """Returns the mesh of the trace, in which axes may be manual."""
  ambient = jax.sharding.get_abstract_mesh()
  own, other = list(mesh.shape.items()), list(ambient.shape.items())
  if other and other != own:
    raise ValueError(
      f"{where} is traced on the mesh {dict(other)}; that of this Strategy is "
      f"{dict(own)}."
    )
  if jax.sharding.AxisType.Manual in ambient.axis_types[1:]:
    raise ValueError(
      f"{where}: a traced fn of on_logical_device, or of a jax.shard_map over "
      "the logical axes, runs on one logical device alone; there is no other "
      "to be had. Call it outside of fn."
    )
  return mesh if ambient.empty else ambient


def _is_auto(mesh: Any) -> bool:
  """Whether XLA chooses how arrays are split over replicas."""
  return mesh.axis_types[0] == jax.sharding.AxisType.Auto


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


def _keeping_replicas(mesh: Any, spec: P, x: Any) -> jax.sharding.NamedSharding:
  """Returns a sharding that splits over replicas what is split so already."""
  kept = _replica_spec(mesh, x)
  spec = P(*(own or other for own, other in zip(spec, kept, strict=True)))
  return jax.sharding.NamedSharding(mesh, spec)


def _replica_spec(mesh: Any, x: Any) -> list[str | None]:
  """Returns which dimensions of an array are known to be split over replicas.

  That is so for arrays, and for what is traced where axes are Explicit.
  """
  x = _primal(x)
  if isinstance(x, jax.core.Tracer):
    sharding = jax.typeof(x).sharding
  else:
    sharding = getattr(x, "sharding", None)
  spec: list[str | None] = [None] * x.ndim
  if isinstance(sharding, jax.sharding.NamedSharding) and (
    sharding.mesh.shape.get(mesh_lib.REPLICA) == mesh.shape[mesh_lib.REPLICA]
  ):
    for i, names in enumerate(sharding.spec):
      if mesh_lib.REPLICA in specs_lib.axes_of(names):
        spec[i] = mesh_lib.REPLICA
  return spec


def _arrays(what: str, tree: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(
    lambda path, x: _array(f"{what}[{trees.path_string(path)}]", x), tree
  )


def _array(what: str, x: Any) -> Any:
  try:
    if hasattr(x, "__jax_array__") and not isinstance(x, jax.Array):
      x = jnp.asarray(x)  # such as nnx.Param
    jax.typeof(x)  # a list of numbers is a tree, and no array
    return x if isinstance(x, (jax.Array, np.ndarray)) else jnp.asarray(x)
  except TypeError as e:
    raise TypeError(f"{what} must be an array, got {x!r}.") from e


def partition_spec(
  mesh: jax.sharding.Mesh, shape: tuple[int, ...], partition_dimensions: Any
) -> P:
  """Returns the spec that splits a tensor over all logical devices.

  Args:
    mesh: The strategy's mesh.
    shape: The tensor's.
    partition_dimensions: The number of pieces of each dimension.

  Raises:
    ValueError: Not one number for each dimension, one that does not divide it,
      a product other than the number of logical devices, or named axes that do
      not divide up that way.
    TypeError: Something else than a list of integers.

  Example:
    >>> devices = np.array(jax.devices() * 8)[:8].reshape(1, 8)
    >>> partition_spec(mesh_lib.make(devices), (3, 28, 28, 1), [1, 2, 4, 1])
    P(None, 'm0', ('m1', 'm2'), None)
  """
  pieces = _check_partition(mesh, shape, partition_dimensions)
  return mesh_lib.partition_spec(mesh, pieces)


def _check_partition(
  mesh: jax.sharding.Mesh, shape: tuple[int, ...], partition_dimensions: Any
) -> tuple[int, ...]:
  where = f"partition_dimensions={partition_dimensions!r}"
  pieces = partition_dimensions
  if isinstance(pieces, np.ndarray):
    pieces = pieces.tolist()
  if not isinstance(pieces, Sequence) or isinstance(pieces, (str, bytes)):
    raise TypeError(f"{where} must be a list of integers.")
  for count in pieces:
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)):
      raise TypeError(f"{where} must be integers, got {count!r}.")
    if count < 1:
      raise ValueError(f"{where} must be at least 1 each, got {count}.")
  pieces = tuple(map(int, pieces))
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
