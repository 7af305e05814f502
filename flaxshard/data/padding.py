"""Brings batches to few shapes, with a mask of what is real in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.data import host_batch
from flaxshard.data import sharding

PyTree = Any
P = jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True)
class Padding:
  """How batches are padded; see `flaxshard.data.distribute`.

  Attributes:
    batch_size: Rows of a global batch; None: those of the first.
    mask: The key of the mask; None: no mask, so no padding.
    drop_remainder: Whether batches of fewer rows are dropped.
    bucket: None or "power_of_two".
    bucket_dims: Dimensions that vary, of all leaves or by path; None: (1,).
    spec: A `PartitionSpec` of all leaves, or by path.
  """

  batch_size: int | None = None
  mask: str | None = "mask"
  drop_remainder: bool = False
  bucket: str | None = None
  bucket_dims: Any = None
  spec: PyTree = sharding.OVER_REPLICAS

  def check(self, mesh: jax.sharding.Mesh) -> None:
    """Raises at a field that cannot be, or does not fit the mesh."""
    size, count = self.batch_size, len(sharding.pipelines(mesh))
    if size is not None and (
      isinstance(size, bool) or not isinstance(size, int) or size < 1
    ):
      raise ValueError(
        f"batch_size must be an integer of at least 1, or None, got {size!r}."
      )
    if size is not None and size % count:
      raise ValueError(
        f"batch_size={size}, of the global batch, must be a multiple of the "
        f"{count} input pipelines."
      )
    if not (self.mask is None or (isinstance(self.mask, str) and self.mask)):
      raise ValueError(f"mask must be a key or None, got {self.mask!r}.")
    if not isinstance(self.drop_remainder, bool):
      raise ValueError(
        f"drop_remainder must be a bool, got {self.drop_remainder!r}."
      )
    if self.bucket not in (None, "power_of_two"):
      raise ValueError(
        f"bucket must be None or 'power_of_two', got {self.bucket!r}."
      )
    if self.bucket is not None and self.mask is None:
      raise ValueError(
        f"bucket={self.bucket!r} pads: it needs a mask, got mask=None."
      )
    if self.bucket is None and self.bucket_dims is not None:
      raise ValueError(
        f"bucket_dims={self.bucket_dims!r} needs bucket='power_of_two'."
      )
    for path, dims in self.varying().items():
      if not isinstance(dims, tuple) or not all(
        isinstance(dim, int) and dim >= 1 for dim in dims
      ):
        raise ValueError(
          "bucket_dims must be a tuple of dimensions after the batch's, 0, or "
          f"a dict of such by path, got {dims!r} for {path}."
        )
    sharding.check_specs(mesh, self.spec)

  def varying(self) -> dict[str, Any]:
    """Returns which dimensions may vary, by path."""
    if self.bucket is None:
      return {}
    given = (1,) if self.bucket_dims is None else self.bucket_dims
    return sharding.by_path(given)


@dataclasses.dataclass(frozen=True)
class _Layout:
  """What the first batch says of all of them.

  Attributes:
    tree: The structure.
    leaves: The leaves.
    rows: Of a full batch on this process.
    multiples: What the dimensions that vary are padded to multiples of; 0 is
      the batch's.
    mask: The key of the mask, None for none.
    mask_leaf: Which leaf that is; None: it is to be added.
    mask_sharding: As the rows are split.
  """

  tree: Any
  leaves: list[sharding.Leaf]
  rows: int
  multiples: dict[int, int]
  mask: str | None
  mask_leaf: int | None
  mask_sharding: jax.sharding.NamedSharding


class Padder:
  """Pads the batches of one iterator, and puts them on the mesh.

  What the first batch is like, all of them must be.
  """

  def __init__(self, mesh: jax.sharding.Mesh, config: Padding):
    self._mesh = mesh
    self._config = config
    self._layout: _Layout | None = None

  def __call__(self, batches: Sequence[PyTree]) -> PyTree | None:
    """Joins host batches into one, pads it, and puts it on the mesh.

    Args:
      batches: One or more, whose rows follow one another in the result.

    Returns:
      The batch as global arrays, or None if it is to be dropped.

    Raises:
      ValueError: The batch is not like the first, or has no place for a mask.
      TypeError: A leaf is not numeric.
    """
    parts = [host_batch.flatten(batch) for batch in batches]
    if self._layout is None:
      is_dict = isinstance(batches[0], Mapping)
      self._layout = _layout(self._mesh, self._config, parts, is_dict)
    layout = self._layout
    sizes = [_sizes(layout, part) for part in parts]
    rows = sum(part.rows for part in parts)
    if self._config.drop_remainder and rows < layout.rows:
      return None
    padded = {0: _padded_rows(layout, rows, self._config.bucket)}
    for dim in sizes[0]:
      longest = max(lengths[dim] for lengths in sizes)
      padded[dim] = _bucket(longest, layout.multiples[dim])

    arrays = []
    for i, leaf in enumerate(layout.leaves):
      shape = tuple(
        padded[dim] if isinstance(size, str) else size
        for dim, size in enumerate(leaf.shape)
      )
      arrays.append(
        host_batch.join(leaf.path, [p.arrays[i] for p in parts], shape)
      )
    shardings = [leaf.sharding for leaf in layout.leaves]
    if layout.mask is None:
      out = sharding.put(self._mesh, arrays, shardings)
      return jax.tree.unflatten(layout.tree, out)
    real = _real([part.rows for part in parts], sizes, padded)
    if layout.mask_leaf is not None:
      given = np.asarray(arrays[layout.mask_leaf])
      arrays[layout.mask_leaf] = _both(layout.mask, given, real)
      out = sharding.put(self._mesh, arrays, shardings)
      return jax.tree.unflatten(layout.tree, out)
    *leaves, mask = sharding.put(
      self._mesh, [*arrays, real], [*shardings, layout.mask_sharding]
    )
    return {**jax.tree.unflatten(layout.tree, leaves), layout.mask: mask}


def _layout(
  mesh: jax.sharding.Mesh,
  config: Padding,
  parts: Sequence[host_batch.HostBatch],
  is_dict: bool,
) -> _Layout:
  first, count = parts[0], len(sharding.pipelines(mesh))
  if config.bucket is not None and not is_dict:
    raise ValueError(
      f"bucket={config.bucket!r} adds a mask: batches must be dicts, got "
      f"{first.tree}."
    )
  varying = config.varying()
  sharding.check_paths("bucket_dims", varying, first.paths)
  specs = sharding.check_specs(mesh, config.spec)
  leaves = []
  multiples = {0: 1}
  for leaf in sharding.make_leaves(mesh, first, specs):
    shape = list(leaf.shape)
    for dim in sharding.lookup(varying, leaf.path, ()):
      if dim < len(shape):
        shape[dim] = "any"
    sharding.check_divisible(leaf, shape)
    for dim, (size, split) in enumerate(zip(shape, leaf.parts, strict=True)):
      if isinstance(size, str):
        multiples[dim] = math.lcm(multiples.get(dim, 1), split)
    leaves.append(dataclasses.replace(leaf, shape=tuple(shape)))
  multiples[0] //= math.gcd(multiples[0], count)
  if config.batch_size is not None:
    rows = config.batch_size // count
  else:
    rows = sum(part.rows for part in parts)
  if not rows:
    raise ValueError("the first batch has no examples: give the batch_size.")
  mask = config.mask if is_dict else None
  widest = max(leaves, key=lambda leaf: leaf.parts[0])
  return _Layout(
    tree=first.tree,
    leaves=leaves,
    rows=rows,
    multiples=multiples,
    mask=mask,
    mask_leaf=first.paths.index(mask) if mask in first.paths else None,
    mask_sharding=jax.sharding.NamedSharding(
      mesh, P(*widest.sharding.spec[:1])
    ),
  )


def _sizes(layout: _Layout, batch: host_batch.HostBatch) -> dict[int, int]:
  """Returns how long the dimensions after the batch's are that vary.

  Raises:
    ValueError: The batch is not like the first, or leaves differ in them.
  """
  if batch.tree == layout.tree and all(
    x.shape[1:] == leaf.shape[1:] and host_batch.dtype_of(x) == leaf.dtype
    for x, leaf in zip(batch.arrays, layout.leaves, strict=True)
  ):
    return {}  # as nearly always
  wanted = {leaf.path: leaf for leaf in layout.leaves}
  given = {}
  sizes: dict[int, tuple[int, str]] = {}
  for path, x in zip(batch.paths, batch.arrays, strict=True):
    shape: list[int | str] = list(x.shape)
    like = wanted[path].shape if path in wanted else ("batch",)
    for dim, want in enumerate(like[: x.ndim]):
      if want == "any":
        size, other = sizes.setdefault(dim, (x.shape[dim], path))
        if x.shape[dim] != size:
          raise ValueError(
            f"batch[{path}] has {x.shape[dim]} in dimension {dim}, "
            f"batch[{other}] has {size}, and one mask is for both; bucket_dims "
            "as a dict by path names the leaves that vary."
          )
      if isinstance(want, str):
        shape[dim] = want
    given[path] = _Abstract(tuple(shape), host_batch.dtype_of(x))
  difference = trees.first_difference(given, wanted)
  if difference:
    raise ValueError(
      f"a batch differs from the first one in {difference}. Dimensions vary "
      "with bucket='power_of_two' and bucket_dims."
    )
  if batch.tree != layout.tree:
    raise ValueError(
      f"a batch is a {batch.tree}, the first one was a {layout.tree}."
    )
  return {dim: sizes[dim][0] for dim in sorted(sizes)}


@dataclasses.dataclass(frozen=True)
class _Abstract:
  shape: tuple[int | str, ...]
  dtype: np.dtype


def _padded_rows(layout: _Layout, rows: int, bucket: str | None) -> int:
  multiple = layout.multiples[0]
  full = -(-layout.rows // multiple) * multiple
  if rows > full:
    if bucket is None:
      raise ValueError(
        f"a batch has {rows} examples, the first one or batch_size says "
        f"{layout.rows}: give the largest as batch_size, or "
        "bucket='power_of_two'."
      )
    full = _bucket(rows, multiple)
  if rows != full and layout.mask is None:
    raise ValueError(
      f"a batch has {rows} examples and would be padded to {full}, but has no "
      "mask to tell: give dicts and a mask; or batches of equal size, a "
      f"multiple of {multiple}, with drop_remainder=True for a short last one."
    )
  return full


def _bucket(size: int, multiple: int) -> int:
  """Returns a multiple times the least power of two that reaches a size."""
  return multiple << (max(-(-size // multiple), 1) - 1).bit_length()


def _real(
  rows: Sequence[int], sizes: Sequence[dict[int, int]], padded: dict[int, int]
) -> np.ndarray:
  """Returns where padded parts have what was given."""
  real = np.zeros(tuple(padded.values()), bool)
  start = 0
  for count, lengths in zip(rows, sizes, strict=True):
    where = slice(start, start + count), *map(slice, lengths.values())
    real[where] = True
    start += count
  return real


def _both(key: str, given: np.ndarray, real: np.ndarray) -> np.ndarray:
  """Returns a mask that the batch has, without what is padding."""
  if given.dtype != bool:
    raise ValueError(
      f"batch[{key}] must be a bool array [batch, ...], got {given.dtype}; "
      "another mask= names another key for what tells padding."
    )
  rank = max(given.ndim, real.ndim)
  shapes = [x.shape + (1,) * (rank - x.ndim) for x in (given, real)]
  try:
    return given.reshape(shapes[0]) & real.reshape(shapes[1])
  except ValueError as e:
    raise ValueError(
      f"batch[{key}] has shape {given.shape} when padded, the mask of padding "
      f"{real.shape}: they do not go together."
    ) from e
