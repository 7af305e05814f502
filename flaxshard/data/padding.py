"""Puts host batches on a mesh, padded to few shapes, with a mask of padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.data import sharding
from flaxshard.partitioning import mesh as mesh_lib

PyTree = Any

# Stand for the sizes of dimensions that are padded, in the shape of a leaf.
_BATCH = "batch"
_VARYING = "any"


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """Shape and dtype of a leaf; padded dimensions have a name as their size."""

  shape: tuple[int | str, ...]
  dtype: np.dtype


@dataclasses.dataclass(eq=False)
class Padder:
  """Pads the batches of one iterator and puts them on a mesh.

  All batches must have the structure, dtypes and shapes of the first one, but
  for the number of rows and the dimensions that vary.

  Attributes:
    mesh: The mesh.
    batch_size: See `flaxshard.data.distribute.DistributedDataset`, as for the
      following ones.
    mask: None for batches that are no dicts.
    drop_remainder: See there.
    bucket: See there.
    bucket_dims: See there.
    spec: See there.

  Raises:
    ValueError: An option is invalid or does not fit the mesh.
  """

  mesh: jax.sharding.Mesh
  _: dataclasses.KW_ONLY
  batch_size: int | None = None
  mask: str | None = "mask"
  drop_remainder: bool = False
  bucket: str | None = None
  bucket_dims: Any = None
  spec: PyTree = sharding.OVER_REPLICAS

  def __post_init__(self) -> None:
    self._count = len(sharding.pipelines(self.mesh).replicas)
    if self.batch_size is not None:
      # Every pipeline passes the same number of rows.
      checks.integer("batch_size", self.batch_size, minimum=1)
      if self.batch_size % self._count:
        raise ValueError(
          f"batch_size={self.batch_size}, of the global batch, must be a "
          f"multiple of the {self._count} input pipelines."
        )
    if not isinstance(self.mask, str | None):
      raise checks.ArgumentTypeError(f"mask must be a key, got {self.mask!r}.")
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
    if self.bucket_dims is None:
      self.bucket_dims = () if self.bucket is None else (1,)
    for path, dims in _flatten(self.bucket_dims).items():
      for dim in dims:  # dimension 0 is the batch
        where = f"bucket_dims={dims!r} for {path}: a dimension"
        checks.integer(where, dim, minimum=1)
    # What all batches share with the first one, by path.
    self._leaves: dict[str, _Leaf] = {}

  def __call__(self, batch: PyTree) -> PyTree | None:
    """Pads a host batch and puts it on the mesh.

    Args:
      batch: A pytree of arrays `[batch, ...]`.

    Returns:
      The batch as global arrays; None if it is dropped.

    Raises:
      ValueError: The batch differs from the first one, or needs a mask and
        cannot have one.
      TypeError: A leaf is not numeric.
    """
    flat = sharding.flatten(batch)
    if not self._leaves:
      self._start(batch, flat)
    sizes = self._check(flat)
    if self.drop_remainder and flat.rows < self._rows:
      return None
    padded = {
      dim: _round_to_bucket(size, self._multiples[dim])
      for dim, size in sizes.items()
    }
    padded[0] = self._padded_rows(flat.rows)
    arrays = {}
    for path, x in flat.arrays.items():
      shape = tuple(
        padded[dim] if isinstance(size, str) else size
        for dim, size in enumerate(self._leaves[path].shape)
      )
      arrays[path] = sharding.pad(path, x, shape)
    key = self.mask
    # Also without padding: another structure would compile the step again.
    if key is not None:
      mask = np.zeros(tuple(padded.values()), bool)
      mask[tuple(map(slice, sizes.values()))] = True
      if key in arrays:
        # Transposed: a given mask of rows alone applies to all their positions.
        mask = (np.asarray(arrays[key]).T & mask.T).T
      arrays[key] = mask
    out = sharding.put(arrays, self._shardings)
    batch = jax.tree.unflatten(flat.tree, [out[p] for p in self._leaves])
    if key is None or key in self._leaves:
      return batch
    return {**batch, key: out[key]}

  def _start(self, batch: PyTree, first: sharding.HostBatch) -> None:
    """Takes what all batches share from the first one.

    Raises:
      ValueError: The options do not fit the batch.
    """
    if not isinstance(batch, Mapping):
      if self.bucket is not None:
        raise ValueError(
          f"bucket={self.bucket!r} adds a mask, so batches must be dicts, got "
          f"{first.tree}."
        )
      self.mask = None
    elif self.mask in batch:
      given = batch[self.mask]
      if not hasattr(given, "dtype") or given.dtype != bool:
        raise ValueError(
          f"batch[{self.mask}] must be a bool array [batch, ...], got "
          f"{checks.describe(given)}; the argument mask= sets another key for "
          "the mask of padding."
        )
    # The rows of a full batch of this process, and the dimensions that vary.
    self._rows = first.rows
    if self.batch_size is not None:
      self._rows = int(self.batch_size) // self._count
    self._varying = _by_leaf(
      "bucket_dims", self.bucket_dims, first.arrays, default=()
    )
    leaves = self._describe(first)
    specs = _by_leaf("spec", self.spec, leaves, default=sharding.OVER_REPLICAS)
    parts = {
      path: self._parts(f"spec for batch[{path}]", specs[path], leaf.shape)
      for path, leaf in leaves.items()
    }
    if self.mask is not None:
      # Its rows are split as those of the leaf with the most parts.
      most = max(leaves, key=lambda path: parts[path][0])
      specs.setdefault(self.mask, jax.P(*specs[most][:1]))
    self._shardings = {
      path: jax.sharding.NamedSharding(self.mesh, spec)
      for path, spec in specs.items()
    }
    # What the size of a padded dimension is a multiple of: there is one for all
    # leaves, and every sharding has to divide it.
    self._multiples: dict[int, int] = {}
    for path, leaf in leaves.items():
      for dim, size in enumerate(leaf.shape):
        if isinstance(size, str):
          multiple = self._multiples.get(dim, 1)
          self._multiples[dim] = math.lcm(multiple, parts[path][dim])
    # Each process pads its rows to its share of the multiple: together the rows
    # of all pipelines reach the multiple.
    self._multiples[0] //= math.gcd(self._multiples[0], self._count)
    self._leaves = leaves

  def _parts(
    self, where: str, spec: jax.P, shape: tuple[int | str, ...]
  ) -> tuple[int, ...]:
    """Returns into how many parts a spec splits each dimension of a leaf."""
    # What is padded later will be divisible. Without a mask there is no
    # padding, and `spec` must divide the rows.
    sizes = [0 if isinstance(n, str) else n for n in shape]
    if self.mask is None:
      sizes[0] = self._rows * self._count
    mesh_lib.check_spec(where, spec, tuple(sizes), self.mesh)
    rows_axes = mesh_lib.dims_of(spec, len(shape))[0]
    if self._count > 1 and mesh_lib.REPLICA not in rows_axes:
      raise ValueError(
        f"{where}: {spec} must split its leading dimension over 'replica': "
        "each process has some of the rows."
      )
    return mesh_lib.parts(spec, len(shape), self.mesh.shape)

  def _describe(self, batch: sharding.HostBatch) -> dict[str, _Leaf]:
    """Returns what all batches must share, by path."""
    leaves = {}
    for path, x in batch.arrays.items():
      # A tuple for all leaves also names dimensions that some do not have.
      dims = self._varying.get(path, ())
      sizes = [_VARYING if i in dims else n for i, n in enumerate(x.shape)]
      leaves[path] = _Leaf((_BATCH, *sizes[1:]), sharding.dtype_of(x))
    return leaves

  def _check(self, batch: sharding.HostBatch) -> dict[int, int]:
    """Returns the sizes of the rows and of the dimensions that vary.

    Raises:
      ValueError: The batch differs from the first one, is empty, or two leaves
        have different sizes in a dimension that varies.
    """
    if difference := trees.first_difference(
      self._describe(batch), self._leaves
    ):
      raise ValueError(
        f"a batch differs from the first one in {difference}. Dimensions vary "
        "with bucket='power_of_two' and bucket_dims."
      )
    sizes: dict[int, int] = {}
    for path, x in batch.arrays.items():
      for dim, name in enumerate(self._leaves[path].shape):
        size = x.shape[dim]
        if isinstance(name, str) and sizes.setdefault(dim, size) != size:
          raise ValueError(
            f"batch[{path}] has {size} elements in dimension {dim}, another "
            f"leaf {sizes[dim]}, and there is one mask for all: bucket_dims as "
            "a dict by path names the leaves that vary."
          )
    return dict(sorted(sizes.items()))

  def _padded_rows(self, rows: int) -> int:
    """Returns the number of rows that a batch of this process is padded to."""
    # Of several processes, one without further examples passes batches of none.
    if not rows and (self._count == 1 or not self._rows):
      raise ValueError(
        f"batch[{next(iter(self._leaves))}] has no examples: "
        "drop_remainder=True leaves such a batch out; of several processes, "
        "one may pass it if batch_size is given."
      )
    multiple = self._multiples[0]
    padded = -(-self._rows // multiple) * multiple
    if rows > padded:
      if self.bucket is None:
        raise ValueError(
          f"a batch has {rows} examples, but the first one or batch_size has "
          f"{self._rows}: give the largest number as batch_size, or "
          "bucket='power_of_two'."
        )
      padded = _round_to_bucket(rows, multiple)
    if rows != padded and self.mask is None:
      raise ValueError(
        f"a batch has {rows} examples and would be padded to {padded}, but has "
        "no mask to mark the padding: use dicts and a mask; or batches of "
        f"equal size, a multiple of {multiple}, with drop_remainder=True for a "
        "short last one."
      )
    return padded


def _flatten(values: Any) -> dict[str, Any]:
  """Flattens nested dicts into one by path; the root is `<root>`."""
  flat = jax.tree_util.tree_leaves_with_path(
    values, is_leaf=lambda x: not isinstance(x, Mapping)
  )
  return {trees.path_string(path): value for path, value in flat}


def _by_leaf(
  argument: str, values: Any, paths: Iterable[str], *, default: Any
) -> dict[str, Any]:
  """Returns the value of each leaf of a batch.

  Args:
    argument: Name of the argument, for the error message.
    values: A value for all leaves, or nested dicts by path. The value of a path
      is that of all leaves below it for which no longer path has one.
    paths: The paths of the leaves.
    default: The value of the others.

  Raises:
    ValueError: A path is that of no leaf.

  Example:
    >>> _by_leaf("spec", {"a": {"b": 1}}, ["a/b/c", "d"], default=0)
    {'a/b/c': 1, 'd': 0}
  """
  found = dict.fromkeys(paths, default)
  for key, value in sorted(_flatten(values).items(), key=lambda x: len(x[0])):
    # The root, the path of a value that is in no dict, is above every leaf.
    root = trees.path_string(())
    below = [p for p in found if key in (root, p) or p.startswith(f"{key}/")]
    if not below:
      raise ValueError(
        f"{argument} names {key!r}; the batch has {', '.join(found)}."
      )
    found |= dict.fromkeys(below, value)
  return found


def _round_to_bucket(size: int, multiple: int) -> int:
  """Returns the least `multiple * 2**n` that is not below a size."""
  return multiple << (max(-(-size // multiple), 1) - 1).bit_length()
