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

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import stack

PyTree = Any


def of_first_replica(state: PyTree) -> PyTree:
  """Copies the state of replica 0 to all replicas, if they differ.

  Args:
    state: A TrainState. Any other tree has no wrappers, and so no groups.

  Returns:
    `state` itself if its replicas do not differ. Otherwise a state in which
    every array that is not split over the replicas has the bits of replica 0 on
    all devices. This takes one collective of the size of the state, and memory
    for a second state.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    >>> of_first_replica(state) is state
    True
  """
  if stack.divergence(getattr(state, "wrappers", ())) is None:
    return state
  leaves, treedef = jax.tree.flatten(state)
  indices = [i for i, x in enumerate(leaves) if _is_shared(x)]
  if indices:
    broadcast = _compile_broadcast(tuple(leaves[i].sharding for i in indices))
    # Wait: XLA's CPU runtime deadlocks with other collectives in flight.
    copies = jax.block_until_ready(broadcast([leaves[i] for i in indices]))
    for i, x in zip(indices, copies, strict=True):
      leaves[i] = x
  return jax.tree.unflatten(treedef, leaves)


def _is_shared(x: Any) -> bool:
  """Returns whether several replicas hold the same part of an array."""
  if not isinstance(x, jax.Array):
    return False
  sharding = x.sharding
  return (
    isinstance(sharding, jax.sharding.NamedSharding)
    and sharding.mesh.shape.get(mesh_lib.REPLICA, 1) > 1
    and mesh_lib.REPLICA not in mesh_lib.axes_in(sharding.spec)
  )


@functools.lru_cache
def _compile_broadcast(
  shardings: tuple[jax.sharding.NamedSharding, ...],
) -> Callable[[list[jax.Array]], list[jax.Array]]:
  """Returns a jitted function that copies arrays of replica 0 to all replicas.

  Args:
    shardings: Those of the arrays, all on one mesh.
  """
  return jax.jit(
    jax.shard_map(
      lambda arrays: jax.tree.map(replica_context.bits_of_first, arrays),
      mesh=shardings[0].mesh,
      in_specs=jax.P(),
      out_specs=jax.P(),
      axis_names={mesh_lib.REPLICA},
    ),
    out_shardings=list(shardings),
  )
