"""Values that each replica has its own of, and what becomes of them outside."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context

PyTree = Any

P = jax.sharding.PartitionSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PerReplica:
  """A value that each replica has its own of.

  Inside `Strategy.run` a replica finds its own value in its place; what a
  replica returns, other than a TrainState, comes back as one of these.

  Attributes:
    value: An array `[replicas, ...]`, or a tree of such.

  Example:
    >>> losses = PerReplica(jnp.array([1.0, 3.0]))
    >>> float(losses[1]), np.mean(losses).item()
    (3.0, 2.0)

  References:
    `tf.distribute.DistributedValues`.
  """

  value: Any

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
    """Returns the values of all replicas, `[replicas, ...]`."""
    del copy
    return np.asarray(self.value, dtype)

  def __getitem__(self, index: int) -> Any:
    """Returns the value of replica `index`."""
    # JAX would clamp it, and a loop over the replicas would never end.
    if not -len(self) <= index < len(self):
      raise IndexError(f"PerReplica: there is no replica {index}: {len(self)}.")
    return jax.tree.map(lambda x: _at(x, index), self.value)

  def __len__(self) -> int:
    """Returns the number of replicas."""
    return len(jax.tree.leaves(self.value)[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Replicated:
  """What a function returns that is the same on all replicas: one comes back.

  Attributes:
    value: A tree of arrays.
  """

  value: Any


def is_per_replica(x: Any) -> bool:
  """Whether `x` is a `PerReplica`."""
  return isinstance(x, PerReplica)


def has_replica_axis(spec: Any) -> bool:
  """Returns whether a PartitionSpec makes an array per replica.

  Such an array has a leading axis, one row for each replica, sharded over
  `"replica"`.
  """
  # Anything else than a PartitionSpec is refused when the state is placed.
  entries = (*spec, None) if isinstance(spec, P) else (None,)
  return mesh_lib.REPLICA in specs_lib.axes_of(entries[0])


def has_per_replica(tree: PyTree) -> bool:
  """Whether there is a `PerReplica` in a tree."""
  leaves = jax.tree.leaves(tree, is_leaf=is_per_replica)
  return any(map(is_per_replica, leaves))


@dataclasses.dataclass(frozen=True)
class ValueContext:
  """Which replica a value is made for.

  Attributes:
    replica_id_in_sync_group: The number of the replica.
    num_replicas_in_sync: How many there are.

  References:
    `tf.distribute.experimental.ValueContext`.
  """

  replica_id_in_sync_group: int
  num_replicas_in_sync: int


def reduce(
  mesh: jax.sharding.Mesh, reduce_op: str, value: PyTree, axis: int | None
) -> PyTree:
  """Combines the replicas' values; see `Strategy.reduce`."""
  replica_context.check_reduce_op(reduce_op)
  trees.check_arrays("reduce: value", value)

  def axes(v: Any) -> tuple[int, ...]:
    return () if axis is None else (_axis("reduce", axis, v),)

  def one(path: Any, x: Any) -> Any:
    if is_per_replica(x):
      return jax.tree.map(
        lambda v: _reducer(mesh, reduce_op, (0, *axes(v)))(v),
        _inside(mesh, "reduce", path, x),
      )
    if reduce_op == "sum":
      raise ValueError(
        f"reduce: value[{trees.path_string(path)}] must be a PerReplica, got "
        f"{x!r}: the sum of what is the same on all replicas is not defined."
      )
    if axis is None:
      return x
    replica_context.check_axis("reduce", axis, np.shape(x))
    return jnp.mean(jnp.asarray(x), axis)

  return _map(one, value)


def gather(mesh: jax.sharding.Mesh, value: PyTree, axis: int) -> PyTree:
  """Concatenates the replicas' values; see `Strategy.gather`."""

  def one(path: Any, x: Any) -> Any:
    if not is_per_replica(x):
      raise ValueError(
        f"gather: value[{trees.path_string(path)}] must be a PerReplica, got "
        f"{x!r}."
      )
    return jax.tree.map(
      lambda v: _gatherer(mesh, _axis("gather", axis, v))(v),
      _inside(mesh, "gather", path, x),
    )

  return _map(one, value)


def local_replicas(mesh: jax.sharding.Mesh) -> list[int]:
  """Returns the numbers of the replicas with a device in this process."""
  me = jax.process_index()
  return [
    i
    for i, devices in enumerate(mesh.devices)
    if any(d.process_index == me for d in np.ravel(devices))
  ]


def local_results(mesh: jax.sharding.Mesh, value: PyTree) -> tuple[PyTree, ...]:
  """Returns this process's replicas' values; see `Strategy.local_results`."""

  def of(index: int) -> Callable[[Any, Any], Any]:
    def one(path: Any, x: Any) -> Any:
      if not is_per_replica(x):
        return x
      return jax.tree.map(
        lambda v: _local_value(mesh, index, v),
        _inside(mesh, "local_results", path, x),
      )

    return one

  return tuple(_map(of(i), value) for i in local_replicas(mesh))


def from_function(
  mesh: jax.sharding.Mesh, value_fn: Callable[[ValueContext], PyTree]
) -> PyTree:
  """See `Strategy.distribute_values_from_function`."""
  if not callable(value_fn):
    raise TypeError(f"value_fn must be a function, got {value_fn!r}.")
  mine = local_replicas(mesh)
  count = mesh.shape[mesh_lib.REPLICA]
  values = [value_fn(ValueContext(i, count)) for i in mine]
  for i, value in zip(mine, values, strict=True):
    trees.check_arrays(f"value_fn of replica {i}", value)
    difference = trees.first_difference(value, values[0])
    if difference:
      raise ValueError(
        f"value_fn must return alike values, but that of replica {i} differs "
        f"from that of replica {mine[0]} at {difference}."
      )
  sharding = jax.sharding.NamedSharding(mesh, P(mesh_lib.REPLICA))

  def put(*parts: Any) -> PerReplica:
    shape = (count, *np.shape(parts[0]))
    if any(isinstance(x, jax.Array) for x in parts):
      local: Any = jnp.stack([trees.drop_weak_type(x) for x in parts])
    else:
      local = np.stack(parts)
    # The parts of this process only: other processes have the others.
    return PerReplica(
      jax.make_array_from_process_local_data(sharding, local, shape)
    )

  return jax.tree.map(put, *values)


def mean_over_replicas(tree: PyTree) -> PyTree:
  """Returns a tree with one value for each `PerReplica`, in eager code.

  The mean of floating-point values; of others (counters, keys) the first.
  """

  def one(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
      return jnp.mean(x, axis=0, dtype=x.dtype)
    return _at(x, 0)

  return jax.tree.map(
    lambda x: jax.tree.map(one, x.value) if is_per_replica(x) else x,
    tree,
    is_leaf=is_per_replica,
  )


def broadcast_to_replicas(tree: PyTree, like: PyTree) -> PyTree:
  """Broadcasts to a `PerReplica` wherever `like` has one.

  Args:
    tree: A tree with one value for each `PerReplica` of `like`.
    like: The tree as it is to be.
  """

  def one(old: jax.Array, x: jax.Array) -> jax.Array:
    return jax.device_put(jnp.broadcast_to(x, old.shape), old.sharding)

  return jax.tree.map(
    lambda old, x: (
      jax.tree.map(one, old, PerReplica(x)) if is_per_replica(old) else x
    ),
    like,
    tree,
    is_leaf=is_per_replica,
  )


def _map(fn: Callable[[Any, Any], Any], value: PyTree) -> PyTree:
  return jax.tree_util.tree_map_with_path(fn, value, is_leaf=is_per_replica)


def _inside(
  mesh: jax.sharding.Mesh, where: str, path: Any, x: PerReplica
) -> PyTree:
  """Returns what is in a PerReplica, once it is one of these replicas."""
  replicas = mesh.shape[mesh_lib.REPLICA]
  for leaf in jax.tree.leaves(x.value):
    if np.shape(leaf)[:1] != (replicas,):
      raise ValueError(
        f"{where}: value[{trees.path_string(path)}], a PerReplica, must have "
        f"the {replicas} replicas as its first dimension, got shape "
        f"{np.shape(leaf)}."
      )
  return x.value


def _axis(where: str, axis: int, x: Any) -> int:
  """Returns the dimension of `[replicas, ...]` for one of a replica's value."""
  shape = np.shape(x)[1:]
  replica_context.check_axis(where, axis, shape)
  return axis % len(shape) + 1


@functools.lru_cache
def _reducer(
  mesh: jax.sharding.Mesh, reduce_op: str, axes: tuple[int, ...]
) -> Callable[[Any], jax.Array]:
  fn = jnp.sum if reduce_op == "sum" else jnp.mean
  return _compiled(mesh, lambda x: fn(x, axis=axes))


@functools.lru_cache
def _gatherer(mesh: jax.sharding.Mesh, axis: int) -> Callable[[Any], jax.Array]:
  whole = jax.sharding.NamedSharding(mesh, P())
  return _compiled(
    mesh,
    # What is split cannot be taken apart where axes are Explicit.
    lambda x: jnp.concatenate(
      list(mesh_lib.constrain(x, whole)), axis=axis - 1
    ),
  )


def _compiled(
  mesh: jax.sharding.Mesh, fn: Callable[[Any], jax.Array]
) -> Callable[[Any], jax.Array]:
  # On every process the whole result, so that each can look at it.
  whole = jax.sharding.NamedSharding(mesh, P())
  compiled = jax.jit(fn, out_shardings=whole)

  def call(x: Any) -> jax.Array:
    if getattr(getattr(x, "sharding", None), "mesh", None) != mesh:
      x = mesh_lib.put(x, whole)
    return compiled(x)

  return call


def _at(x: Any, index: int) -> Any:
  """Returns `x[index]`, also of what is split along an Explicit axis."""
  sharding = getattr(x, "sharding", None)
  if isinstance(sharding, jax.sharding.NamedSharding) and (
    jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  ):
    x = jax.device_put(x, jax.sharding.NamedSharding(sharding.mesh, P()))
  return x[index]


def _local_value(mesh: jax.sharding.Mesh, index: int, x: Any) -> jax.Array:
  """Returns `x[index]` on the devices of its replica, without communication."""
  devices = mesh_lib.replica_mesh(mesh, index)
  sharding = getattr(x, "sharding", None)
  if (
    not isinstance(sharding, jax.sharding.NamedSharding)
    or sharding.mesh != mesh
    or mesh_lib.REPLICA not in (*sharding.spec, None)[:1]
  ):
    whole = jax.sharding.NamedSharding(devices, P())
    return jax.device_put(_at(jnp.asarray(x), index), whole)
  parts = [
    shard.data[0]
    for shard in x.addressable_shards
    if shard.index[0].start in (index, None)
  ]
  rest = jax.sharding.NamedSharding(devices, P(*sharding.spec[1:]))
  return jax.make_array_from_single_device_arrays(x.shape[1:], rest, parts)
