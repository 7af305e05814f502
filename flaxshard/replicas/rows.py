"""Sums of `IndexedSlices` over the replicas.

Each replica has the rows of its part of the batch. Their sum has the rows of
all replicas. It takes fewer bytes to gather row numbers and rows than to sum
whole arrays, unless the replicas have about as many rows as the array.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import indexed_slices
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.partitioning import mesh as mesh_lib

PyTree = Any
# The name that marks rows in a jaxpr that are gathered to be summed.
SUMMED = "flaxshard.summed_rows"
# JAX name scope of the collectives: compiled programs name it.
_SCOPE = "gradient_rows"
# Groups of replica numbers, as `axis_index_groups` of `lax.psum`; None means
# that all replicas are one group.
Groups = Sequence[Sequence[int]] | None


def reduce(
  op: str, slices: IndexedSlices, count: int, groups: Groups = None
) -> IndexedSlices:
  """Sums or averages an `IndexedSlices` over the replicas.

  The sum is computed in float32 or wider, and cast back. Either way of
  communication gives the same rows.

  Args:
    op: `"sum"` or `"mean"`.
    slices: The rows of this replica, as many on every replica.
    count: The number of replicas that are reduced: of all, or of a group.
    groups: As `axis_index_groups` of `jax.lax.psum`.

  Returns:
    The rows of all these replicas, without equal numbers.
  """
  if gather_is_smaller(slices, count):
    values = _gather(checkpoint_name(slices.values, SUMMED), groups)
    total = IndexedSlices(
      _gather(slices.indices, groups),
      # Cast only now: float16 rows travel as they are.
      gradients.widen(values),
      slices.dense_shape,
    ).deduplicated()
  else:
    total = _sum_dense(slices, groups)
  if op == "mean":
    total = total / count
  return total.astype(slices.dtype)


def gather_is_smaller(slices: IndexedSlices, count: int) -> bool:
  """Returns whether gathering rows takes fewer bytes than a dense all-reduce.

  The bytes are those that a device receives in a ring of `count` devices.

  Args:
    slices: The rows of one replica.
    count: The number of replicas.

  Example:
    >>> slices = IndexedSlices(jnp.arange(4), jnp.ones((4, 8)), (1000, 8))
    >>> gather_is_smaller(slices, 100), gather_is_smaller(slices, 1000)
    (True, False)
  """
  row = math.prod(slices.dense_shape[1:])
  gathered = (count - 1) * slices.indices.size * row * slices.dtype.itemsize
  wide = indexed_slices.accumulator_dtype(slices.dtype).itemsize
  # An all-reduce scatters the sums, and gathers them. The row numbers are
  # gathered either way.
  reduced = 2 * (count - 1) * slices.dense_shape[0] * row * wide // count
  return gathered <= reduced


def gather_over_mesh(grads: PyTree) -> PyTree:
  """Gathers the rows of a batch that is split over a mesh.

  For a program of the whole batch; inside of `Strategy.run` nothing changes.
  XLA would sort and sum rows that are split over devices by an all-reduce:
  twice the bytes.

  Args:
    grads: A tree of gradients; only `IndexedSlices` change.
  """

  def gather_leaf(x: Any) -> Any:
    if not is_indexed_slices(x) or not isinstance(x.values, jax.core.Tracer):
      return x
    mesh = jax.typeof(x.values).sharding.mesh
    # Inside of `run` the axis of the replicas is Manual.
    if set(mesh.axis_types) != {jax.sharding.AxisType.Auto}:
      return x
    return jax.tree.map(lambda array: _gather_dimension(array, mesh), x)

  return jax.tree.map(gather_leaf, grads, is_leaf=is_indexed_slices)


def _gather_dimension(x: jax.Array, mesh: Any) -> jax.Array:
  """Returns an array whose first dimension is not split over a mesh."""
  spec = jax.P(None, *[jax.P.UNCONSTRAINED] * (x.ndim - 1))
  sharding = jax.sharding.NamedSharding(mesh, spec)
  with jax.named_scope(_SCOPE):
    # XLA may name the collective after the operation before it.
    x = jax.lax.optimization_barrier(x)
    return jax.lax.with_sharding_constraint(x, sharding)


def _sum_dense(slices: IndexedSlices, groups: Groups) -> IndexedSlices:
  """Returns the sum, by an all-reduce of the whole array."""
  dense = gradients.widen(slices).to_dense()
  with jax.named_scope(_SCOPE):
    total = jax.lax.psum(dense, mesh_lib.REPLICA, axis_index_groups=groups)
  indices = _gather(slices.indices, groups)
  # Rows without elements: only their numbers are deduplicated.
  numbers = IndexedSlices(
    indices, jnp.zeros((indices.size, 0)), (slices.dense_shape[0], 0)
  ).deduplicated()
  return IndexedSlices(
    numbers.indices,
    total.at[numbers.indices].get(
      mode="fill",
      fill_value=0,
      indices_are_sorted=True,
    ),
    slices.dense_shape,
    is_unique=True,
  )


def _gather(x: jax.Array, groups: Groups) -> jax.Array:
  with jax.named_scope(_SCOPE):
    return jax.lax.all_gather(
      x, mesh_lib.REPLICA, axis_index_groups=groups, tiled=True
    )
