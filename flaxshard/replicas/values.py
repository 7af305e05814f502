"""Values that differ per replica: `PerReplica`.

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

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib

PyTree = Any

P = jax.sharding.PartitionSpec


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
    >>> losses = PerReplica(jnp.array([1.0, 3.0]))
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
      sharding = x.sharding if isinstance(x, jax.Array) else None
      # JAX refuses to index an axis that is sharded over an Explicit mesh axis.
      if isinstance(sharding, jax.sharding.NamedSharding) and (
        jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
      ):
        whole = jax.sharding.NamedSharding(sharding.mesh, P())
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
    return jax.tree.map(
      lambda x: jnp.mean(jnp.asarray(x), axis, dtype, out), self.value
    )

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


def has_replica_axis(spec: Any) -> bool:
  """Returns whether a PartitionSpec makes an array per replica.

  Such an array has a leading axis, one row for each replica, sharded over
  `"replica"`.
  """
  # Anything else than a PartitionSpec is refused when the state is placed.
  entries = (*spec, None) if isinstance(spec, P) else (None,)
  return mesh_lib.REPLICA in specs_lib.axes_of(entries[0])
