"""Reduces, gathers and makes per-replica values, outside of `Strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import is_per_replica
from flaxshard.replicas.values import PerReplica
from flaxshard.replicas.values import take_row

PyTree = Any

P = jax.sharding.PartitionSpec


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
  replica_context.check_reduce_op(reduce_op)
  compile_only.check_can_run("reduce", mesh)
  slices = jax.tree.leaves(value, is_leaf=is_indexed_slices)
  if any(map(is_indexed_slices, slices)):
    raise ValueError(
      "reduce: the row numbers of an IndexedSlices cannot be summed. Inside of "
      "run use get_replica_context().all_reduce, or return slices.to_dense()."
    )

  def reduce_array(v: Any) -> jax.Array:
    axes = () if axis is None else (_axis_after_replicas("reduce", axis, v),)
    return _reducer(mesh, reduce_op, (0, *axes))(_on_mesh(mesh, v))

  def reduce_leaf(path: Any, x: Any) -> Any:
    if is_per_replica(x):
      return jax.tree.map(reduce_array, _check_rows(mesh, "reduce", path, x))
    if reduce_op == "sum":
      # TensorFlow refuses it too: it could mean x or x times the replicas.
      raise ValueError(
        f"reduce: value[{trees.path_string(path)}] must be a PerReplica, got "
        f"{x!r}: the sum of a replicated value is ambiguous."
      )
    return x if axis is None else jnp.mean(jnp.asarray(x), axis)

  return _map_leaves(reduce_leaf, value)


def gather(mesh: jax.sharding.Mesh, value: PyTree, axis: int) -> PyTree:
  """Concatenates per-replica values; see `Strategy.gather`."""
  compile_only.check_can_run("gather", mesh)

  def gather_array(v: Any) -> jax.Array:
    gatherer = _gatherer(mesh, _axis_after_replicas("gather", axis, v))
    return gatherer(_on_mesh(mesh, v))

  def gather_leaf(path: Any, x: Any) -> Any:
    if not is_per_replica(x):
      raise ValueError(
        f"gather: value[{trees.path_string(path)}] must be a PerReplica, got "
        f"{x!r}."
      )
    return jax.tree.map(gather_array, _check_rows(mesh, "gather", path, x))

  return _map_leaves(gather_leaf, value)


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
  compile_only.check_can_run("local_results", mesh)

  def take_leaf(index: int, path: Any, x: Any) -> Any:
    if not is_per_replica(x):
      return x
    return jax.tree.map(
      lambda v: _local_row(mesh, index, v),
      _check_rows(mesh, "local_results", path, x),
    )

  return tuple(
    _map_leaves(functools.partial(take_leaf, i), value)
    for i in local_replicas(mesh)
  )


def from_function(
  mesh: jax.sharding.Mesh, value_fn: Callable[[ValueContext], PyTree]
) -> PyTree:
  """Makes a `PerReplica`; see `Strategy.distribute_values_from_function`."""
  compile_only.check_can_run("distribute_values_from_function", mesh)
  # Each process calls it for its own replicas only.
  local = local_replicas(mesh)
  num_replicas = mesh.shape[mesh_lib.REPLICA]
  values = [value_fn(ValueContext(i, num_replicas)) for i in local]
  for i, value in zip(local, values, strict=True):
    difference = trees.first_difference(value, values[0])
    if difference:
      raise ValueError(
        "value_fn must return values of one structure, with the same shapes "
        f"and dtypes, but replica {i} differs from replica {local[0]} at "
        f"{difference}."
      )
    for path, x in jax.tree_util.tree_leaves_with_path(value):
      trees.check_integers(f"value_fn: value[{trees.path_string(path)}]", x)
  sharding = jax.sharding.NamedSharding(mesh, P(mesh_lib.REPLICA))

  def stack_rows(*rows: Any) -> PerReplica:
    shape = (num_replicas, *np.shape(rows[0]))
    if any(isinstance(x, jax.Array) for x in rows):
      local_rows: Any = jnp.stack([trees.drop_weak_type(x) for x in rows])
    else:
      local_rows = np.stack(rows)
    return PerReplica(
      jax.make_array_from_process_local_data(sharding, local_rows, shape)
    )

  return jax.tree.map(stack_rows, *values)


def _map_leaves(fn: Callable[[Any, Any], Any], value: PyTree) -> PyTree:
  """Maps `fn(path, leaf)` over a tree in which a `PerReplica` is a leaf."""
  return jax.tree_util.tree_map_with_path(fn, value, is_leaf=is_per_replica)


def _check_rows(
  mesh: jax.sharding.Mesh, where: str, path: Any, x: PerReplica
) -> PyTree:
  """Returns the value of a `PerReplica`, or raises if it is not valid."""
  replicas = mesh.shape[mesh_lib.REPLICA]
  for leaf in jax.tree.leaves(x.value):
    if np.shape(leaf)[:1] != (replicas,):
      raise ValueError(
        f"{where}: value[{trees.path_string(path)}], a PerReplica, must have "
        f"{replicas} rows, one for each replica, got shape {np.shape(leaf)}."
      )
    trees.check_integers(f"{where}: value[{trees.path_string(path)}]", leaf)
  return x.value


def _axis_after_replicas(where: str, axis: int, x: Any) -> int:
  """Returns the axis of an array `[replicas, ...]` for an axis of its rows."""
  shape = np.shape(x)[1:]
  replica_context.check_axis(where, axis, shape)
  return axis % len(shape) + 1


@functools.lru_cache
def _reducer(
  mesh: jax.sharding.Mesh, reduce_op: str, axes: tuple[int, ...]
) -> Callable[[Any], jax.Array]:
  fn = jnp.sum if reduce_op == "sum" else jnp.mean
  return jax.jit(lambda x: fn(x, axis=axes), out_shardings=_whole(mesh))


@functools.lru_cache
def _gatherer(mesh: jax.sharding.Mesh, axis: int) -> Callable[[Any], jax.Array]:
  # With Explicit axes JAX refuses to iterate over a sharded axis.
  fn = lambda x: list(mesh_lib.constrain(x, _whole(mesh)))
  return jax.jit(
    lambda x: jnp.concatenate(fn(x), axis=axis - 1), out_shardings=_whole(mesh)
  )


def _whole(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Returns the sharding with which every process can read the whole array."""
  return jax.sharding.NamedSharding(mesh, P())


def _is_on(mesh: jax.sharding.Mesh, x: Any) -> bool:
  sharding = x.sharding if isinstance(x, jax.Array) else None
  return (
    isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh
  )


def _on_mesh(mesh: jax.sharding.Mesh, x: Any) -> Any:
  return x if _is_on(mesh, x) else mesh_lib.put(x, _whole(mesh))


def _local_row(mesh: jax.sharding.Mesh, index: int, x: Any) -> jax.Array:
  """Returns `x[index]` on the devices of its replica, without communication."""
  devices = mesh_lib.replica_mesh(mesh, index)
  if (
    not _is_on(mesh, x) or mesh_lib.REPLICA not in (*x.sharding.spec, None)[:1]
  ):
    return jax.device_put(take_row(jnp.asarray(x), index), _whole(devices))
  # A shard without a start holds all rows: the mesh has one replica.
  parts = [
    shard.data[0]
    for shard in x.addressable_shards
    if shard.index[0].start in (index, None)
  ]
  rest = jax.sharding.NamedSharding(devices, P(*x.sharding.spec[1:]))
  return jax.make_array_from_single_device_arrays(x.shape[1:], rest, parts)
