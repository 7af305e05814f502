"""Pads batches to few shapes, with a mask that marks the real examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flaxshard.data import host_batch
from flaxshard.data import layout as layout_lib
from flaxshard.data import sharding

PyTree = Any


class Padder:
  """Pads the batches of one iterator and puts them on a mesh.

  All batches must have the structure, dtypes and shapes of the first one, but
  for the number of rows and the dimensions that vary.

  Args:
    mesh: The mesh.
    config: How to pad.
  """

  def __init__(self, mesh: jax.sharding.Mesh, config: layout_lib.Padding):
    self._mesh = mesh
    self._config = config
    self._layout: layout_lib.Layout | None = None

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
    if self._layout is None:
      is_dict = isinstance(batches[0], Mapping)
      self._layout = layout_lib.create_layout(
        self._mesh, self._config, parts, is_dict
      )
    layout = self._layout
    lengths = [layout_lib.check_batch(layout, part) for part in parts]
    rows = sum(part.rows for part in parts)
    if self._config.drop_remainder and rows < layout.rows:
      return None
    if not rows and len(sharding.pipelines(self._mesh)) == 1:
      # Of several processes, one without further examples passes such batches.
      raise ValueError(
        f"batch[{layout.leaves[0].path}] has the shape "
        f"{parts[0].arrays[0].shape}: a batch needs at least one example; "
        "drop_remainder=True would leave it out."
      )
    padded = {0: _padded_rows(layout, rows, self._config.bucket)}
    # All parts have the same dimensions that vary, in different sizes.
    for dim in lengths[0]:
      longest = max(part[dim] for part in lengths)
      padded[dim] = _round_to_bucket(longest, layout.multiples[dim])

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
    # Also without padding: another structure would compile the step again.
    if layout.mask is not None:
      mask = _create_mask([part.rows for part in parts], lengths, padded)
      if layout.mask_leaf is None:
        arrays.append(mask)
        shardings.append(layout.mask_sharding)
      elif not isinstance(arrays[layout.mask_leaf], jax.ShapeDtypeStruct):
        given = np.asarray(arrays[layout.mask_leaf])
        arrays[layout.mask_leaf] = _combine_masks(layout.mask, given, mask)
    out = sharding.put(self._mesh, arrays, shardings)
    if layout.mask is None or layout.mask_leaf is not None:
      return jax.tree.unflatten(layout.tree, out)
    batch = jax.tree.unflatten(layout.tree, out[:-1])
    return {**batch, layout.mask: out[-1]}


def _padded_rows(
  layout: layout_lib.Layout, rows: int, bucket: str | None
) -> int:
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
