"""Reduces, gathers and makes per-replica values, outside of `Strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import has_replica_axis
from flaxshard.replicas.values import is_per_replica
from flaxshard.replicas.values import PerReplica

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ValueContext:
  """The argument of `Strategy.distribute_values_from_function`'s function.

  Attributes:
    replica_id_in_sync_group: The number of the replica that gets the value.
    num_replicas_in_sync: The number of replicas.

  References:
    `tf.distribute.experimental.ValueContext`.
  """

  replica_id_in_sync_group: int
  num_replicas_in_sync: int


def reduce(
  mesh: jax.sharding.Mesh, reduce_op: str, value: PyTree, axis: int | None
) -> PyTree:
  """Reduces per-replica values to one value; see `Strategy.reduce`."""
  checks.one_of("reduce_op", reduce_op, replica_context.REDUCE_OPS)
  if gradients.find_rows(value):
    raise ValueError(
      "reduce: the row numbers of an IndexedSlices cannot be summed. Inside of "
      "run use get_replica_context().all_reduce, or return slices.to_dense()."
    )

  def reduce_rows(x: Any) -> jax.Array:
    axes: tuple[int, ...] = (0,)
    if axis is not None:
      axes += (1 + normalize_axis_index(axis, np.ndim(x) - 1, "reduce"),)
    return _compute(mesh, getattr(jnp, reduce_op), axes, _on_mesh(mesh, x))

  def mean_of_shared(x: Any) -> Any:
    if axis is None:
      return x
    dim = normalize_axis_index(axis, np.ndim(x), "reduce")
    trees.check_integers("reduce: value", x)
    return jnp.mean(jnp.asarray(x), dim)

  # TensorFlow too refuses the sum of what all replicas share: it could mean x
  # or x times the replicas.
  of_shared = mean_of_shared if reduce_op == "mean" else None
  return _map_rows("reduce", mesh, reduce_rows, value, of_shared)


def gather(mesh: jax.sharding.Mesh, value: PyTree, axis: int) -> PyTree:
  """Concatenates per-replica values; see `Strategy.gather`."""

  def gather_rows(x: Any) -> jax.Array:
    dim = normalize_axis_index(axis, np.ndim(x) - 1, "gather")
    return _compute(mesh, jnp.concatenate, dim, mesh_lib.put(x, _whole(mesh)))

  return _map_rows("gather", mesh, gather_rows, value)


def local_replicas(mesh: jax.sharding.Mesh) -> list[int]:
  """Returns the numbers of the replicas with a device in this process."""
  me = jax.process_index()
  return [
    i
    for i, devices in enumerate(mesh.devices)
    if any(d.process_index == me for d in np.ravel(devices))
  ]


def local_results(mesh: jax.sharding.Mesh, value: PyTree) -> tuple[PyTree, ...]:
  """Returns the values of local replicas; see `Strategy.local_results`."""
  results = []
  for i in local_replicas(mesh):
    row = functools.partial(_local_row, mesh, i)
    results.append(
      _map_rows("local_results", mesh, row, value, of_shared=lambda x: x)
    )
  return tuple(results)


def from_function(
  mesh: jax.sharding.Mesh, value_fn: Callable[[ValueContext], PyTree]
) -> PyTree:
  """Makes a `PerReplica`; see `Strategy.distribute_values_from_function`."""
  mesh_lib.check_can_run("distribute_values_from_function", mesh)
  # Each process calls it for its own replicas only.
  local, num_replicas = local_replicas(mesh), mesh.shape[mesh_lib.REPLICA]
  values = [value_fn(ValueContext(i, num_replicas)) for i in local]
  for i, value in zip(local, values, strict=True):
    # NumPy would promote the dtypes.
    if difference := trees.first_difference(value, values[0]):
      raise ValueError(
        f"value_fn: the value of replica {i} differs from that of replica "
        f"{local[0]} at {difference}."
      )
    for path, x in jax.tree_util.tree_leaves_with_path(value):
      trees.check_integers(f"value_fn: value[{trees.path_string(path)}]", x)
  sharding = jax.sharding.NamedSharding(mesh, jax.P(mesh_lib.REPLICA))

  def stack_rows(*rows: Any) -> PerReplica:
    # On the host: each may be on the devices of its replica.
    local_rows = np.stack([trees.key_data(jnp.asarray(x)) for x in rows])
    shape = (num_replicas, *local_rows.shape[1:])
    data = jax.make_array_from_process_local_data(sharding, local_rows, shape)
    return PerReplica(trees.with_key_data(jnp.asarray(rows[0]), data))

  return jax.tree.map(stack_rows, *values)


def _map_rows(
  where: str,
  mesh: jax.sharding.Mesh,
  of_rows: Callable[[Any], Any],
  value: PyTree,
  of_shared: Callable[[Any], Any] | None = None,
) -> PyTree:
  """Maps functions over a tree in which a `PerReplica` is a leaf.

  Args:
    where: The caller, for error messages.
    mesh: The mesh.
    of_rows: Takes an array `[replicas, ...]` of a `PerReplica`.
    value: The tree.
    of_shared: Takes any other leaf; None refuses them.
  """
  mesh_lib.check_can_run(where, mesh)
  replicas = mesh.shape[mesh_lib.REPLICA]

  def convert(path: Any, x: Any) -> Any:
    name = f"{where}: value[{trees.path_string(path)}]"
    if not is_per_replica(x):
      if of_shared is None:
        raise ValueError(
          f"{name} must be a PerReplica, got {x!r}: which replicas it would "
          "count for is ambiguous."
        )
      return of_shared(x)
    for rows in jax.tree.leaves(x.value):
      if np.shape(rows)[:1] != (replicas,):
        raise ValueError(
          f"{name}, a PerReplica, must have {replicas} rows, one for each "
          f"replica, got shape {np.shape(rows)}."
        )
      trees.check_integers(name, rows)
    return jax.tree.map(of_rows, x.value)

  return jax.tree_util.tree_map_with_path(
    convert, value, is_leaf=is_per_replica
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compute(mesh: Any, fn: Any, axis: Any, x: jax.Array) -> jax.Array:
  """Returns `fn(x, axis)`, whole on each device."""
  return mesh_lib.constrain(fn(x, axis), _whole(mesh))


def _whole(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Returns the sharding with which every process can read the whole array."""
  return jax.sharding.NamedSharding(mesh, jax.P())


def _on_mesh(
  mesh: jax.sharding.Mesh, x: Any, *, compare: bool = True
) -> jax.Array:
  """Returns an array that is on the mesh; puts any other one there whole."""
  sharding = getattr(x, "sharding", None)  # a traced array has none
  if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh:
    return x
  return mesh_lib.put(x, _whole(mesh), compare=compare)


def _local_row(mesh: jax.sharding.Mesh, index: int, x: Any) -> jax.Array:
  """Returns `x[index]` on the devices of its replica, without communication."""
  x = _on_mesh(mesh, x, compare=False)
  if not has_replica_axis(x.sharding.spec):
    x = mesh_lib.put(x, _whole(mesh), compare=False)
  replica = jax.sharding.Mesh(
    mesh.devices[index : index + 1], mesh.axis_names, axis_types=mesh.axis_types
  )
  # Without the mesh that the caller may have set: a shard is on one device.
  with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
    parts = [
      # A shard without a start holds all rows.
      shard.data[index - (shard.index[0].start or 0)]
      for shard in x.addressable_shards
      if shard.device in replica.devices
    ]
  rest = jax.sharding.NamedSharding(replica, jax.P(*x.sharding.spec[1:]))
  return jax.make_array_from_single_device_arrays(x.shape[1:], rest, parts)
