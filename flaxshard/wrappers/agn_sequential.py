"""Sequential AGN commits: a parameter server, sharded over the replicas.

The center is updated with the commit of replica 0, then with that of replica 1,
and so on. Each replica continues with the parameters right after its commit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import logical_shards
from flaxshard.wrappers import agn_rows
from flaxshard.wrappers import elementwise
from flaxshard.wrappers.agn_commit import ModelState
from flaxshard.wrappers.agn_commit import Update
from flaxshard.wrappers.agn_exchange import Exchange
from flaxshard.wrappers.agn_rows import Parts

PyTree = Any
P = jax.sharding.PartitionSpec


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
  if any(map(is_indexed_slices, _leaves(grads))):
    return _commit_whole(update, center, grads, shared)
  specs = _specs_within_replica(center, grads)
  # Decided for the shapes on one logical device: an update may depend on them.
  split = _Split.of(
    *jax.tree.map(logical_shards.part_of, (center, grads), specs)
  )
  # Rows are floating-point, so complex gradients cannot be packed.
  if all(_is_real(g) for g in jax.tree.leaves(grads)) and (
    elementwise.is_elementwise(
      update,
      (center, grads, shared),
      (split.center.shapes, split.grads.shapes, shared),
      (
        split.center.dims,
        split.grads.dims,
        jax.tree.map(lambda _: elementwise.WHOLE, shared),
      ),
    )
  ):
    return _commit_on_logical_devices(update, center, grads, shared, specs)
  return _commit_whole(update, center, grads, shared)


def _specs_within_replica(
  center: ModelState, grads: PyTree
) -> tuple[ModelState, PyTree]:
  """Returns the specs of center and commits over a replica's logical axes."""
  param_specs, grad_specs = logical_shards.gradient_specs(center.params, grads)
  slot_specs = opt_state_lib.specs(center.opt_state, center.params, param_specs)
  return ModelState(param_specs, slot_specs), grad_specs


class _Split(NamedTuple):
  """The split of one commit over the replicas.

  Attributes:
    center: The center.
    grads: The gradients that are committed.
    params: The parameters with a gradient, as a list: no other changes.
  """

  center: Parts
  grads: Parts
  params: Parts

  @classmethod
  def of(cls, center: ModelState, grads: PyTree) -> _Split:
    count = replica_context.num_replicas()
    treedef: Any = jax.tree.structure(center.params)
    params = jax.tree.leaves(center.params)
    all_grads = treedef.flatten_up_to(grads)
    dims = [
      elementwise.WHOLE if g is None else agn_rows.choose_dim(p.shape, count)
      for g, p in zip(all_grads, params, strict=True)
    ]
    # Slots have to be split as their parameters. `opt_state.specs` finds them,
    # so express the split as partition specs and read it back.
    specs = [
      P(*(None,) * dim, mesh_lib.REPLICA) if dim != elementwise.WHOLE else P()
      for dim in dims
    ]
    slot_specs = opt_state_lib.specs(
      center.opt_state, center.params, treedef.unflatten(specs)
    )
    slot_dims = jax.tree.map(
      lambda spec: len(spec) - 1 if tuple(spec) else elementwise.WHOLE,
      slot_specs,
    )
    changed = [i for i, g in enumerate(all_grads) if g is not None]
    changed_dims = [dims[i] for i in changed]
    return cls(
      Parts.of(center, ModelState(treedef.unflatten(dims), slot_dims), count),
      Parts.of(grads, changed_dims, count),
      Parts.of([params[i] for i in changed], changed_dims, count),
    )


def _commit_on_logical_devices(
  update: Update,
  center: ModelState,
  grads: PyTree,
  shared: PyTree,
  specs: tuple[ModelState, PyTree],
) -> tuple[ModelState, PyTree]:
  """Runs `_commit_parts` on the shard of each logical device."""

  def commit_shard(
    center: ModelState, grads: PyTree, shared: PyTree
  ) -> tuple[ModelState, PyTree]:
    split = _Split.of(center, grads)
    return _commit_parts(update, center, grads, shared, split)

  if not any(jax.tree.leaves(specs)):
    return commit_shard(center, grads, shared)
  # So that a device exchanges its shard with the same device of the other
  # replicas: XLA might gather a sharded leaf to reshape it into a row.
  center_specs, grad_specs = specs
  return logical_shards.on_logical_devices(
    commit_shard,
    (center_specs, grad_specs, P()),
    (center_specs, center_specs.params),
  )(center, grads, shared)


def _commit_parts(
  update: Update,
  center: ModelState,
  grads: PyTree,
  shared: PyTree,
  split: _Split,
) -> tuple[ModelState, PyTree]:
  """Applies all commits to this replica's part of the center.

  Args:
    update: One update of the center, element-wise.
    center: The center.
    grads: The gradients that this replica commits.
    shared: Further arguments of `update`.
    split: The split of center and gradients into parts.

  Returns:
    The new center and this replica's new local parameters, as
    `commit_sequentially`.
  """
  treedef: Any = jax.tree.structure(center.params)
  has_gradient = [g is not None for g in treedef.flatten_up_to(grads)]

  def pick_changed(params: PyTree) -> list[jax.Array]:
    leaves = zip(jax.tree.leaves(params), has_gradient, strict=True)
    return [p for p, changed in leaves if changed]

  exchange = Exchange(split.grads.leaves, split.params.leaves)
  grads_treedef: Any = jax.tree.structure(grads)

  def apply_commit(
    k: jax.Array, carry: tuple[ModelState, Any]
  ) -> tuple[ModelState, Any]:
    part, received = carry
    commit = grads_treedef.unflatten(exchange.read(received, k))
    part = update(part, commit, shared)
    return part, exchange.write(received, k, pick_changed(part.params))

  received = exchange.send(jax.tree.leaves(grads))
  part = split.center.slice_part(center, jax.lax.axis_index(mesh_lib.REPLICA))
  part, received = jax.lax.fori_loop(
    0, replica_context.num_replicas(), apply_commit, (part, received)
  )
  new_center = split.center.gather_parts(part)
  changed = iter(exchange.send_back(received))
  new_local_params = [
    next(changed) if has else p
    for p, has in zip(
      jax.tree.leaves(new_center.params), has_gradient, strict=True
    )
  ]
  return new_center, treedef.unflatten(new_local_params)


def _commit_whole(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  """Applies all commits to the whole center, on every replica."""
  replica = jax.lax.axis_index(mesh_lib.REPLICA)
  commits = _Commits(grads)

  def apply_commit(
    k: jax.Array, carry: tuple[ModelState, PyTree]
  ) -> tuple[ModelState, PyTree]:
    center, new_local_params = carry
    commit = commits.receive(k)
    center = update(center, commit, shared)

    def follow(new: jax.Array, old: jax.Array, g: Any) -> jax.Array:
      if not is_indexed_slices(g):
        return jnp.where(replica == k, new, old)
      # Up to this replica's own commit its table follows the center, by the
      # rows of each commit alone: a select would read the whole table.
      rows = new.at[g.indices].get(mode="fill", fill_value=0)
      indices = jnp.where(k <= replica, g.indices, g.dense_shape[0])
      return old.at[indices].set(rows, mode="drop")

    return center, jax.tree.map(follow, center.params, new_local_params, commit)

  return jax.lax.fori_loop(
    0, replica_context.num_replicas(), apply_commit, (center, center.params)
  )


class _Commits:
  """The commits of all replicas, one at a time."""

  def __init__(self, grads: PyTree):
    leaves = jax.tree.leaves(grads, is_leaf=is_indexed_slices)
    self._treedef: Any = jax.tree.structure(grads, is_leaf=is_indexed_slices)
    self._arrays = {
      i: g for i, g in enumerate(leaves) if not is_indexed_slices(g)
    }
    # All rows at once: they are few.
    self._rows = {
      i: jax.tree.map(lambda x: jax.lax.all_gather(x, mesh_lib.REPLICA), g)
      for i, g in enumerate(leaves)
      if is_indexed_slices(g)
    }

  def receive(self, k: jax.Array) -> PyTree:
    """Returns the gradients that replica `k` commits."""
    is_mine = jax.lax.axis_index(mesh_lib.REPLICA) == k
    # The sum of replica k's gradients and zeros broadcasts replica k's. One
    # commit at a time: an all-gather would hold a copy for each replica.
    sent = jax.tree.map(
      lambda g: jnp.where(is_mine, g, jnp.zeros_like(g)), self._arrays
    )
    received = jax.tree.map(lambda x: x[k], self._rows)
    if sent:
      received |= replica_context.reduce_over_replicas("sum", sent)
    return self._treedef.unflatten(received[i] for i in range(len(received)))


def _leaves(grads: PyTree) -> list[Any]:
  return jax.tree.leaves(grads, is_leaf=is_indexed_slices)


def _is_real(x: jax.Array) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)
