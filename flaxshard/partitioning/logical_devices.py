"""Annotations that place a tensor on the logical devices of a replica.

These are the annotations of TensorFlow's `TPUStrategy`, for one mesh. In a
traced function (`Strategy.run`, `jax.jit`) they are constraints for XLA's
partitioner. Outside of a trace they move the array. They never change a value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning.mesh import Mesh

PyTree = Any


# -- All devices of a replica.


def split(mesh: Any, x: Any, partition_dimensions: Sequence[int]) -> jax.Array:
  """Splits a tensor; see `Strategy.split_to_logical_devices`."""
  x = _as_array("tensor", x)
  spec = partition_spec(mesh, x.shape, partition_dimensions)
  return _place("split_to_logical_devices", mesh, x, spec)


def replicate(mesh: Any, x: Any) -> jax.Array:
  """Replicates a tensor; see `Strategy.replicate_to_logical_devices`."""
  x = _as_array("tensor", x)
  spec = jax.P(*[None] * x.ndim)
  return _place("replicate_to_logical_devices", mesh, x, spec)


def _place(method: str, mesh: Any, x: Any, spec: jax.P) -> jax.Array:
  """Splits a tensor over all logical devices, or over none.

  An existing split over the replicas stays, in dimensions that `spec` leaves.
  """
  if _is_concrete(x):
    mesh_lib.check_can_run(method, mesh)
    return jax.device_put(x, _keep_replica_split(mesh, spec, x))
  mesh = _mesh_of_trace(method, mesh)
  if set(mesh.axis_types) == {jax.sharding.AxisType.Manual}:
    # In `run`, one logical device. JAX refuses a constraint under `jax.vmap`.
    return x
  is_auto = mesh.axis_types[0] == jax.sharding.AxisType.Auto
  if not is_auto or mesh.shape[mesh_lib.REPLICA] == 1:
    return mesh_lib.constrain(x, _keep_replica_split(mesh, spec, x))
  axes = set(mesh_lib.logical_axes(mesh))
  if not axes:
    return x
  # A constraint would need a spec for the replicas too. A shard_map over the
  # logical axes alone leaves the split over the replicas to XLA.
  return jax.shard_map(
    lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec, axis_names=axes
  )(x)


def _keep_replica_split(
  mesh: Any, spec: jax.P, x: Any
) -> jax.sharding.NamedSharding:
  """Returns a sharding for `spec` that keeps an existing split over replicas.

  A dimension that `spec` splits is not split over the replicas any more.
  """
  x = _primal_value(x)
  is_traced = isinstance(x, jax.core.Tracer)
  # Of traced arrays it is known if the axes are Explicit.
  sharding = getattr(jax.typeof(x) if is_traced else x, "sharding", None)
  # The mesh may be another one, as long as it has the same replicas.
  if isinstance(sharding, jax.sharding.NamedSharding) and (
    sharding.mesh.shape.get(mesh_lib.REPLICA) == mesh.shape[mesh_lib.REPLICA]
  ):
    old = mesh_lib.only(sharding.spec, [mesh_lib.REPLICA])
    spec = mesh_lib.merge(spec, old)
  return jax.sharding.NamedSharding(mesh, spec)


# -- One device of a replica.


def on_device(
  mesh: jax.sharding.Mesh,
  logical_device_id: int,
  fn: Callable[..., PyTree],
  *args: PyTree,
) -> PyTree:
  """Calls a function on one device; see `Strategy.on_logical_device`."""
  method, args = "on_logical_device", _as_arrays("args", args)
  index = checks.integer(
    "logical_device_id",
    logical_device_id,
    minimum=0,
    maximum=mesh.size // mesh.shape[mesh_lib.REPLICA] - 1,
  )
  # Within `jax.set_mesh` JAX computes on all devices of the mesh.
  is_set = jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
  if is_set or not _is_concrete(*jax.tree.leaves(args)):
    return _run_in_branch(_mesh_of_trace(method, mesh), index, fn, *args)
  mesh_lib.check_can_run(method, mesh)
  # Auto axes: eager computations on a part of the devices cannot enter the
  # context that Explicit axes need.
  devices = mesh.devices.reshape(mesh.devices.shape[0], -1)[:, index]
  device = jax.sharding.Mesh(devices, (mesh_lib.REPLICA,))
  # Arrays that `fn` creates, such as jnp.zeros(2), are on the device too. A
  # logical device may have no device in this process, hence the None.
  with jax.default_device((*device.local_devices, None)[0]):
    out = _as_arrays("the result of fn", fn(*_move(device, args)))
  return _move(device, out)


def _run_in_branch(
  mesh: Any,
  index: int,
  fn: Callable[..., PyTree],
  *args: PyTree,
) -> PyTree:
  """Traces `fn(*args)` in a branch that only logical device `index` takes."""
  axes = mesh_lib.logical_axes(mesh)
  if not axes:
    return fn(*args)
  if jax.sharding.AxisType.Explicit in mesh.axis_types:
    replicated = jax.sharding.NamedSharding(mesh, jax.P())
    args = jax.tree.map(lambda x: mesh_lib.constrain(x, replicated), args)

  def call_fn(*args: PyTree) -> PyTree:
    return _as_arrays("the result of fn", fn(*args))

  # Trace ahead, for the shapes of the other branch and for the values that `fn`
  # closes over.
  jaxpr, shapes = jax.make_jaxpr(call_fn, return_shape=True)(*args)
  for x in jaxpr.consts:
    # JAX cannot use such an array inside the shard_map.
    if isinstance(x, jax.core.Tracer) and not jax.typeof(x).sharding.mesh.empty:
      raise ValueError(
        f"on_logical_device: fn closes over a traced {jax.typeof(x)}; pass it "
        "as an argument: on_logical_device(logical_device_id, fn, *args)."
      )

  def choose_branch(*args: PyTree) -> PyTree:
    out = jax.lax.cond(
      jax.lax.axis_index(axes) == index,
      call_fn,
      lambda *_: jax.tree.map(
        lambda x: jax.lax.full(x.shape, 0, x.dtype), shapes
      ),
      *args,
    )
    return jax.tree.map(lambda x: x[None], out)

  # Each logical device returns a result, and all but one are zeros. The sum is
  # outside of the shard_map: there its gradient is exact for any number of
  # devices.
  sharded = jax.shard_map(
    choose_branch,
    mesh=mesh,
    in_specs=jax.P(),
    out_specs=jax.P(axes),
    axis_names=set(axes),
    # A loop in `fn` may start from constants, which do not vary over devices.
    check_vma=False,
  )
  # jit: an eager `jax.vmap` or `jax.checkpoint` calls this outside of
  # `jax.jit`, and an eager shard_map must be manual over all axes.
  return jax.tree.map(_sum_results, jax.jit(sharded)(*args))


def _move(device: jax.sharding.Mesh, tree: PyTree) -> PyTree:
  """Moves arrays to a logical device, which has one device of each replica."""

  def move_array(x: Any) -> jax.Array:
    spec = jax.P(*[None] * x.ndim)
    return jax.device_put(x, _keep_replica_split(device, spec, x))

  return jax.tree.map(move_array, tree)


def _sum_results(results: jax.Array) -> jax.Array:
  """Sums the results of the logical devices, all but one of which are zeros."""
  if trees.is_prng_key(results):
    data = _sum_results(jax.random.key_data(results))
    return trees.with_key_data(results, data)
  if results.dtype == jnp.bool_:
    return _sum_results(results.astype(jnp.int8)).astype(jnp.bool_)
  # Without the dtype, small integers would be summed as int32.
  return jnp.sum(results, axis=0, dtype=results.dtype)


# -- Traces.


def _mesh_of_trace(method: str, mesh: jax.sharding.Mesh) -> Any:
  """Returns the mesh of the current trace, some of whose axes may be manual."""
  current = jax.sharding.get_abstract_mesh()
  sizes, current_sizes = list(mesh.shape.items()), list(current.shape.items())
  if current_sizes and current_sizes != sizes:
    raise ValueError(
      f"{method} is traced on the mesh {dict(current_sizes)}; the Strategy has "
      f"the mesh {dict(sizes)}."
    )
  if jax.sharding.AxisType.Manual in current.axis_types[1:]:
    raise ValueError(
      f"{method}: a traced fn of on_logical_device, or of a jax.shard_map over "
      "the logical axes, runs on one logical device alone and cannot use "
      f"others. Call {method} outside of fn."
    )
  return mesh if current.empty else current


def _is_concrete(*arrays: Any) -> bool:
  """Returns whether neither the arrays nor the surrounding code are traced."""
  # Under `jax.jit` a new array is traced, also if all arguments are concrete.
  values = map(_primal_value, (jnp.zeros(()), *arrays))
  return not any(isinstance(x, jax.core.Tracer) for x in values)


def _primal_value(x: Any) -> Any:
  # Under an eager `jax.grad` a tracer holds the value, beside its tangent.
  while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
    x = x.primal
  return x


def _as_arrays(name: str, tree: PyTree) -> PyTree:
  """Returns a tree with arrays for its leaves."""
  return jax.tree.map(lambda x: _as_array(name, x), tree)


def _as_array(name: str, x: Any) -> Any:
  """Returns an array as it is, and a number or nnx.Param as an array."""
  if isinstance(x, (np.ndarray, np.generic)):
    trees.check_integers(name, x)
    return x
  return jnp.asarray(x)


# -- Specs of partitions.


def partition_spec(
  mesh: Mesh, shape: tuple[int, ...], partition_dimensions: Any
) -> jax.P:
  """Returns the spec that splits a tensor over all logical devices.

  Args:
    mesh: The mesh of a strategy.
    shape: The shape of the tensor.
    partition_dimensions: The number of pieces of each dimension; their product
      is the number of logical devices.

  Returns:
    A spec with one entry for each dimension.

  Raises:
    ValueError: There is not one number for each dimension, a number does not
      divide its dimension, the product is not the number of logical devices, or
      the mesh axes cannot be combined to these numbers. The last cannot happen
      on a mesh whose logical axes are prime.
    TypeError: `partition_dimensions` is not a list of integers.

  Example:
    >>> mesh = jax.sharding.AbstractMesh(
    ...     (1, 2, 2, 2), ("replica", "m0", "m1", "m2"))
    >>> partition_spec(mesh, (3, 28, 28, 1), [1, 2, 4, 1])
    P(None, 'm0', ('m1', 'm2'), None)
  """
  name = f"partition_dimensions={partition_dimensions!r}"
  pieces = [
    checks.integer(f"partition_dimensions[{i}]", count, minimum=1)
    for i, count in enumerate(partition_dimensions)
  ]
  sizes = {axis: mesh.shape[axis] for axis in mesh_lib.logical_axes(mesh)}
  count = math.prod(sizes.values())
  if len(pieces) != len(shape) or math.prod(pieces) != count:
    raise ValueError(
      f"{name} must have one number for each dimension of the tensor, which "
      f"has shape {shape}, and as product the number of logical devices, "
      f"{count}; got {len(pieces)} numbers with the product "
      f"{math.prod(pieces)}."
    )
  # An axis of size 1 splits nothing.
  axes = [axis for axis in sizes if sizes[axis] > 1]
  # A mesh has few axes, so trying all combinations is fast. If all sizes are
  # equal, the first one has the pieces in row-major order.
  for dims in itertools.product(range(len(shape)), repeat=len(axes)):
    entries: list[tuple[str, ...]] = [()] * len(shape)
    for axis, dim in zip(axes, dims, strict=True):
      entries[dim] += (axis,)
    spec = jax.P(*entries)
    if list(mesh_lib.parts(spec, len(shape), sizes)) == pieces:
      mesh_lib.check_spec(name, spec, shape, mesh)
      return spec
  raise ValueError(
    f"{name} cannot be built from the mesh axes {sizes}: the number of pieces "
    "of each dimension must be a product of axis sizes. Every partition is "
    "possible with a mesh_shape of prime sizes, or with a device_assignment "
    "and no mesh_shape."
  )
