"""Splits the leaves of a tree into equal parts, and exchanges these parts.

There is one part per replica. A large leaf is exchanged in its own shape, so
that it is not copied. Small leaves share a collective: their parts are packed
into rows, flat arrays with the parts of the leaves one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import elementwise

PyTree = Any

# From this many elements on, packing a leaf into rows takes longer than a
# collective of its own: 1 MiB of float32.
LARGE = 1 << 18


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
    return elementwise.WHOLE
  return min(
    range(len(shape)),
    # The padded size relative to the size.
    key=lambda d: -(-shape[d] // count) * count / shape[d],
    default=elementwise.WHOLE,
  )


@dataclasses.dataclass(frozen=True)
class Leaf:
  """The split of one leaf.

  Attributes:
    shape: The shape of the leaf.
    dtype: Its dtype.
    dim: The dimension that is split; `WHOLE` if every part is the whole leaf.
    count: Number of parts.
  """

  shape: tuple[int, ...]
  dtype: Any
  dim: int
  count: int

  @property
  def part_length(self) -> int:
    """The size of a part in the dimension that is split, rounded up."""
    return -(-self.shape[self.dim] // self.count)

  @property
  def part(self) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a part."""
    shape = list(self.shape)
    if self.dim != elementwise.WHOLE:
      shape[self.dim] = self.part_length
    return jax.ShapeDtypeStruct(tuple(shape), self.dtype)

  @property
  def part_size(self) -> int:
    """The number of elements of a part."""
    return math.prod(self.part.shape)

  @property
  def is_large(self) -> bool:
    """Whether the leaf is exchanged alone, and not in rows."""
    return self.dim != elementwise.WHOLE and math.prod(self.shape) >= LARGE

  def slice_part(self, x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns part `index` of the leaf `x`."""
    if self.dim == elementwise.WHOLE:
      return x
    return jax.lax.dynamic_slice_in_dim(
      self._pad(x), index * self.part_length, self.part_length, self.dim
    )

  def gather_parts(self, part: jax.Array) -> jax.Array:
    """Returns the leaf from the part of each replica, on all replicas."""
    if self.dim == elementwise.WHOLE:
      # Every replica receives all commits of the whole leaf and makes the same
      # updates. But `Strategy.run` treats the result of an all-to-all as per
      # replica.
      return replica_context.assume_replicated(part)
    x = jax.lax.all_gather(part, mesh_lib.REPLICA, axis=self.dim, tiled=True)
    return _copy_result(self._drop_padding(x))

  def send_parts(self, x: jax.Array) -> jax.Array:
    """Sends part i of the leaf `x` to replica i.

    Returns:
      An array like `x`, with padding. Part i is from replica i.
    """
    return self._exchange(self._pad(x))

  def send_back(self, x: jax.Array) -> jax.Array:
    """Sends part i to replica i, from an array as `send_parts` returns it.

    Returns:
      An array like the leaf. Part i is from replica i.
    """
    return _copy_result(self._drop_padding(self._exchange(x)))

  def read_part(self, x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns part `index` of an array as `send_parts` returns it."""
    start, size = index * self.part_length, self.part_length
    return jax.lax.dynamic_slice_in_dim(x, start, size, self.dim)

  def write_part(
    self, x: jax.Array, index: jax.Array, part: jax.Array
  ) -> jax.Array:
    """Returns such an array with part `index` replaced."""
    start = index * self.part_length
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, self.dim)

  def _exchange(self, x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(
      x, mesh_lib.REPLICA, self.dim, self.dim, tiled=True
    )

  def to_rows(self, x: jax.Array) -> jax.Array:
    """Returns all parts of the leaf `x`, flat: `[count, part_size]`."""
    if self.dim == elementwise.WHOLE:
      return jnp.broadcast_to(x.reshape(1, -1), (self.count, self.part_size))
    x = self._pad(x)
    split = (*x.shape[: self.dim], self.count, self.part_length)
    x = x.reshape(*split, *x.shape[self.dim + 1 :])
    return jnp.moveaxis(x, self.dim, 0).reshape(self.count, self.part_size)

  def from_rows(self, rows: jax.Array) -> jax.Array:
    """Returns the leaf from all its parts: undoes `to_rows`."""
    if self.dim == elementwise.WHOLE:
      return rows[0].reshape(self.shape)
    x = rows.reshape(self.count, *self.part.shape)
    x = jnp.moveaxis(x, 0, self.dim)
    padded = list(self.shape)
    padded[self.dim] = self.part_length * self.count
    return self._drop_padding(x.reshape(padded))

  def _pad(self, x: jax.Array) -> jax.Array:
    """Appends zeros, so that all parts have the same size."""
    missing = self.part_length * self.count - self.shape[self.dim]
    widths = [(0, missing if d == self.dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x

  def _drop_padding(self, x: jax.Array) -> jax.Array:
    return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=self.dim)


@dataclasses.dataclass(frozen=True)
class Parts:
  """The split of a tree.

  Attributes:
    treedef: The structure of the tree.
    leaves: The splits of its leaves.
  """

  treedef: Any
  leaves: tuple[Leaf, ...]

  @classmethod
  def of(cls, tree: PyTree, dims: PyTree, count: int) -> Parts:
    """Returns the split of a tree into `count` parts.

    Args:
      tree: A tree of arrays, or of shapes and dtypes.
      dims: The dimension that is split, for each leaf, or `WHOLE`.
      count: Number of parts.
    """
    leaves = tuple(
      Leaf(tuple(x.shape), x.dtype, dim, count)
      for x, dim in zip(
        jax.tree.leaves(tree), jax.tree.leaves(dims), strict=True
      )
    )
    return cls(jax.tree.structure(tree), leaves)

  @property
  def dims(self) -> PyTree:
    """The dimension that is split, for each leaf."""
    return self.treedef.unflatten([leaf.dim for leaf in self.leaves])

  @property
  def shapes(self) -> PyTree:
    """The shape and dtype of a part of each leaf."""
    return self.treedef.unflatten([leaf.part for leaf in self.leaves])

  @property
  def width(self) -> int:
    """The number of elements of a row."""
    return sum(leaf.part_size for leaf in self.leaves)

  def slice_part(self, tree: PyTree, index: jax.Array) -> PyTree:
    """Returns part `index` of a whole tree."""
    return self._map(Leaf.slice_part, tree, index)

  def gather_parts(self, part: PyTree) -> PyTree:
    """Returns the tree from the part of each replica, on all replicas."""
    # Leaf by leaf: a row of all leaves would be one more copy in memory.
    return self._map(Leaf.gather_parts, part)

  def to_rows(self, tree: PyTree, dtype: Any) -> jax.Array:
    """Packs a whole tree into one row per part: `[count, width]`."""
    leaves = jax.tree.leaves(self._map(Leaf.to_rows, tree))
    return jnp.concatenate([x.astype(dtype) for x in leaves], axis=1)

  def from_rows(self, rows: jax.Array) -> PyTree:
    """Returns the whole tree from the rows of all parts: undoes `to_rows`."""
    return self._map(Leaf.from_rows, self._split_row(rows))

  def to_row(self, part: PyTree, dtype: Any) -> jax.Array:
    """Packs one part of the tree into a row: `[width]`."""
    leaves = self.treedef.flatten_up_to(part)
    return jnp.concatenate([x.reshape(-1).astype(dtype) for x in leaves])

  def from_row(self, row: jax.Array) -> PyTree:
    """Returns a part of the tree from its row: undoes `to_row`."""
    return self._map(
      lambda leaf, x: x.reshape(leaf.part.shape), self._split_row(row)
    )

  def _split_row(self, rows: jax.Array) -> PyTree:
    """Returns the flat part of each leaf, from one row or several."""
    pieces, start = [], 0
    for leaf in self.leaves:
      piece = rows[..., start : start + leaf.part_size]
      pieces.append(piece.astype(leaf.dtype))
      start += leaf.part_size
    return self.treedef.unflatten(pieces)

  def _map(self, fn: Callable[..., Any], tree: PyTree, *args: Any) -> PyTree:
    leaves = self.treedef.flatten_up_to(tree)
    return self.treedef.unflatten(
      [fn(leaf, x, *args) for leaf, x in zip(self.leaves, leaves, strict=True)]
    )


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
