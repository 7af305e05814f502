"""Per-replica values: `PerReplica`, and functions over them outside of `run`.

A leaf is per replica if it has a leading axis with one row for each replica,
sharded over `"replica"`. Otherwise it is replicated: the same on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import operator
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


_NUMBERS = int, float, complex, np.generic, np.ndarray, jax.Array


def _operator(
  op: Callable[[Any, Any], Any], reflected: bool = False
) -> Callable[[Any, Any], Any]:
  """Returns the method of an operator: it is applied on each replica."""

  def apply(self: PerReplica, other: Any) -> Any:
    if isinstance(other, PerReplica):
      return jax.tree.map(op, self, other)
    if not isinstance(other, _NUMBERS):
      return NotImplemented
    # An array could have a value for each replica, or be one for all.
    if np.ndim(other):
      raise TypeError(
        f"a PerReplica and an array of shape {np.shape(other)} are ambiguous: "
        "combine them in Strategy.run, or with x.value, [replicas, ...]."
      )
    flipped = lambda x: op(other, x)
    return jax.tree.map(flipped if reflected else lambda x: op(x, other), self)

  return apply


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PerReplica:
  """A value that differs per replica, with the values of all replicas.

  In an argument of `Strategy.run` each replica sees its own row in place of the
  `PerReplica`. Everything that a function returns, except TrainStates, becomes
  a `PerReplica` outside of `run`. `Strategy.reduce` makes one value of it.

  Arithmetic and order comparisons with a number, or with another `PerReplica`,
  apply to each replica's value. `==` compares identities. What asks for one
  number (`float`, `int`, `bool`, `round`, `item`, a format) raises a TypeError:
  write `float(losses.mean())` or `float(losses[0])`.

  Attributes:
    value: An array `[replicas, ...]`, or a tree of such arrays.

  Example:
    >>> losses = PerReplica(jnp.array([1.0, 3.0]))
    >>> float(losses[1]), float(losses.mean())
    (3.0, 2.0)
    >>> [float(x) for x in 1 + losses / 2]
    [1.5, 2.5]

  References:
    `tf.distribute.DistributedValues`.
  """

  value: Any

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
    """Returns the values of all replicas, `[replicas, ...]`."""
    del copy  # A jax.Array is copied to the host in any case.
    return np.asarray(self.value, dtype)

  def __getitem__(self, index: int) -> Any:
    """Returns the value of replica `index`."""
    # Anything else is a TypeError of Python: a slice, a string, a float.
    index = operator.index(index)
    # JAX clamps an index out of range, so that a `for` loop would never end.
    if not -len(self) <= index < len(self):
      raise IndexError(
        f"PerReplica: index must be below {len(self)}, the number of replicas, "
        f"got {index}."
      )
    return jax.tree.map(lambda x: _row(x, index), self.value)

  def __len__(self) -> int:
    """Returns the number of replicas."""
    return len(jax.tree.leaves(self.value)[0])

  def mean(self, axis: Any = None, dtype: Any = None, out: None = None) -> Any:
    """Returns the mean over the replicas and all dimensions of their values.

    Args:
      axis: As in `jnp.mean`, of the array `[replicas, ...]`. 0 is the mean over
        the replicas alone.
      dtype: The dtype of the result, as in `jnp.mean`.
      out: Must be None; `np.mean` passes it.

    Returns:
      An array, or a tree of arrays like `value`.
    """
    return jax.tree.map(
      lambda x: jnp.mean(jnp.asarray(x), axis, dtype, out), self.value
    )

  # So that `np.float32(2) * x` calls `__rmul__`.
  __array_priority__ = 1000

  __add__ = _operator(operator.add)
  __radd__ = _operator(operator.add, reflected=True)
  __sub__ = _operator(operator.sub)
  __rsub__ = _operator(operator.sub, reflected=True)
  __mul__ = _operator(operator.mul)
  __rmul__ = _operator(operator.mul, reflected=True)
  __truediv__ = _operator(operator.truediv)
  __rtruediv__ = _operator(operator.truediv, reflected=True)
  __floordiv__ = _operator(operator.floordiv)
  __rfloordiv__ = _operator(operator.floordiv, reflected=True)
  __mod__ = _operator(operator.mod)
  __rmod__ = _operator(operator.mod, reflected=True)
  __pow__ = _operator(operator.pow)
  __rpow__ = _operator(operator.pow, reflected=True)
  __lt__ = _operator(operator.lt)
  __le__ = _operator(operator.le)
  __gt__ = _operator(operator.gt)
  __ge__ = _operator(operator.ge)

  def __neg__(self) -> PerReplica:
    return jax.tree.map(operator.neg, self)

  def __abs__(self) -> PerReplica:
    return jax.tree.map(abs, self)

  def __float__(self) -> float:
    raise self._ambiguous("float(x)")

  def __int__(self) -> int:
    raise self._ambiguous("int(x)")

  def __bool__(self) -> bool:
    # Otherwise it would be True because of `__len__`.
    raise self._ambiguous("the truth of x")

  def __round__(self, digits: int | None = None) -> Any:
    raise self._ambiguous("round(x)")

  def item(self) -> Any:
    """Raises a TypeError, as `float` does."""
    raise self._ambiguous("x.item()")

  def __format__(self, spec: str) -> str:
    if spec:
      raise self._ambiguous(f"the format {spec!r} of x")
    return str(self)

  def _ambiguous(self, what: str) -> TypeError:
    return TypeError(
      f"{what} is ambiguous for a PerReplica, which has the values of "
      f"{len(self)} replicas. Write x.mean() for their mean, x[0] for the "
      "value of one replica, or strategy.reduce('sum', x)."
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Replicated:
  """A result that is the same on all replicas: `run` returns `value` itself.

  Attributes:
    value: A tree of arrays.
  """

  value: Any


def is_per_replica(x: Any) -> bool:
  """Returns whether `x` is a `PerReplica`."""
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
  """Returns whether a tree contains a `PerReplica`."""
  leaves = jax.tree.leaves(tree, is_leaf=is_per_replica)
  return any(map(is_per_replica, leaves))


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
  trees.check_arrays("reduce: value", value)

  def reduce_array(v: Any) -> jax.Array:
    axes = () if axis is None else (_axis_after_replicas("reduce", axis, v),)
    return _reducer(mesh, reduce_op, (0, *axes))(v)

  def reduce_leaf(path: Any, x: Any) -> Any:
    if is_per_replica(x):
      return jax.tree.map(reduce_array, _check_rows(mesh, "reduce", path, x))
    if reduce_op == "sum":
      # TensorFlow refuses it too: it could mean x or x times the replicas.
      raise ValueError(
        f"reduce: value[{trees.path_string(path)}] must be a PerReplica, got "
        f"{x!r}: the sum of a replicated value is ambiguous."
      )
    if axis is None:
      return x
    replica_context.check_axis("reduce", axis, np.shape(x))
    return jnp.mean(jnp.asarray(x), axis)

  return _map_leaves(reduce_leaf, value)


def gather(mesh: jax.sharding.Mesh, value: PyTree, axis: int) -> PyTree:
  """Concatenates per-replica values; see `Strategy.gather`."""

  def gather_leaf(path: Any, x: Any) -> Any:
    if not is_per_replica(x):
      raise ValueError(
        f"gather: value[{trees.path_string(path)}] must be a PerReplica, got "
        f"{x!r}."
      )
    return jax.tree.map(
      lambda v: _gatherer(mesh, _axis_after_replicas("gather", axis, v))(v),
      _check_rows(mesh, "gather", path, x),
    )

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
  if not callable(value_fn):
    raise TypeError(f"value_fn must be a function, got {value_fn!r}.")
  # Each process calls it for its own replicas only.
  local = local_replicas(mesh)
  num_replicas = mesh.shape[mesh_lib.REPLICA]
  values = [value_fn(ValueContext(i, num_replicas)) for i in local]
  for i, value in zip(local, values, strict=True):
    where = f"value_fn of replica {i}"
    trees.check_arrays(where, value)
    for path, x in jax.tree_util.tree_leaves_with_path(value):
      _check_integers(f"{where}: value[{trees.path_string(path)}]", x)
    difference = trees.first_difference(value, values[0])
    if difference:
      raise ValueError(
        "value_fn must return values of one structure, with the same shapes "
        f"and dtypes, but replica {i} differs from replica {local[0]} at "
        f"{difference}."
      )
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


def mean_over_replicas(tree: PyTree) -> PyTree:
  """Replaces each `PerReplica` of a tree by one value, outside of `run`.

  Floating-point values are averaged; others (counters, PRNG keys) take the
  value of replica 0.
  """

  def mean_or_first(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
      # Without `dtype`, JAX computes the mean of float16 in float32.
      return jnp.mean(x, axis=0)
    return _row(x, 0)

  return jax.tree.map(
    lambda x: jax.tree.map(mean_or_first, x.value) if is_per_replica(x) else x,
    tree,
    is_leaf=is_per_replica,
  )


def broadcast_to_replicas(tree: PyTree, like: PyTree) -> PyTree:
  """Gives all replicas the same value wherever `like` has a `PerReplica`.

  Args:
    tree: A tree with one value for each `PerReplica` of `like`.
    like: A tree with the structure, shapes and shardings of the result.
  """

  def broadcast(old: jax.Array, x: jax.Array) -> jax.Array:
    return jax.device_put(jnp.broadcast_to(x, old.shape), old.sharding)

  return jax.tree.map(
    lambda old, x: (
      jax.tree.map(broadcast, old, PerReplica(x)) if is_per_replica(old) else x
    ),
    like,
    tree,
    is_leaf=is_per_replica,
  )


def _check_integers(where: str, x: Any) -> None:
  """Raises a ValueError if JAX would wrap integers of an array around."""
  overflow = trees.integer_overflow(x)
  if overflow is not None:
    raise ValueError(f"{where} {overflow}")


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
    _check_integers(f"{where}: value[{trees.path_string(path)}]", leaf)
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
  return _compiled(mesh, lambda x: fn(x, axis=axes))


@functools.lru_cache
def _gatherer(mesh: jax.sharding.Mesh, axis: int) -> Callable[[Any], jax.Array]:
  whole = jax.sharding.NamedSharding(mesh, P())
  return _compiled(
    mesh,
    # With Explicit axes JAX refuses to iterate over a sharded axis.
    lambda x: jnp.concatenate(
      list(mesh_lib.constrain(x, whole)), axis=axis - 1
    ),
  )


def _compiled(
  mesh: jax.sharding.Mesh, fn: Callable[[Any], jax.Array]
) -> Callable[[Any], jax.Array]:
  # Replicated, so that every process can read the whole result.
  whole = jax.sharding.NamedSharding(mesh, P())
  compiled = jax.jit(fn, out_shardings=whole)

  def put_and_call(x: Any) -> jax.Array:
    sharding = x.sharding if isinstance(x, jax.Array) else None
    if (
      not isinstance(sharding, jax.sharding.NamedSharding)
      or sharding.mesh != mesh
    ):
      x = mesh_lib.put(x, whole)
    return compiled(x)

  return put_and_call


def _row(x: Any, index: int) -> Any:
  """Returns `x[index]`."""
  # JAX refuses to index an axis that is sharded over an Explicit mesh axis.
  sharding = x.sharding if isinstance(x, jax.Array) else None
  if isinstance(sharding, jax.sharding.NamedSharding) and (
    jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
  ):
    x = jax.device_put(x, jax.sharding.NamedSharding(sharding.mesh, P()))
  return x[index]


def _local_row(mesh: jax.sharding.Mesh, index: int, x: Any) -> jax.Array:
  """Returns `x[index]` on the devices of its replica, without communication."""
  devices = mesh_lib.replica_mesh(mesh, index)
  sharding = x.sharding if isinstance(x, jax.Array) else None
  if (
    not isinstance(sharding, jax.sharding.NamedSharding)
    or sharding.mesh != mesh
    or mesh_lib.REPLICA not in (*sharding.spec, None)[:1]
  ):
    whole = jax.sharding.NamedSharding(devices, P())
    return jax.device_put(_row(jnp.asarray(x), index), whole)
  # A shard without a start holds all rows: the mesh has one replica.
  parts = [
    shard.data[0]
    for shard in x.addressable_shards
    if shard.index[0].start in (index, None)
  ]
  rest = jax.sharding.NamedSharding(devices, P(*sharding.spec[1:]))
  return jax.make_array_from_single_device_arrays(x.shape[1:], rest, parts)
