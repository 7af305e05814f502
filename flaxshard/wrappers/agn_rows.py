"""Trees of which each replica has a part, and rows that hold all of one.

A row is one array of a dimension: the leaves' parts, one after another.
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


def dim_of(shape: Sequence[int], count: int) -> int:
  """Returns the dimension of which equal parts need the least padding."""
  if 0 in shape:
    return elementwise.WHOLE
  return min(
    range(len(shape)),
    key=lambda d: -(-shape[d] // count) * count / shape[d],
    default=elementwise.WHOLE,
  )


@dataclasses.dataclass(frozen=True)
class Leaf:
  """How a leaf is divided.

  Attributes:
    shape: Its shape.
    dtype: Its dtype.
    dim: The dimension that is divided, or `WHOLE`.
    count: Into how many parts.
  """

  shape: tuple[int, ...]
  dtype: Any
  dim: int
  count: int

  @property
  def step(self) -> int:
    """How much of the divided dimension each part has."""
    return -(-self.shape[self.dim] // self.count)

  @property
  def part(self) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a part."""
    shape = list(self.shape)
    if self.dim != elementwise.WHOLE:
      shape[self.dim] = self.step
    return jax.ShapeDtypeStruct(tuple(shape), self.dtype)

  @property
  def size(self) -> int:
    """The number of elements of a part."""
    return math.prod(self.part.shape)

  def padded(self, x: jax.Array) -> jax.Array:
    """Returns a leaf with zeros at its end, where its parts need them."""
    missing = self.step * self.count - self.shape[self.dim]
    widths = [(0, missing if d == self.dim else 0) for d in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x

  def part_of(self, x: jax.Array, number: jax.Array) -> jax.Array:
    """Returns one part of a leaf."""
    if self.dim == elementwise.WHOLE:
      return x
    return jax.lax.dynamic_slice_in_dim(
      self.padded(x), number * self.step, self.step, self.dim
    )

  def to_rows(self, x: jax.Array) -> jax.Array:
    """Returns all parts of a leaf, `[count, size]`."""
    if self.dim == elementwise.WHOLE:
      return jnp.broadcast_to(x.reshape(1, -1), (self.count, self.size))
    x = self.padded(x)
    split = (*x.shape[: self.dim], self.count, self.step)
    x = x.reshape(*split, *x.shape[self.dim + 1 :])
    return jnp.moveaxis(x, self.dim, 0).reshape(self.count, self.size)

  def from_rows(self, rows: jax.Array) -> jax.Array:
    """Undoes `to_rows`."""
    if self.dim == elementwise.WHOLE:
      return rows[0].reshape(self.shape)
    x = rows.reshape(self.count, *self.part.shape)
    x = jnp.moveaxis(x, 0, self.dim)
    whole = list(self.shape)
    whole[self.dim] = self.step * self.count
    x = x.reshape(whole)
    return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=self.dim)

  def gathered(self, part: jax.Array) -> jax.Array:
    """Returns the leaf that the replicas have the parts of."""
    if self.dim == elementwise.WHOLE:
      # The rows of every replica hold the whole leaf of all replicas, and all
      # make the same updates. `Strategy.run` cannot see that: it takes the
      # result of an all_to_all for a replica's own.
      return replica_context.assume_replicated(part)
    x = jax.lax.all_gather(part, mesh_lib.REPLICA, axis=self.dim, tiled=True)
    return jax.lax.slice_in_dim(x, 0, self.shape[self.dim], axis=self.dim)


@dataclasses.dataclass(frozen=True)
class Parts:
  """How the leaves of a tree are divided.

  Attributes:
    treedef: The structure of the tree.
    leaves: Its leaves.
  """

  treedef: Any
  leaves: tuple[Leaf, ...]

  @classmethod
  def of(cls, tree: PyTree, dims: PyTree, count: int) -> Parts:
    """Returns how `tree` is divided, along a dimension for each leaf."""
    leaves = tuple(
      Leaf(tuple(x.shape), x.dtype, d, count)
      for x, d in zip(jax.tree.leaves(tree), jax.tree.leaves(dims), strict=True)
    )
    return cls(jax.tree.structure(tree), leaves)

  def _map(self, fn: Callable[..., Any], tree: PyTree, *args: Any) -> PyTree:
    leaves = self.treedef.flatten_up_to(tree)
    return self.treedef.unflatten(
      [fn(leaf, x, *args) for leaf, x in zip(self.leaves, leaves, strict=True)]
    )

  @property
  def dims(self) -> PyTree:
    """The dimensions that are divided."""
    return self.treedef.unflatten([leaf.dim for leaf in self.leaves])

  @property
  def shapes(self) -> PyTree:
    """The shapes and dtypes of a part of the tree."""
    return self.treedef.unflatten([leaf.part for leaf in self.leaves])

  @property
  def width(self) -> int:
    """The number of elements of a row."""
    return sum(leaf.size for leaf in self.leaves)

  def part_of(self, tree: PyTree, number: jax.Array) -> PyTree:
    """Returns a replica's part of a tree that it has whole."""
    return self._map(Leaf.part_of, tree, number)

  def to_rows(self, tree: PyTree, dtype: Any) -> jax.Array:
    """Returns the rows of all parts of a tree, `[count, width]`."""
    leaves = jax.tree.leaves(self._map(Leaf.to_rows, tree))
    return jnp.concatenate([x.astype(dtype) for x in leaves], axis=1)

  def from_rows(self, rows: jax.Array) -> PyTree:
    """Undoes `to_rows`."""
    return self._map(Leaf.from_rows, self._cut(rows))

  def to_row(self, part: PyTree, dtype: Any) -> jax.Array:
    """Returns a part as a row."""
    leaves = self.treedef.flatten_up_to(part)
    return jnp.concatenate([x.reshape(-1).astype(dtype) for x in leaves])

  def from_row(self, row: jax.Array) -> PyTree:
    """Undoes `to_row`."""
    cut = self.treedef.flatten_up_to(self._cut(row))
    return self.treedef.unflatten(
      [
        x.reshape(leaf.part.shape)
        for leaf, x in zip(self.leaves, cut, strict=True)
      ]
    )

  def gather(self, part: PyTree) -> PyTree:
    """Returns the tree that the replicas have the parts of."""
    # Leaf by leaf: all of them in one buffer would be a second copy.
    return self._map(Leaf.gathered, part)

  def _cut(self, rows: jax.Array) -> PyTree:
    """Returns what each leaf has of a row, or of several."""
    pieces, start = [], 0
    for leaf in self.leaves:
      piece = rows[..., start : start + leaf.size]
      pieces.append(piece.astype(leaf.dtype))
      start += leaf.size
    return self.treedef.unflatten(pieces)
