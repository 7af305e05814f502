"""Sequential AGN commits: a parameter server, sharded over the replicas.

The center is updated with the commit of replica 0, then with that of replica 1,
and so on. Each replica continues with the parameters right after its commit.

If the update is element-wise, each replica updates one part of the center. It
receives that part of all commits, replaces each by the parameters right after
it, in the same memory, and sends them back. A large leaf is exchanged in its
own shape, so that it is not copied. Small leaves share a collective: their
parts are packed into rows, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import math
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
from flaxshard.wrappers.elementwise import WHOLE

PyTree = Any
P = jax.sharding.PartitionSpec

# From this many elements on, packing a leaf into rows takes longer than a
# collective of its own: 1 MiB of float32.
LARGE = 1 << 18


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
  param_specs, grad_specs = logical_shards.gradient_specs(center.params, grads)
  slot_specs = opt_state_lib.specs(center.opt_state, center.params, param_specs)
  specs = ModelState(param_specs, slot_specs), grad_specs
  # Decided for the shapes on one logical device: an update may depend on them.
  part = jax.tree.map(logical_shards.part_of, (center, grads), specs)
  dims = _choose_dims(*part)
  # Rows are floating-point: complex gradients cannot be packed.
  is_real = all(
    jnp.issubdtype(g.dtype, jnp.floating) for g in jax.tree.leaves(grads)
  )
  if is_real and elementwise.is_elementwise(
    update,
    (center, grads, shared),
    (*_part_shapes(part, dims), shared),
    (*dims, jax.tree.map(lambda _: WHOLE, shared)),
  ):
    commit: Callable[..., Any] = functools.partial(_commit_parts, update)
    if any(jax.tree.leaves(specs)):
      # So that a device exchanges its shard with the same device of the other
      # replicas: XLA might gather a sharded leaf to reshape it into a row.
      commit = logical_shards.on_logical_devices(
        commit, (*specs, P()), (specs[0], param_specs)
      )
    return commit(center, grads, shared)
  return _commit_whole(update, center, grads, shared)


def choose_dim(shape: Sequence[int], count: int) -> int:
  """Returns the dimension that splits into equal parts with least padding.

  Args:
    shape: The shape of an array.
    count: Number of parts.

  Returns:
    A dimension; `WHOLE` for a scalar and an array without elements.

  Example:
    >>> choose_dim((3, 16), 8)
    1
  """
  if 0 in shape:
    return WHOLE
  return min(
    range(len(shape)),
    # The padded size relative to the size.
    key=lambda d: -(-shape[d] // count) * count / shape[d],
    default=WHOLE,
  )


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """The split of one leaf into a part for each replica.

  Attributes:
    shape: The shape of the leaf.
    dtype: Its dtype.
    dim: The dimension that is split; `WHOLE` if every part is the whole leaf.
  """

  shape: tuple[int, ...]
  dtype: Any
  dim: int

  @property
  def part_length(self) -> int:
    """The size of a part in the dimension that is split, rounded up."""
    return -(-self.shape[self.dim] // replica_context.num_replicas())

  @property
  def part_shape(self) -> tuple[int, ...]:
    """The shape of a part."""
    if self.dim == WHOLE:
      return self.shape
    before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
    return (*before, self.part_length, *after)

  @property
  def is_large(self) -> bool:
    """Whether the leaf is exchanged alone, and not in rows."""
    return self.dim != WHOLE and math.prod(self.shape) >= LARGE

  def slice_part(self, x: jax.Array) -> jax.Array:
    """Returns this replica's part of the leaf `x`."""
    if self.dim == WHOLE:
      return x
    return self.read_part(self.pad(x), jax.lax.axis_index(mesh_lib.REPLICA))

  def gather_parts(self, part: jax.Array) -> jax.Array:
    """Returns the leaf from the part of each replica, on all replicas."""
    if self.dim == WHOLE:
      # Every replica receives all commits of the whole leaf and makes the same
      # updates. But `Strategy.run` treats the result of an all-to-all as per
      # replica.
      return replica_context.assume_replicated(part)
    x = jax.lax.all_gather(part, mesh_lib.REPLICA, axis=self.dim, tiled=True)
    return _copy_result(self.drop_padding(x))

  def exchange(self, x: jax.Array) -> jax.Array:
    """Sends part i of a padded leaf to replica i; part i is from replica i."""
    return jax.lax.all_to_all(
      x, mesh_lib.REPLICA, self.dim, self.dim, tiled=True
    )

  def read_part(self, x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns part `index` of a padded leaf."""
    start, size = index * self.part_length, self.part_length
    return jax.lax.dynamic_slice_in_dim(x, start, size, self.dim)

  def write_part(
    self, x: jax.Array, index: jax.Array, part: jax.Array
  ) -> jax.Array:
    """Returns a padded leaf with part `index` replaced."""
    start = index * self.part_length
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, self.dim)

  def to_rows(self, x: jax.Array) -> jax.Array:
    """Returns all parts of the leaf `x`, flat: `[replicas, elements]`."""
    count = replica_context.num_replicas()
    if self.dim == WHOLE:
      return jnp.broadcast_to(x.reshape(1, -1), (count, x.size))
    shape = list(self.part_shape)
    shape.insert(self.dim, count)
    return jnp.moveaxis(self.pad(x).reshape(shape), self.dim, 0).reshape(
      count, -1
    )

  def from_rows(self, rows: jax.Array) -> jax.Array:
    """Returns the leaf from all its parts: undoes `to_rows`."""
    if self.dim == WHOLE:
      return rows[0].reshape(self.shape)
    x = jnp.moveaxis(rows.reshape(-1, *self.part_shape), 0, self.dim)
    padded = list(self.part_shape)
    padded[self.dim] = -1
    return self.drop_padding(x.reshape(padded))

  def pad(self, x: jax.Array) -> jax.Array:
    """Appends zeros, so that all parts have the same size."""
    size = self.part_length * replica_context.num_replicas()
    missing = size - self.shape[self.dim]
    widths = [(0, missing if d == self.dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x

  def drop_padding(self, x: jax.Array) -> jax.Array:
    """Undoes `pad`."""
    return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=self.dim)


@dataclasses.dataclass(frozen=True)
class _Exchange:
  """Sends the commits of all replicas to where they are applied, and back.

  What a replica receives is a dict of arrays: by its number, each large leaf;
  and `"rows"`, one row from each replica with its parts of all small leaves.

  Attributes:
    grads: The splits of the gradients that are committed.
    params: The splits of the parameters, in the same order. They differ from
      those of the gradients in dtype only.
  """

  grads: list[_Leaf]
  params: list[_Leaf]

  @property
  def small(self) -> list[int]:
    """The numbers of the leaves that are exchanged in rows."""
    return [i for i, leaf in enumerate(self.grads) if not leaf.is_large]

  def send(self, grads: list[jax.Array]) -> dict[Any, jax.Array]:
    """Sends each replica its part of this replica's gradients."""
    received = {}
    for i, (leaf, param) in enumerate(
      zip(self.grads, self.params, strict=True)
    ):
      if leaf.is_large:
        # In a dtype that holds the parameters exactly as well.
        dtype = jnp.promote_types(leaf.dtype, param.dtype)
        received[str(i)] = leaf.exchange(leaf.pad(grads[i].astype(dtype)))
    if self.small:
      rows = [self.grads[i].to_rows(grads[i]) for i in self.small]
      received["rows"] = _exchange_rows(_join(rows, self._row_dtype))
    return received

  def read(
    self, received: dict[Any, jax.Array], k: jax.Array
  ) -> list[jax.Array]:
    """Returns this replica's part of the gradients of replica `k`."""
    row = received["rows"][k] if self.small else None
    parts = {
      i: x.reshape(self.grads[i].part_shape)
      for i, x in self._split(self.grads, row)
    }
    for i, leaf in enumerate(self.grads):
      if leaf.is_large:
        parts[i] = leaf.read_part(received[str(i)], k).astype(leaf.dtype)
    return [parts[i] for i in range(len(self.grads))]

  def write(
    self, received: dict[Any, jax.Array], k: jax.Array, params: list[jax.Array]
  ) -> dict[Any, jax.Array]:
    """Replaces the part of the gradients of replica `k` by parameters."""
    new = dict(received)
    for i, leaf in enumerate(self.params):
      if leaf.is_large:
        x = received[str(i)]
        new[str(i)] = leaf.write_part(x, k, params[i].astype(x.dtype))
    if self.small:
      rows = received["rows"]
      row = _join([params[i].reshape(-1) for i in self.small], rows.dtype)
      new["rows"] = rows.at[k].set(row)
    return new

  def send_back(self, received: dict[Any, jax.Array]) -> list[jax.Array]:
    """Sends each replica the parameters that replaced its gradients."""
    new = {
      i: _copy_result(
        leaf.drop_padding(leaf.exchange(received[str(i)].astype(leaf.dtype)))
      )
      for i, leaf in enumerate(self.params)
      if leaf.is_large
    }
    if self.small:
      # bfloat16 parameters are sent back as bfloat16: half the bytes of
      # float32.
      dtypes = {self.params[i].dtype for i in self.small}
      dtype = dtypes.pop() if len(dtypes) == 1 else self._row_dtype
      rows = _exchange_rows(received["rows"].astype(dtype))
      for i, x in self._split(self.params, rows):
        new[i] = self.params[i].from_rows(x)
    return [new[i] for i in range(len(self.params))]

  @property
  def _row_dtype(self) -> Any:
    """A dtype that represents every value of a row exactly."""
    dtypes = [leaf.dtype for leaf in (*self.grads, *self.params)]
    return jnp.float64 if jnp.float64 in dtypes else jnp.float32

  def _split(
    self, leaves: list[_Leaf], rows: Any
  ) -> Iterator[tuple[int, jax.Array]]:
    """Yields the number and the flat part of each small leaf in some rows."""
    start = 0
    for i in self.small:
      stop = start + math.prod(leaves[i].part_shape)
      yield i, rows[..., start:stop].astype(leaves[i].dtype)
      start = stop


def _choose_dims(
  center: ModelState, grads: PyTree
) -> tuple[ModelState, list[int]]:
  """Returns the dimensions in which center and gradients are split."""
  count = replica_context.num_replicas()
  treedef: Any = jax.tree.structure(center.params)
  dims = [
    WHOLE if g is None else choose_dim(p.shape, count)
    for g, p in zip(
      treedef.flatten_up_to(grads), jax.tree.leaves(center.params), strict=True
    )
  ]
  # Slots have to be split as their parameters. `opt_state.specs` finds them,
  # so express the split as partition specs and read it back.
  specs = [
    P(*(None,) * dim, mesh_lib.REPLICA) if dim != WHOLE else P() for dim in dims
  ]
  slot_specs = opt_state_lib.specs(
    center.opt_state, center.params, treedef.unflatten(specs)
  )
  slot_dims = jax.tree.map(
    lambda spec: len(spec) - 1 if tuple(spec) else WHOLE, slot_specs
  )
  has_gradient = [g is not None for g in treedef.flatten_up_to(grads)]
  changed = [d for d, has in zip(dims, has_gradient, strict=True) if has]
  return ModelState(treedef.unflatten(dims), slot_dims), changed


def _split_leaves(tree: PyTree, dims: PyTree) -> list[_Leaf]:
  """Returns the splits of the leaves of a tree, in dimensions for each."""
  return [
    _Leaf(tuple(x.shape), x.dtype, dim)
    for x, dim in zip(jax.tree.leaves(tree), jax.tree.leaves(dims), strict=True)
  ]


def _part_shapes(trees: Any, dims: Any) -> Any:
  """Returns the shape and dtype of a part of each leaf."""
  shapes = [
    jax.ShapeDtypeStruct(leaf.part_shape, leaf.dtype)
    for leaf in _split_leaves(trees, dims)
  ]
  return jax.tree.unflatten(jax.tree.structure(trees), shapes)


def _commit_parts(
  update: Update, center: ModelState, grads: PyTree, shared: PyTree
) -> tuple[ModelState, PyTree]:
  """Applies all commits to this replica's part of the center.

  Args:
    update: One update of the center, element-wise.
    center: The center.
    grads: The gradients that this replica commits.
    shared: Further arguments of `update`.

  Returns:
    The new center and this replica's new local parameters, as
    `commit_sequentially`.
  """
  center_dims, grad_dims = _choose_dims(center, grads)
  treedef: Any = jax.tree.structure(center)
  params_treedef: Any = jax.tree.structure(center.params)
  grads_treedef: Any = jax.tree.structure(grads)
  has_gradient = [g is not None for g in params_treedef.flatten_up_to(grads)]

  def pick_changed(params: PyTree) -> list[jax.Array]:
    leaves = zip(jax.tree.leaves(params), has_gradient, strict=True)
    return [p for p, changed in leaves if changed]

  splits = _split_leaves(center, center_dims)
  exchange = _Exchange(
    _split_leaves(grads, grad_dims),
    _split_leaves(pick_changed(center.params), grad_dims),
  )

  def apply_commit(
    k: jax.Array, carry: tuple[ModelState, Any]
  ) -> tuple[ModelState, Any]:
    part, received = carry
    commit = grads_treedef.unflatten(exchange.read(received, k))
    part = update(part, commit, shared)
    return part, exchange.write(received, k, pick_changed(part.params))

  received = exchange.send(jax.tree.leaves(grads))
  part = treedef.unflatten(
    leaf.slice_part(x)
    for leaf, x in zip(splits, jax.tree.leaves(center), strict=True)
  )
  part, received = jax.lax.fori_loop(
    0, replica_context.num_replicas(), apply_commit, (part, received)
  )
  # Leaf by leaf: a row of all leaves would be one more copy in memory.
  new_center = treedef.unflatten(
    leaf.gather_parts(x)
    for leaf, x in zip(splits, jax.tree.leaves(part), strict=True)
  )
  changed = iter(exchange.send_back(received))
  return new_center, params_treedef.unflatten(
    next(changed) if has else p
    for p, has in zip(
      jax.tree.leaves(new_center.params), has_gradient, strict=True
    )
  )


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


def _join(arrays: list[jax.Array], dtype: Any) -> jax.Array:
  return jnp.concatenate([x.astype(dtype) for x in arrays], axis=-1)


def _exchange_rows(rows: jax.Array) -> jax.Array:
  """Sends row i to replica i; row i of the result is from replica i."""
  return jax.lax.all_to_all(rows, mesh_lib.REPLICA, 0, 0)


def _copy_result(x: jax.Array) -> jax.Array:
  """Returns `x`, the result of a collective; on TPU from another operation.

  The TPU compiler (libtpu 0.0.42) keeps the result of a collective in memory of
  its own. As the result of a conditional's branch, it would be copied into the
  memory of the state, and so would be the old state, also in the steps that do
  not take this branch.
  """
  return jax.lax.platform_dependent(x, tpu=_select, default=lambda x: x)


def _select(x: jax.Array) -> jax.Array:
  """Returns `x` as the result of a select."""
  # Behind the barrier XLA does not see that the condition is True.
  true = jax.lax.optimization_barrier(jnp.array(True))
  return jnp.where(true, x, jnp.zeros_like(x))
