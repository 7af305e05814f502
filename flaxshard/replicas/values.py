"""Per-replica values: `PerReplica`, and one value for all replicas instead.

A leaf is per replica if it has a leading axis with one row for each replica,
sharded over `"replica"`. Otherwise it is replicated: the same on all replicas.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PerReplica:
  """A value that differs per replica, with the values of all replicas.

  In an argument of `Strategy.run` each replica sees its own row in place of the
  `PerReplica`. Everything that a function returns, except TrainStates, becomes
  a `PerReplica` outside of `run`. `Strategy.reduce` makes one value of it.

  It is no number: write `float(losses.mean())` or `float(losses[0])`. With
  `jax.tree.map` a function applies to the values of all replicas.

  Attributes:
    value: An array `[replicas, ...]`, or a tree of such arrays.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp
    >>> losses = fs.PerReplica(jnp.array([1.0, 3.0]))
    >>> float(losses[1]), float(losses.mean())
    (3.0, 2.0)

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

    def take_row(x: Any) -> Any:
      sharding = getattr(x, "sharding", None)  # a traced array has none
      # JAX refuses to index an axis that is sharded over an Explicit mesh axis.
      if isinstance(sharding, jax.sharding.NamedSharding) and (
        jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
      ):
        whole = jax.sharding.NamedSharding(sharding.mesh, jax.P())
        return jax.device_put(x, whole)[index]
      return x[index]

    return jax.tree.map(take_row, self.value)

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

    def mean_of(x: Any) -> jax.Array:
      trees.check_integers("PerReplica: value", x)
      return jnp.mean(jnp.asarray(x), axis, dtype, out)

    return jax.tree.map(mean_of, self.value)

  def __float__(self) -> float:
    raise self._ambiguous("float(x)")

  def __bool__(self) -> bool:
    # Otherwise it would be True because of `__len__`.
    raise self._ambiguous("the truth of x")

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


def paths_of_per_replica(tree: PyTree) -> frozenset[tuple[str, ...]]:
  """Returns where a tree has a `PerReplica`, as `trees.path_strings`."""
  nodes = jax.tree.leaves_with_path(tree, is_leaf=is_per_replica)
  return frozenset(trees.path_strings(p) for p, x in nodes if is_per_replica(x))


def mean_over_replicas(tree: PyTree) -> PyTree:
  """Replaces each `PerReplica` of a tree by one value, outside of `run`.

  Floating-point values are averaged; others (counters, PRNG keys) take the
  value of replica 0.
  """

  def mean_or_first(rows: Any) -> Any:
    if jnp.issubdtype(rows.dtype, jnp.inexact):
      # Without `dtype`, JAX computes the mean of float16 in float32.
      return jnp.mean(rows, axis=0)
    return PerReplica(rows)[0]

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

  def broadcast(rows: Any, x: jax.Array) -> jax.Array:
    return jax.device_put(jnp.broadcast_to(x, rows.shape), rows.sharding)

  return jax.tree.map(
    lambda old, x: (
      jax.tree.map(broadcast, old, PerReplica(x)) if is_per_replica(old) else x
    ),
    like,
    tree,
    is_leaf=is_per_replica,
  )


def has_replica_axis(spec: Any) -> bool:
  """Returns whether a PartitionSpec makes an array per replica.

  Such an array has a leading axis, one row for each replica, sharded over
  `"replica"`.
  """
  # Anything else than a PartitionSpec is refused when the state is placed.
  entries = (*spec, None) if isinstance(spec, jax.P) else (None,)
  return mesh_lib.REPLICA in mesh_lib.axes_of(entries[0])
