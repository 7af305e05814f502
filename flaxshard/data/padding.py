"""Pads batches to few shapes, with a mask that marks the real examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.data import host_batch
from flaxshard.data import sharding
from flaxshard.partitioning import specs as specs_lib

PyTree = Any
P = jax.sharding.PartitionSpec

# Stand for the sizes of dimensions that are padded, in the shape of a leaf.
_BATCH = "batch"
_VARYING = "any"


@dataclasses.dataclass(frozen=True)
class Padding:
  """Options for padding batches; see `distribute.distribute_dataset`.

  Attributes:
    batch_size: Number of rows in a global batch; None takes it from the first
      batch.
    mask: The key of the mask in a batch; None for no mask and no padding.
    drop_remainder: Whether batches with fewer rows are dropped.
    bucket: None or `"power_of_two"`.
    bucket_dims: Dimensions that vary: a tuple for all leaves, or a nested dict
      of tuples by path. None stands for `(1,)`.
    spec: A `PartitionSpec` for all leaves, or a nested dict of them by path.
  """

  batch_size: int | None = None
  mask: str | None = "mask"
  drop_remainder: bool = False
  bucket: str | None = None
  bucket_dims: Any = None
  spec: PyTree = sharding.OVER_REPLICAS

  def check(self, mesh: jax.sharding.Mesh) -> None:
    """Raises a ValueError if a field is invalid or does not fit the mesh."""
    count = len(sharding.pipelines(mesh))
    if self.batch_size is not None:
      # Every pipeline passes the same number of rows.
      checks.integer("batch_size", self.batch_size, minimum=1)
      if self.batch_size % count:
        raise ValueError(
          f"batch_size={self.batch_size}, of the global batch, must be a "
          f"multiple of the {count} input pipelines."
        )
    checks.one_of("bucket", self.bucket, (None, "power_of_two"))
    if self.bucket is not None and self.mask is None:
      raise ValueError(
        f"bucket={self.bucket!r} pads batches, which needs a mask, got "
        "mask=None."
      )
    if self.bucket is None and self.bucket_dims is not None:
      raise ValueError(
        f"bucket_dims={self.bucket_dims!r} needs bucket='power_of_two'."
      )
    for path, dims in self.varying_dims().items():
      for dim in dims:
        # Dimension 0 is the batch.
        where = f"bucket_dims={dims!r} for {path}: a dimension"
        checks.integer(where, dim, minimum=1)

  def varying_dims(self) -> dict[str, Any]:
    """Returns the dimensions that may vary, by path."""
    if self.bucket is None:
      return {}
    dims = (1,) if self.bucket_dims is None else self.bucket_dims
    return sharding.by_path(dims)


class _Leaf(NamedTuple):
  """Shape and dtype of a leaf; padded dimensions have a name as their size."""

  shape: tuple[int | str, ...]
  dtype: np.dtype


class Padder:
  """Pads the batches of one iterator and puts them on a mesh.

  All batches must have the structure, dtypes and shapes of the first one, but
  for the number of rows and the dimensions that vary.

  Args:
    mesh: The mesh.
    config: How to pad.
  """

  # Those of the first batch: shapes and shardings by path, the rows of a full
  # batch of this process, and by dimension that is padded the number that its
  # size is a multiple of.
  _leaves: dict[str, _Leaf]
  _shardings: dict[str, jax.sharding.NamedSharding]
  _rows: int
  _multiples: dict[int, int]
  _mask: str | None

  def __init__(self, mesh: jax.sharding.Mesh, config: Padding):
    self._mesh = mesh
    self._config = config
    self._varying = config.varying_dims()
    self._count = len(sharding.pipelines(mesh))
    self._is_first = True

  def __call__(self, batches: Sequence[PyTree]) -> PyTree | None:
    """Joins host batches into one, pads it, and puts it on the mesh.

    Args:
      batches: One or more host batches, whose rows are concatenated.

    Returns:
      The batch as global arrays; None if the batch is dropped.

    Raises:
      ValueError: The batch differs from the first one, or needs a mask and
        cannot have one.
      TypeError: A leaf is not numeric.
    """
    parts = [host_batch.flatten(batch) for batch in batches]
    rows = sum(part.rows for part in parts)
    if self._is_first:
      self._start(parts[0], rows, isinstance(batches[0], Mapping))
    lengths = [self._check_part(part) for part in parts]
    if self._config.drop_remainder and rows < self._rows:
      return None
    if not rows and self._count == 1:
      # Of several processes, one without further examples passes such batches.
      parts[0].check_not_empty("; drop_remainder=True would leave it out")
    padded = {0: self._padded_rows(rows)}
    # All parts have the same dimensions that vary, in different sizes.
    for dim in lengths[0]:
      longest = max(part[dim] for part in lengths)
      padded[dim] = _round_to_bucket(longest, self._multiples[dim])
    arrays = {}
    for path, (sizes, _) in self._leaves.items():
      shape = tuple(
        padded[dim] if isinstance(size, str) else size
        for dim, size in enumerate(sizes)
      )
      leaves = [part.arrays[path] for part in parts]
      arrays[path] = host_batch.join(path, leaves, shape)
    key = self._mask
    # Also without padding: another structure would compile the step again.
    if key is not None:
      mask = _create_mask([part.rows for part in parts], lengths, padded)
      if key in arrays:
        mask = _combine_masks(key, np.asarray(arrays[key]), mask)
      arrays[key] = mask
    out = sharding.put(self._mesh, arrays, self._shardings)
    batch = jax.tree.unflatten(parts[0].tree, [out[p] for p in self._leaves])
    if key is None or key in self._leaves:
      return batch
    return {**batch, key: out[key]}

  def _start(
    self, first: host_batch.HostBatch, rows: int, is_dict: bool
  ) -> None:
    """Takes what all batches share from the first one.

    Raises:
      ValueError: The configuration does not fit the batch.
    """
    config = self._config
    if config.bucket is not None and not is_dict:
      raise ValueError(
        f"bucket={config.bucket!r} adds a mask, so batches must be dicts, got "
        f"{first.tree}."
      )
    sharding.check_paths("bucket_dims", self._varying, first.arrays)
    self._leaves = self._describe(first)
    shapes = {path: shape for path, (shape, _) in self._leaves.items()}
    specs = sharding.specs_by_path(self._mesh, config.spec, shapes)
    self._multiples = {0: 1}
    row_parts = {}
    for path, spec in specs.items():
      axes = specs_lib.dims_of(spec, len(shapes[path]))
      parts = specs_lib.parts(axes, self._mesh.shape)
      row_parts[path] = parts[0]
      for dim, size in enumerate(shapes[path]):
        if isinstance(size, str):
          # One padded size for all leaves: every sharding has to divide it.
          self._multiples[dim] = math.lcm(
            self._multiples.get(dim, 1), parts[dim]
          )
    # Each process pads its rows to its share of the multiple: together the rows
    # of all pipelines reach the multiple.
    self._multiples[0] //= math.gcd(self._multiples[0], self._count)
    self._rows = rows
    if config.batch_size is not None:
      self._rows = int(config.batch_size) // self._count
    if not self._rows:
      raise ValueError("the first batch has no examples: give the batch_size.")
    self._mask = config.mask if is_dict else None
    if self._mask is not None and self._mask not in specs:
      # Its rows are split as those of the leaf with the most parts.
      specs[self._mask] = P(
        *specs[max(row_parts, key=row_parts.__getitem__)][:1]
      )
    self._shardings = {
      path: jax.sharding.NamedSharding(self._mesh, spec)
      for path, spec in specs.items()
    }
    self._is_first = False

  def _describe(self, batch: host_batch.HostBatch) -> dict[str, _Leaf]:
    """Returns what all batches must share, by path."""
    leaves = {}
    for path, x in batch.arrays.items():
      # A tuple for all leaves also names dimensions that some do not have.
      dims = sharding.lookup(self._varying, path, ())
      sizes = [_VARYING if i in dims else n for i, n in enumerate(x.shape)]
      leaves[path] = _Leaf((_BATCH, *sizes[1:]), host_batch.dtype_of(x))
    return leaves

  def _check_part(self, batch: host_batch.HostBatch) -> dict[int, int]:
    """Returns the sizes of the dimensions that vary, by dimension.

    Raises:
      ValueError: The batch differs from the first one, or two leaves have
        different sizes in a dimension that varies.
    """
    given = self._describe(batch)
    if given != self._leaves:
      difference = trees.difference_by_path(
        {(path,): leaf for path, leaf in given.items()},
        {(path,): leaf for path, leaf in self._leaves.items()},
      )
      raise ValueError(
        f"a batch differs from the first one in {difference}. Dimensions vary "
        "with bucket='power_of_two' and bucket_dims."
      )
    sizes = {}
    for dim in sorted(self._multiples.keys() - {0}):
      by_path = {
        f"batch[{path}]": batch.arrays[path].shape[dim]
        for path, (shape, _) in self._leaves.items()
        if shape[dim : dim + 1] == (_VARYING,)
      }
      if len(set(by_path.values())) > 1:
        raise ValueError(
          f"the sizes in dimension {dim} differ, but there is one mask for "
          f"all: {by_path}; bucket_dims as a dict by path names the leaves "
          "that vary."
        )
      sizes[dim] = next(iter(by_path.values()))
    return sizes

  def _padded_rows(self, rows: int) -> int:
    """Returns the number of rows that a batch of this process is padded to."""
    multiple = self._multiples[0]
    padded = -(-self._rows // multiple) * multiple
    if rows > padded:
      if self._config.bucket is None:
        raise ValueError(
          f"a batch has {rows} examples, but the first one or batch_size has "
          f"{self._rows}: give the largest number as batch_size, or "
          "bucket='power_of_two'."
        )
      padded = _round_to_bucket(rows, multiple)
    if rows != padded and self._mask is None:
      raise ValueError(
        f"a batch has {rows} examples and would be padded to {padded}, but has "
        "no mask to mark the padding: use dicts and a mask; or batches of "
        f"equal size, a multiple of {multiple}, with drop_remainder=True for a "
        "short last one."
      )
    return padded


def _round_to_bucket(size: int, multiple: int) -> int:
  """Returns the least `multiple * 2**n` that is not below a size."""
  return multiple << (max(-(-size // multiple), 1) - 1).bit_length()


def _create_mask(
  rows: Sequence[int], lengths: Sequence[dict[int, int]], padded: dict[int, int]
) -> np.ndarray:
  """Returns a mask of the padded shape: True for values of the host batches."""
  mask = np.zeros(tuple(padded.values()), bool)
  start = 0
  for count, sizes in zip(rows, lengths, strict=True):
    mask[slice(start, start + count), *map(slice, sizes.values())] = True
    start += count
  return mask


def _combine_masks(key: str, given: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns the mask of a batch, with False for the padding as well."""
  if given.dtype != bool:
    raise ValueError(
      f"batch[{key}] must be a bool array [batch, ...], got {given.dtype}; the "
      "argument mask= sets another key for the mask of padding."
    )
  # The mask of lower rank, say of rows, applies to all positions of a row.
  rank = max(given.ndim, mask.ndim)
  shapes = [x.shape + (1,) * (rank - x.ndim) for x in (given, mask)]
  return given.reshape(shapes[0]) & mask.reshape(shapes[1])
