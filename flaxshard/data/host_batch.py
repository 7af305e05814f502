"""Batches on the host: pytrees of arrays, checked leaf by leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees

PyTree = Any
Array = np.ndarray | jax.Array


class HostBatch(NamedTuple):
  """A batch whose leaves are arrays with as many rows.

  Attributes:
    tree: The structure.
    arrays: The leaves.
  """

  tree: Any
  arrays: list[Array]

  @property
  def rows(self) -> int:
    """The number of examples."""
    return self.arrays[0].shape[0]

  @property
  def paths(self) -> list[str]:
    """The paths of the leaves, in order."""
    return _paths(self.tree)


def flatten(batch: PyTree) -> HostBatch:
  """Takes a batch apart.

  Raises:
    ValueError: There are no leaves; one is ragged, a single number, has other
      rows than the first, or integers that wrap around on the device.
    TypeError: A leaf is not numeric.
  """
  leaves, tree = jax.tree.flatten(batch)
  if not leaves:
    raise ValueError(f"a batch must have arrays, got {batch!r}.")
  arrays: list[Array] = []
  for i, leaf in enumerate(leaves):
    try:
      arrays.append(_array(leaf))
    except (TypeError, ValueError) as e:
      kind = TypeError if isinstance(e, TypeError) else ValueError
      raise kind(f"batch[{_paths(tree)[i]}] {e}") from e
    if len(arrays[i]) != len(arrays[0]):
      raise ValueError(
        f"batch[{_paths(tree)[i]}] has {len(arrays[i])} examples, "
        f"batch[{_paths(tree)[0]}] has {len(arrays[0])}; the leading dimension "
        "is the batch."
      )
  return HostBatch(tree, arrays)


def dtype_of(x: Array) -> np.dtype:
  """Returns the dtype that an array gets on the device."""
  return np.dtype(jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))


def join(path: str, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
  """Joins arrays along their rows and pads them to a shape.

  New rows repeat the first one: what is finite on every example is finite on
  them. New positions in a row are zero.

  Args:
    path: The path of the leaf, for errors.
    arrays: One or more, of one dtype, none larger than `shape`.
    shape: What to pad to.

  Returns:
    An array of the dtype it has on the device, sharing no memory with a NumPy
    array: a source may reuse its own, and a CPU device may alias them.

  Raises:
    ValueError: A number overflows in that dtype.
  """
  whole = len(arrays) == 1 and arrays[0].shape == shape
  if whole and isinstance(arrays[0], jax.Array) and jax.process_count() == 1:
    return trees.strong(arrays[0])
  dtype = dtype_of(arrays[0])
  try:
    with np.errstate(over="raise"):
      if whole:
        return np.array(arrays[0], dtype, order="C")
      out = np.zeros(shape, dtype)
      rows = 0
      for x in arrays:
        out[(slice(rows, rows + len(x)), *map(slice, x.shape[1:]))] = x
        rows += len(x)
  except FloatingPointError as e:
    raise ValueError(
      f"batch[{path}] has finite numbers that overflow in {dtype}."
    ) from e
  if rows:
    out[rows:] = out[:1]
  return out


def _array(x: Any) -> Array:
  """Returns a leaf as an array, if it can be one on the device unharmed."""
  if isinstance(x, jax.Array):
    if not x.is_fully_addressable:
      raise ValueError(
        "lies on devices of other processes: it is sharded already."
      )
  elif isinstance(x, np.ma.MaskedArray):
    raise TypeError("is a masked array, whose mask would be lost.")
  else:
    x = np.asarray(x)
  if x.dtype == object:
    raise ValueError(
      f"is an array of objects, shape {x.shape}: rows of different lengths "
      "must be padded into one array first."
    )
  if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
    raise TypeError(f"must be numbers or booleans, got {x.dtype}.")
  if not x.ndim:
    raise ValueError(
      "is a single number: every leaf must be an array with the examples in "
      "its leading dimension."
    )
  dtype = dtype_of(x)
  if x.dtype.kind in "iu" and dtype.itemsize < x.dtype.itemsize and x.size:
    low, high, allowed = int(x.min()), int(x.max()), np.iinfo(dtype)
    if low < allowed.min or high > allowed.max:
      raise ValueError(
        f"is {x.dtype}, from {low} to {high}, and would wrap around in "
        f"{dtype}: cast it, or set jax_enable_x64."
      )
  return x


def _paths(tree: Any) -> list[str]:
  numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
  flat = jax.tree_util.tree_leaves_with_path(numbered)
  return [trees.path_string(path) for path, _ in flat]
