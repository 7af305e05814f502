"""Pads batches to few shapes, with a mask that marks the real examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

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
    sharding.check_specs(mesh, self.spec)

  def varying_dims(self) -> dict[str, Any]:
    """Returns the dimensions that may vary, by path."""
    if self.bucket is None:
      return {}
    dims = (1,) if self.bucket_dims is None else self.bucket_dims
    return sharding.by_path(dims)


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """The properties of a leaf that all batches share.

  Attributes:
    shape: Its shape on the host; dimensions that are padded have a name.
    dtype: Its dtype on the device.
  """

  shape: tuple[int | str, ...]
  dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class _Layout:
  """The properties that all batches share, taken from the first one.

  Attributes:
    tree: The tree structure.
    varying: The dimensions that vary, by path.
    leaves: The leaves by path.
    shardings: Their shardings by path, and that of the mask.
    rows: Number of rows in a full batch of this process.
    multiples: By dimension, the number that its padded size is a multiple of.
      Has the batch dimension, 0, and the dimensions that vary.
    mask: The key of the mask; None for no mask.
  """

  tree: Any
  varying: dict[str, Any]
  leaves: dict[str, _Leaf]
  shardings: dict[str, jax.sharding.NamedSharding]
  rows: int
  multiples: dict[int, int]
  mask: str | None


class Padder:
  """Pads the batches of one iterator and puts them on a mesh.

  All batches must have the structure, dtypes and shapes of the first one, but
  for the number of rows and the dimensions that vary.

  Args:
    mesh: The mesh.
    config: How to pad.
  """

  def __init__(self, mesh: jax.sharding.Mesh, config: Padding):
    self._mesh = mesh
    self._config = config
    self._layout: _Layout | None = None

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
    if self._layout is None:
      is_dict = isinstance(batches[0], Mapping)
      self._layout = _create_layout(
        self._mesh, self._config, parts[0], rows, is_dict
      )
    layout = self._layout
    lengths = [_check_batch(layout, part) for part in parts]
    if self._config.drop_remainder and rows < layout.rows:
      return None
    if not rows and len(sharding.pipelines(self._mesh)) == 1:
      # Of several processes, one without further examples passes such batches.
      parts[0].check_not_empty("; drop_remainder=True would leave it out")
    padded = {0: _padded_rows(layout, rows, self._config.bucket)}
    # All parts have the same dimensions that vary, in different sizes.
    for dim in lengths[0]:
      longest = max(part[dim] for part in lengths)
      padded[dim] = _round_to_bucket(longest, layout.multiples[dim])
    arrays = {}
    for path, leaf in layout.leaves.items():
      shape = tuple(
        padded[dim] if isinstance(size, str) else size
        for dim, size in enumerate(leaf.shape)
      )
      leaves = [part.arrays[path] for part in parts]
      arrays[path] = host_batch.join(path, leaves, shape)
    # Also without padding: another structure would compile the step again.
    if layout.mask is not None:
      mask = _create_mask([part.rows for part in parts], lengths, padded)
      if layout.mask in arrays:
        mask = _combine_masks(
          layout.mask, np.asarray(arrays[layout.mask]), mask
        )
      arrays[layout.mask] = mask
    out = sharding.put(self._mesh, arrays, layout.shardings)
    batch = jax.tree.unflatten(layout.tree, [out[p] for p in layout.leaves])
    if layout.mask is None or layout.mask in layout.leaves:
      return batch
    return {**batch, layout.mask: out[layout.mask]}


def _create_layout(
  mesh: jax.sharding.Mesh,
  config: Padding,
  first: host_batch.HostBatch,
  rows: int,
  is_dict: bool,
) -> _Layout:
  """Returns the layout that all batches of an iterator share.

  Args:
    mesh: The mesh.
    config: How to pad.
    first: The first host batch.
    rows: Number of rows of the first batch.
    is_dict: Whether a batch is a dict, which can have a mask.

  Raises:
    ValueError: `config` does not fit the first batch.
  """
  if config.bucket is not None and not is_dict:
    raise ValueError(
      f"bucket={config.bucket!r} adds a mask, so batches must be dicts, got "
      f"{first.tree}."
    )
  varying = config.varying_dims()
  sharding.check_paths("bucket_dims", varying, first.arrays)
  leaves = _describe(first, varying)
  shapes = {path: leaf.shape for path, leaf in leaves.items()}
  specs = sharding.check_specs(mesh, config.spec)
  chosen = sharding.specs_by_path(mesh, specs, shapes)
  multiples = {0: 1}
  row_parts = {}
  for path, spec in chosen.items():
    axes = specs_lib.dims_of(spec, len(shapes[path]))
    parts = specs_lib.parts(axes, mesh.shape)
    row_parts[path] = parts[0]
    for dim, size in enumerate(shapes[path]):
      if isinstance(size, str):
        # One padded size for all leaves: every sharding has to divide it.
        multiples[dim] = math.lcm(multiples.get(dim, 1), parts[dim])
  count = len(sharding.pipelines(mesh))
  # Each process pads its rows to its share of the multiple: together the rows
  # of all pipelines reach the multiple.
  multiples[0] //= math.gcd(multiples[0], count)
  if config.batch_size is not None:
    rows = int(config.batch_size) // count
  if not rows:
    raise ValueError("the first batch has no examples: give the batch_size.")
  mask = config.mask if is_dict else None
  if mask is not None and mask not in chosen:
    # Its rows are split as those of the leaf with the most parts.
    chosen[mask] = P(*chosen[max(row_parts, key=row_parts.__getitem__)][:1])
  return _Layout(
    tree=first.tree,
    varying=varying,
    leaves=leaves,
    shardings={
      path: jax.sharding.NamedSharding(mesh, spec)
      for path, spec in chosen.items()
    },
    rows=rows,
    multiples=multiples,
    mask=mask,
  )


def _describe(
  batch: host_batch.HostBatch, varying: Mapping[str, Any]
) -> dict[str, _Leaf]:
  """Returns what all batches must share, by path.

  Args:
    batch: A batch.
    varying: The dimensions that vary, by path.
  """
  leaves = {}
  for path, x in batch.arrays.items():
    # A tuple for all leaves also names dimensions that some do not have.
    dims = sharding.lookup(varying, path, ())
    sizes = [_VARYING if i in dims else n for i, n in enumerate(x.shape)]
    leaves[path] = _Leaf((_BATCH, *sizes[1:]), host_batch.dtype_of(x))
  return leaves


def _check_batch(
  layout: _Layout, batch: host_batch.HostBatch
) -> dict[int, int]:
  """Returns the sizes of the dimensions that vary, by dimension.

  Raises:
    ValueError: The batch differs from the first one, or two leaves have
      different sizes in a dimension that varies.
  """
  given = _describe(batch, layout.varying)
  if given != layout.leaves:
    difference = trees.difference_by_path(
      {(path,): leaf for path, leaf in given.items()},
      {(path,): leaf for path, leaf in layout.leaves.items()},
    )
    raise ValueError(
      f"a batch differs from the first one in {difference}. Dimensions vary "
      "with bucket='power_of_two' and bucket_dims."
    )
  sizes = {}
  for dim in sorted(layout.multiples.keys() - {0}):
    by_path = {
      f"batch[{path}]": batch.arrays[path].shape[dim]
      for path, leaf in layout.leaves.items()
      if leaf.shape[dim : dim + 1] == (_VARYING,)
    }
    if len(set(by_path.values())) > 1:
      raise ValueError(
        f"the sizes in dimension {dim} differ, but there is one mask for all: "
        f"{by_path}; bucket_dims as a dict by path names the leaves that vary."
      )
    sizes[dim] = next(iter(by_path.values()))
  return sizes


def _padded_rows(layout: _Layout, rows: int, bucket: str | None) -> int:
  """Returns the number of rows that a batch of this process is padded to."""
  multiple = layout.multiples[0]
  padded = -(-layout.rows // multiple) * multiple
  if rows > padded:
    if bucket is None:
      raise ValueError(
        f"a batch has {rows} examples, but the first one or batch_size has "
        f"{layout.rows}: give the largest number as batch_size, or "
        "bucket='power_of_two'."
      )
    padded = _round_to_bucket(rows, multiple)
  if rows != padded and layout.mask is None:
    raise ValueError(
      f"a batch has {rows} examples and would be padded to {padded}, but has "
      "no mask to mark the padding: use dicts and a mask; or batches of equal "
      f"size, a multiple of {multiple}, with drop_remainder=True for a short "
      "last one."
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
