"""The options of padding, and the layout that all padded batches share."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
import types
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.data import host_batch
from flaxshard.data import sharding

PyTree = Any
P = jax.sharding.PartitionSpec

# Stands for the size of a dimension that varies, in the shape of a leaf.
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
        where = f"bucket_dims={dims!r} for {path}"
        checks.integer(f"{where}: a dimension", dim, minimum=1)
    sharding.check_specs(mesh, self.spec)

  def varying_dims(self) -> dict[str, Any]:
    """Returns the dimensions that may vary, by path."""
    if self.bucket is None:
      return {}
    return sharding.by_path(
      (1,) if self.bucket_dims is None else self.bucket_dims
    )


@dataclasses.dataclass(frozen=True)
class Layout:
  """The properties that all batches share, taken from the first one.

  Attributes:
    tree: The tree structure.
    leaves: The leaves.
    rows: Number of rows in a full batch of this process.
    multiples: By dimension, the number that its padded size is a multiple of.
      Has the batch dimension, 0, and the dimensions that vary.
    mask: The key of the mask; None for no mask.
    mask_leaf: Index of the leaf that is the mask; None if batches have none, so
      that one is added.
    mask_sharding: Sharding of the mask: its rows are split as the rows of the
      leaf with the most parts.
  """

  tree: Any
  leaves: list[sharding.Leaf]
  rows: int
  multiples: dict[int, int]
  mask: str | None
  mask_leaf: int | None
  mask_sharding: jax.sharding.NamedSharding


def create_layout(
  mesh: jax.sharding.Mesh,
  config: Padding,
  parts: Sequence[host_batch.HostBatch],
  is_dict: bool,
) -> Layout:
  """Returns the layout that all batches of an iterator share.

  Args:
    mesh: The mesh.
    config: How to pad.
    parts: The host batches that the first global batch is joined from.
    is_dict: Whether a batch is a dict, which can have a mask.

  Raises:
    ValueError: `config` does not fit the first batch.
  """
  # `check_batch` compares the other parts with the first one.
  first, count = parts[0], len(sharding.pipelines(mesh))
  if config.bucket is not None and not is_dict:
    raise ValueError(
      f"bucket={config.bucket!r} adds a mask, so batches must be dicts, got "
      f"{first.tree}."
    )
  varying = config.varying_dims()
  sharding.check_paths("bucket_dims", varying, first.paths)
  specs = sharding.check_specs(mesh, config.spec)
  leaves = []
  multiples = {0: 1}
  for leaf in sharding.make_leaves(mesh, first, specs):
    shape = list(leaf.shape)
    for dim in sharding.lookup(varying, leaf.path, ()):
      # A tuple for all leaves also names dimensions that some do not have.
      if dim < len(shape):
        shape[dim] = _VARYING
    sharding.check_divisible(leaf, shape)
    for dim, (size, split) in enumerate(zip(shape, leaf.parts, strict=True)):
      if isinstance(size, str):
        # One padded size for all leaves: every sharding has to divide it.
        multiples[dim] = math.lcm(multiples.get(dim, 1), split)
    leaves.append(dataclasses.replace(leaf, shape=tuple(shape)))
  missing = {dim for dims in varying.values() for dim in dims} - set(multiples)
  # The default, (1,), is also for batches of which only the rows vary.
  if config.bucket_dims is not None and missing:
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    raise ValueError(
      f"bucket_dims={config.bucket_dims!r} names dimensions {sorted(missing)}, "
      f"which no array of the batch has: {shapes}."
    )
  # Each process pads its rows to its share of the multiple: together the rows
  # of all pipelines reach the multiple.
  multiples[0] //= math.gcd(multiples[0], count)
  if config.batch_size is not None:
    rows = int(config.batch_size) // count
  else:
    rows = sum(part.rows for part in parts)
  if not rows:
    raise ValueError("the first batch has no examples: give the batch_size.")
  mask = config.mask if is_dict else None
  most_parts = max(leaves, key=lambda leaf: leaf.parts[0])
  return Layout(
    tree=first.tree,
    leaves=leaves,
    rows=rows,
    multiples=multiples,
    mask=mask,
    mask_leaf=first.paths.index(mask) if mask in first.paths else None,
    mask_sharding=jax.sharding.NamedSharding(
      mesh, P(*most_parts.sharding.spec[:1])
    ),
  )


def check_batch(layout: Layout, batch: host_batch.HostBatch) -> dict[int, int]:
  """Returns the sizes of the dimensions that vary, by dimension.

  Raises:
    ValueError: The batch differs from the first one, or two leaves have
      different sizes in a dimension that varies.
  """
  # The usual case, without computing any path.
  if batch.tree == layout.tree and all(
    x.shape[1:] == leaf.shape[1:] and host_batch.dtype_of(x) == leaf.dtype
    for x, leaf in zip(batch.arrays, layout.leaves, strict=True)
  ):
    return {}
  wanted = {leaf.path: leaf for leaf in layout.leaves}
  given = {}
  sizes: dict[int, tuple[int, str]] = {}
  for path, x in zip(batch.paths, batch.arrays, strict=True):
    shape: list[int | str] = list(x.shape)
    pattern = wanted[path].shape if path in wanted else (sharding.BATCH,)
    for dim, size in enumerate(pattern[: x.ndim]):
      if size == _VARYING:
        other_size, other = sizes.setdefault(dim, (x.shape[dim], path))
        if x.shape[dim] != other_size:
          raise ValueError(
            f"batch[{path}] has size {x.shape[dim]} in dimension {dim}, "
            f"batch[{other}] has {other_size}, but there is one mask for both; "
            "bucket_dims as a dict by path names the leaves that vary."
          )
      if isinstance(size, str):
        # The same name on both sides compares as equal below.
        shape[dim] = size
    # Not a jax.ShapeDtypeStruct, which takes no names for sizes.
    given[path] = types.SimpleNamespace(
      shape=tuple(shape), dtype=host_batch.dtype_of(x)
    )
  difference = trees.first_difference(given, wanted)
  if difference:
    raise ValueError(
      f"a batch differs from the first one in {difference}. Dimensions vary "
      "with bucket='power_of_two' and bucket_dims."
    )
  if batch.tree != layout.tree:
    # The same paths in other containers, such as a list for a tuple.
    raise ValueError(
      f"a batch is a {batch.tree}, the first one was a {layout.tree}."
    )
  return {dim: sizes[dim][0] for dim in sorted(sizes)}
