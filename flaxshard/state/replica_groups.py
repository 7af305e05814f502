"""States of which groups of replicas have their own, though none is marked so.

Where a wrapper reduces groups of replicas apart, an array that its sharding
calls replicated differs between devices. Reading it gives what one device has,
XLA mixes them, and so does Orbax, which has each replica write a part.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.wrappers import stack

PyTree = Any

P = jax.sharding.PartitionSpec


def note(state: PyTree) -> str | None:
  """Returns what the wrappers tell of replicas that differ; None: they agree.

  Args:
    state: A TrainState.
  """
  return stack.divergence(getattr(state, "wrappers", ()))


def of_first_replica(state: PyTree) -> PyTree:
  """Returns a state with what replica 0 has, on every device.

  Args:
    state: A TrainState.

  Returns:
    The state as it is, where its replicas agree. Otherwise what is not split
    over the replicas is sent from the first to all, bit for bit: a collective
    of the state's size, and a second copy of it on each device.

  Example:
    >>> import flaxshard as fs, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1))
    >>> of_first_replica(state) is state
    True
  """
  if note(state) is None:
    return state
  leaves, treedef = jax.tree.flatten(state)
  which = [i for i, x in enumerate(leaves) if _may_differ(x)]
  if which:
    send = _sender(tuple(leaves[i].sharding for i in which))
    sent = jax.block_until_ready(send([leaves[i] for i in which]))
    for i, x in zip(which, sent, strict=True):
      leaves[i] = x
  return jax.tree.unflatten(treedef, leaves)


def is_split(x: Any) -> bool:
  """Whether an array is split over the replicas."""
  sharding = getattr(x, "sharding", None)
  return isinstance(sharding, jax.sharding.NamedSharding) and (
    mesh_lib.REPLICA in specs_lib.axes_in(sharding.spec)
  )


def _may_differ(x: Any) -> bool:
  sharding = getattr(x, "sharding", None)
  return (
    isinstance(sharding, jax.sharding.NamedSharding)
    and sharding.mesh.shape.get(mesh_lib.REPLICA, 1) > 1
    and not is_split(x)
  )


def _same_size(dtype: Any) -> Any:
  return jnp.dtype(f"uint{jnp.finfo(dtype).bits}")


@functools.lru_cache
def _sender(shardings: tuple[jax.sharding.NamedSharding, ...]) -> Any:
  """Returns what sends arrays of these shardings, all on one mesh."""

  def send(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      data = send(jax.random.key_data(x))
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if jnp.iscomplexobj(x):
      return jax.lax.complex(send(x.real), send(x.imag))
    if x.dtype == jnp.bool_:
      return send(x.astype(jnp.int32)) == 1
    if jnp.issubdtype(x.dtype, jnp.floating):
      # As bits, which no sum rounds; -0.0 + 0.0 would be 0.0.
      bits = send(jax.lax.bitcast_convert_type(x, _same_size(x.dtype)))
      return jax.lax.bitcast_convert_type(bits, x.dtype)
    first = jax.lax.axis_index(mesh_lib.REPLICA) == 0
    mine = jnp.where(first, x, jnp.zeros_like(x))
    return jax.lax.psum(mine, mesh_lib.REPLICA)

  return jax.jit(
    jax.shard_map(
      lambda xs: jax.tree.map(send, xs),
      mesh=shardings[0].mesh,
      in_specs=P(),
      out_specs=P(),
      axis_names={mesh_lib.REPLICA},
      check_vma=False,
    ),
    out_shardings=list(shardings),
  )
