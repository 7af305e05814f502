"""Sequential AGN commits: a parameter server, sharded over the replicas.

The center is updated with the commit of replica 0, then with that of replica 1,
and so on. Each replica continues with the parameters right after its commit.

If the update is element-wise, each replica updates one part of the center. It
receives that part of all commits, replaces each by the parameters right after
it, in the same memory, and sends them back. Every leaf is exchanged in its own
shape, so that it is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import logical_shards
from flaxshard.wrappers import elementwise
from flaxshard.wrappers.agn_commit import ModelState
from flaxshard.wrappers.agn_commit import Update

PyTree = Any
P = jax.sharding.PartitionSpec

# Instead of the dimension in which a leaf is split: every replica has all of it
# and makes the same updates.
WHOLE = -1


def commit_sequentially(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  """Updates the center with one commit after another, in replica order.

  If `update` is element-wise, each replica updates one part of the center. An
  all-to-all sends it that part of every commit. A second one returns that part
  of the parameters after every commit. With any other update, every commit is
  sent to all replicas, and all replicas do all updates.

  Args:
    update: One update of the center.
    center: The center.
    grads: The gradients that this replica commits; None for leaves without.
    shared: Further arguments of `update`.

  Returns:
    The new center, and the new local parameters: those of the center right
    after this replica's commit.
  """
  if replica_context.num_replicas() == 1 or not jax.tree.leaves(grads):
    center = update(center, grads, shared)
    return center, center.params
  # Over the logical devices of a replica.
  param_specs = logical_shards.specs_within(center.params)
  grad_specs = jax.tree.map(
    lambda spec, g: None if g is None else spec, param_specs, grads
  )
  slot_specs = opt_state_lib.specs(center.opt_state, center.params, param_specs)
  specs = ModelState(param_specs, slot_specs), grad_specs
  # Decided for the shapes on one logical device: an update may depend on them.
  own = jax.tree.map(logical_shards.part_of, (center, grads), specs)
  dims = _choose_dims(*own)
  part = jax.tree.map(_part_of, own[0], dims)
  grad_part = jax.tree.map(
    lambda p, g: None if g is None else jax.ShapeDtypeStruct(p.shape, g.dtype),
    part.params,
    grads,
  )
  if not elementwise.is_elementwise(
    update, (center, grads, shared), (part, grad_part, shared)
  ):
    return _commit_whole(update, center, grads, shared)
  commit: Callable[..., Any] = functools.partial(_commit_parts, update, dims)
  if any(jax.tree.leaves(specs)):
    # So that a device exchanges its shard with the same device of the other
    # replicas.
    commit = logical_shards.on_logical_devices(
      commit, (*specs, P()), (specs[0], param_specs)
    )
  return commit(center, grads, shared)


def choose_dim(shape: Sequence[int], count: int) -> int:
  """Returns the dimension that splits into equal parts with least padding.

  Args:
    shape: The shape of an array.
    count: Number of parts.

  Returns:
    A dimension; `WHOLE` for an array of one element or none.

  Example:
    >>> choose_dim((3, 16), 8)
    1
  """
  dims = [d for d, n in enumerate(shape) if n > 1 and 0 not in shape]
  # The padded size relative to the size.
  padding = lambda d: -(-shape[d] // count) * count / shape[d]
  return min(dims, key=padding, default=WHOLE)


def _choose_dims(center: ModelState, grads: PyTree) -> ModelState:
  """Returns the dimensions in which the center is split."""
  count = replica_context.num_replicas()
  dims = jax.tree.map(
    lambda p, g: WHOLE if g is None else choose_dim(p.shape, count),
    center.params,
    grads,
  )
  # Slots have to be split as their parameters. `opt_state.specs` finds them,
  # so express the split as partition specs and read it back.
  specs = jax.tree.map(
    lambda dim: P() if dim == WHOLE else P(*[None] * dim, mesh_lib.REPLICA),
    dims,
  )
  slot_specs = opt_state_lib.specs(center.opt_state, center.params, specs)
  return ModelState(dims, jax.tree.map(lambda spec: len(spec) - 1, slot_specs))


def _commit_parts(
  update: Update,
  dims: ModelState,
  center: ModelState,
  grads: PyTree,
  shared: PyTree,
) -> tuple[ModelState, PyTree]:
  """Applies all commits to this replica's part of the center.

  Args:
    update: One update of the center, element-wise.
    dims: The dimensions in which the center is split.
    center: The center.
    grads: The gradients that this replica commits.
    shared: Further arguments of `update`.

  Returns:
    The new center and this replica's new local parameters, as
    `commit_sequentially`.
  """

  def send(p: jax.Array, g: jax.Array | None, dim: int) -> jax.Array | None:
    if g is None:
      return None
    # In a dtype that holds the parameters exactly as well.
    return _send(g.astype(jnp.promote_types(g.dtype, p.dtype)), dim)

  def apply_commit(
    k: jax.Array, carry: tuple[ModelState, PyTree]
  ) -> tuple[ModelState, PyTree]:
    part, received = carry
    commit = jax.tree.map(
      lambda x, g, dim: _read(x, dim, k).astype(g.dtype),
      received,
      grads,
      grad_dims,
    )
    part = update(part, commit, shared)
    received = jax.tree.map(
      lambda p, x, dim: None if x is None else _write(x, dim, k, p),
      part.params,
      received,
      dims.params,
    )
    return part, received

  grad_dims = jax.tree.map(
    lambda dim, g: None if g is None else dim, dims.params, grads
  )
  received = jax.tree.map(send, center.params, grads, dims.params)
  part = jax.tree.map(_own_part, center, dims)
  part, received = jax.lax.fori_loop(
    0, replica_context.num_replicas(), apply_commit, (part, received)
  )
  new = jax.tree.map(_gather, center, part, dims)
  local_params = jax.tree.map(
    lambda p, x, dim: p if x is None else _send_back(x, dim, p),
    new.params,
    received,
    dims.params,
  )
  return new, local_params


def _commit_whole(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  """Applies all commits to the whole center, on every replica."""
  replica = jax.lax.axis_index(mesh_lib.REPLICA)

  def apply_commit(
    k: jax.Array, carry: tuple[ModelState, PyTree]
  ) -> tuple[ModelState, PyTree]:
    center, new_local_params = carry
    # The sum of replica k's gradients and zeros broadcasts replica k's. One
    # commit at a time: an all-gather would hold a copy for each replica.
    sent = jax.tree.map(
      lambda g: jnp.where(replica == k, g, jnp.zeros_like(g)), grads
    )
    commit = replica_context.reduce_over_replicas("sum", sent)
    center = update(center, commit, shared)
    return center, jax.tree.map(
      lambda new, old: jnp.where(replica == k, new, old),
      center.params,
      new_local_params,
    )

  return jax.lax.fori_loop(
    0, replica_context.num_replicas(), apply_commit, (center, center.params)
  )


# -- One leaf, which is split in the dimension `dim` or not at all.


def _part_of(x: Any, dim: int) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of a part."""
  shape = list(x.shape)
  if dim != WHOLE:
    shape[dim] = _ceil_div(shape[dim])
  return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def _ceil_div(n: int) -> int:
  return -(-n // replica_context.num_replicas())


def _pad(x: jax.Array, dim: int) -> jax.Array:
  """Appends zeros, so that all parts have the same size."""
  count = replica_context.num_replicas()
  missing = _ceil_div(x.shape[dim]) * count - x.shape[dim]
  widths = [(0, missing if d == dim else 0) for d in range(x.ndim)]
  return jnp.pad(x, widths) if missing else x


def _own_part(x: jax.Array, dim: int) -> jax.Array:
  """Returns this replica's part."""
  if dim == WHOLE:
    return x
  return _read(_pad(x, dim), dim, jax.lax.axis_index(mesh_lib.REPLICA))


def _gather(x: jax.Array, part: jax.Array, dim: int) -> jax.Array:
  """Returns an array like `x` from the part of each replica."""
  if dim == WHOLE:
    return part
  new = jax.lax.all_gather(part, mesh_lib.REPLICA, axis=dim, tiled=True)
  return _copy_result(jax.lax.slice_in_dim(new, 0, x.shape[dim], axis=dim))


def _send(x: jax.Array, dim: int) -> jax.Array:
  """Sends part i to replica i; part i of the result is from replica i."""
  if dim == WHOLE:
    return jax.lax.all_gather(x, mesh_lib.REPLICA)
  return _exchange(_pad(x, dim), dim)


def _send_back(received: jax.Array, dim: int, like: jax.Array) -> jax.Array:
  """Returns what was written to this replica's parts, as an array `like`."""
  if dim == WHOLE:
    return received[jax.lax.axis_index(mesh_lib.REPLICA)].astype(like.dtype)
  new = _exchange(received.astype(like.dtype), dim)
  return _copy_result(jax.lax.slice_in_dim(new, 0, like.shape[dim], axis=dim))


def _exchange(x: jax.Array, dim: int) -> jax.Array:
  return jax.lax.all_to_all(x, mesh_lib.REPLICA, dim, dim, tiled=True)


def _read(received: jax.Array, dim: int, k: jax.Array) -> jax.Array:
  """Returns the part of replica `k`."""
  if dim == WHOLE:
    return received[k]
  size = _ceil_div(received.shape[dim])
  return jax.lax.dynamic_slice_in_dim(received, k * size, size, dim)


def _write(
  received: jax.Array, dim: int, k: jax.Array, part: jax.Array
) -> jax.Array:
  """Replaces the part of replica `k`."""
  part = part.astype(received.dtype)
  if dim == WHOLE:
    return received.at[k].set(part)
  start = k * part.shape[dim]
  return jax.lax.dynamic_update_slice_in_dim(received, part, start, dim)


def _copy_result(x: jax.Array) -> jax.Array:
  """Returns `x`, the result of a collective; on TPU from another operation.

  The TPU compiler (libtpu 0.0.42) keeps the result of a collective in memory of
  its own. As the result of a conditional's branch, it would be copied into the
  memory of the state, and so would be the old state, also in the steps that do
  not take this branch.
  """
  # Behind the barrier XLA does not see that the condition is True.
  select = lambda x: jnp.where(
    jax.lax.optimization_barrier(jnp.array(True)), x, jnp.zeros_like(x)
  )
  return jax.lax.platform_dependent(x, tpu=select, default=lambda x: x)
