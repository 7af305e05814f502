"""States whose groups of replicas diverge, by design of a wrapper.

If a wrapper reduces gradients within groups of replicas, each group has its own
parameters, although their sharding says replicated. JAX then reads such an
array from one device, XLA may mix the values of several, and Orbax writes a
part of the array from each replica.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import stack

PyTree = Any

P = jax.sharding.PartitionSpec


def describe_divergence(state: PyTree) -> str | None:
  """Returns how the replicas of a state differ, in a sentence.

  Args:
    state: A TrainState. Any other tree has no wrappers, and so no groups.

  Returns:
    The sentence; None if all replicas have the same parameters.
  """
  if not isinstance(state, TrainState):
    return None
  return stack.divergence(state.wrappers)


def of_first_replica(state: PyTree) -> PyTree:
  """Copies the state of replica 0 to all replicas, if they differ.

  Args:
    state: A TrainState.

  Returns:
    `state` itself if its replicas do not differ. Otherwise a state in which
    every array that is not split over the replicas has the bits of replica 0 on
    all devices. This takes one collective of the size of the state, and memory
    for a second state.

  Example:
    >>> import flaxshard as fs, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    >>> of_first_replica(state) is state
    True
  """
  if describe_divergence(state) is None:
    return state
  leaves, treedef = jax.tree.flatten(state)
  indices = [i for i, x in enumerate(leaves) if _may_differ(x)]
  if indices:
    broadcast = _compile_broadcast(tuple(leaves[i].sharding for i in indices))
    # Wait: XLA's CPU runtime deadlocks with other collectives in flight.
    copies = jax.block_until_ready(broadcast([leaves[i] for i in indices]))
    for i, x in zip(indices, copies, strict=True):
      leaves[i] = x
  return jax.tree.unflatten(treedef, leaves)


def is_split_over_replicas(x: Any) -> bool:
  """Returns whether an array, or its abstract value, is split over replicas."""
  return (
    isinstance(x, (jax.Array, jax.ShapeDtypeStruct))
    and isinstance(x.sharding, jax.sharding.NamedSharding)
    and mesh_lib.REPLICA in specs_lib.axes_in(x.sharding.spec)
  )


def _may_differ(x: Any) -> bool:
  """Returns whether several replicas hold the same part of an array."""
  return (
    isinstance(x, jax.Array)
    and isinstance(x.sharding, jax.sharding.NamedSharding)
    and x.sharding.mesh.shape.get(mesh_lib.REPLICA, 1) > 1
    and not is_split_over_replicas(x)
  )


@functools.lru_cache
def _compile_broadcast(
  shardings: tuple[jax.sharding.NamedSharding, ...],
) -> Callable[[list[jax.Array]], list[jax.Array]]:
  """Returns a jitted function that copies arrays of replica 0 to all replicas.

  Args:
    shardings: Those of the arrays, all on one mesh.
  """

  def broadcast(x: jax.Array) -> jax.Array:
    # `psum` takes neither keys nor booleans.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      data = broadcast(jax.random.key_data(x))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.dtype == jnp.bool_:
      return broadcast(x.astype(jnp.int32)) == 1
    if jnp.iscomplexobj(x):
      return jax.lax.complex(broadcast(x.real), broadcast(x.imag))
    if jnp.issubdtype(x.dtype, jnp.floating):
      # The sum of integers keeps every bit; -0.0 + 0.0 would be 0.0.
      same_size = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
      bits = broadcast(jax.lax.bitcast_convert_type(x, same_size))
      return jax.lax.bitcast_convert_type(bits, x.dtype)
    is_first = jax.lax.axis_index(mesh_lib.REPLICA) == 0
    summand = jnp.where(is_first, x, jnp.zeros_like(x))
    return jax.lax.psum(summand, mesh_lib.REPLICA)

  return jax.jit(
    jax.shard_map(
      lambda arrays: jax.tree.map(broadcast, arrays),
      mesh=shardings[0].mesh,
      in_specs=P(),
      out_specs=P(),
      axis_names={mesh_lib.REPLICA},
    ),
    out_shardings=list(shardings),
  )
