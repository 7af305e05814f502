"""Batches on the host: pytrees of arrays, checked leaf by leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees

PyTree = Any
# An abstract batch has only shapes and dtypes.
Array = np.ndarray | jax.Array | jax.ShapeDtypeStruct


class HostBatch(NamedTuple):
  """A flattened batch. All arrays have the same number of rows.

  Attributes:
    tree: The tree structure of the batch.
    arrays: The leaves, `[batch, ...]`.
  """

  tree: Any
  arrays: list[Array]

  @property
  def rows(self) -> int:
    """The number of examples."""
    return self.arrays[0].shape[0]

  @property
  def paths(self) -> list[str]:
    """The paths of the leaves, such as `"image"`, in the order of `arrays`."""
    return _paths(self.tree)


def flatten(batch: PyTree) -> HostBatch:
  """Flattens a batch and checks its leaves.

  Args:
    batch: A pytree of arrays `[batch, ...]`, of NumPy or JAX, or of
      `jax.ShapeDtypeStruct`s.

  Returns:
    The tree structure and the arrays, not copied.

  Raises:
    ValueError: There is no leaf. A leaf is ragged, a scalar, or has another
      number of rows than the first leaf. Its integers do not fit the dtype
      that JAX gives them. The message names the path.
    TypeError: A leaf is not numeric.

  Example:
    >>> batch = flatten({"image": np.ones((2, 3)), "label": np.ones(2)})
    >>> batch.paths, batch.rows
    (['image', 'label'], 2)
  """
  leaves, tree = jax.tree.flatten(batch)
  if not leaves:
    raise ValueError(f"a batch must have arrays, got {batch!r}.")
  arrays: list[Array] = []
  for i, leaf in enumerate(leaves):
    try:
      array = _check_leaf(leaf)
    except (TypeError, ValueError) as e:
      # Paths are only computed for errors: they take longer than the checks.
      kind = TypeError if isinstance(e, TypeError) else ValueError
      raise kind(f"batch[{_paths(tree)[i]}] {e}") from e
    arrays.append(array)
    if len(array) != len(arrays[0]):
      paths = _paths(tree)
      raise ValueError(
        f"batch[{paths[i]}] has {len(array)} examples, batch[{paths[0]}] has "
        f"{len(arrays[0])}; the leading dimension is the batch."
      )
  return HostBatch(tree, arrays)


def dtype_of(x: Array) -> np.dtype:
  """Returns the dtype that an array gets on the device."""
  return np.dtype(jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))


def join(path: str, arrays: Sequence[Array], shape: tuple[int, ...]) -> Array:
  """Concatenates arrays along the rows and pads them to a shape.

  New rows repeat the given ones in turn. New positions within a row are zero.

  Args:
    path: The path of the leaf, for error messages.
    arrays: One or more arrays of the same dtype, each within `shape`.
    shape: The shape of the result.

  Returns:
    An array of the dtype that it gets on the device. It shares no memory with
    a NumPy array of `arrays`.

  Raises:
    ValueError: A finite number overflows in that dtype.

  Example:
    >>> join("x", [np.array([1, 2]), np.array([3])], (4,)).tolist()
    [1, 2, 3, 1]
  """
  first = arrays[0]
  if isinstance(first, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, dtype_of(first))
  unchanged = len(arrays) == 1 and first.shape == shape
  # A device array stays there. In several processes it has to be copied to the
  # host: JAX assembles global arrays from the host arrays of the processes.
  one_process = jax.process_count() == 1
  if unchanged and one_process and isinstance(first, jax.Array):
    return trees.drop_weak_type(first)
  dtype = dtype_of(first)
  try:
    # float64 to float32 overflows to infinity, silently by default.
    with np.errstate(over="raise"):
      if unchanged:
        # A copy: a source may reuse its array for the next batch, and a JAX
        # array on the CPU may alias the memory of a NumPy array.
        return np.array(first, dtype, order="C")
      out = np.zeros(shape, dtype)
      rows = 0
      for x in arrays:
        out[(slice(rows, rows + len(x)), *map(slice, x.shape[1:]))] = x
        rows += len(x)
  except FloatingPointError as e:
    raise ValueError(
      f"batch[{path}] has finite numbers that overflow in {dtype}."
    ) from e
  filled = rows
  while 0 < filled < len(out):
    # Not zeros: a loss that is finite for every example is then finite for the
    # padding too. log(0), or the gradient of a norm at 0, is not. All rows in
    # turn: means that ignore the mask stay close to those of the batch.
    out[filled : 2 * filled] = out[: min(filled, len(out) - filled)]
    filled *= 2
  return out


def _check_leaf(x: Any) -> Array:
  """Returns a leaf as an array, or raises if JAX would change its values."""
  if isinstance(x, jax.ShapeDtypeStruct):
    pass
  elif isinstance(x, jax.Array):
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
  # jnp knows bfloat16 and float8 as numbers, NumPy does not.
  if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
    raise TypeError(f"must be numbers or booleans, got {x.dtype}.")
  if not x.ndim:
    raise ValueError(
      "is a scalar: every leaf must be an array whose leading dimension is the "
      "batch."
    )
  if not isinstance(x, jax.ShapeDtypeStruct):
    overflow = trees.integer_overflow(x)
    if overflow is not None:
      raise ValueError(overflow)
  return x


def _paths(tree: Any) -> list[str]:
  numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
  flat = jax.tree_util.tree_leaves_with_path(numbered)
  return [trees.path_string(path) for path, _ in flat]
