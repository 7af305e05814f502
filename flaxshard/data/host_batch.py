"""Batches on the host: pytrees of arrays, checked leaf by leaf."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees

PyTree = Any
# An abstract batch has only shapes and dtypes.
Array = np.ndarray | jax.Array | jax.ShapeDtypeStruct


class HostBatch(NamedTuple):
  """A flattened batch. All arrays have the same number of rows.

  Attributes:
    tree: The tree structure of the batch.
    arrays: The leaves, `[batch, ...]`, by path, such as `"image"`.
    rows: The number of examples.
  """

  tree: Any
  arrays: dict[str, Array]
  rows: int


def flatten(batch: PyTree) -> HostBatch:
  """Flattens a batch and checks its leaves.

  Args:
    batch: A pytree of arrays `[batch, ...]`, of NumPy or JAX, or of
      `jax.ShapeDtypeStruct`s.

  Returns:
    The tree structure and the arrays, not copied.

  Raises:
    ValueError: There is no leaf. A leaf is a scalar, or has another number of
      rows than the first leaf. Its integers do not fit the dtype that JAX gives
      them. The message names the path.
    TypeError: A leaf is not numeric.

  Example:
    >>> batch = flatten({"image": np.ones((2, 3)), "label": np.ones(2)})
    >>> list(batch.arrays), batch.rows
    (['image', 'label'], 2)
  """
  leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
  if not leaves:
    raise ValueError(f"a batch must have arrays, got {batch!r}.")
  arrays: dict[str, Array] = {}
  for key_path, leaf in leaves:
    path = trees.path_string(key_path)
    arrays[path] = _check_leaf(f"batch[{path}]", leaf)
  (first, array), *others = arrays.items()
  for path, other in others:
    if other.shape[0] != array.shape[0]:
      raise ValueError(
        f"batch[{path}] has {other.shape[0]} examples, batch[{first}] has "
        f"{array.shape[0]}; the leading dimension is the batch."
      )
  return HostBatch(tree, arrays, array.shape[0])


def dtype_of(x: Array) -> np.dtype:
  """Returns the dtype that an array gets on the device."""
  return np.dtype(jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))


def pad(path: str, x: Array, shape: tuple[int, ...]) -> Array:
  """Pads an array to a shape.

  New rows repeat the given ones in turn. New positions within a row are zero.

  Args:
    path: The path of the leaf, for error messages.
    x: The array, within `shape`.
    shape: The shape of the result.

  Returns:
    An array of the dtype that it gets on the device. It shares no memory with
    a NumPy array `x`.

  Raises:
    ValueError: A finite number overflows in that dtype.

  Example:
    >>> pad("x", np.array([1, 2]), (3,)).tolist()
    [1, 2, 1]
  """
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, dtype_of(x))
  # A device array stays there. In several processes it has to be copied to the
  # host: JAX assembles global arrays from the host arrays of the processes.
  is_whole = isinstance(x, jax.Array) and x.shape == shape
  if is_whole and jax.process_count() == 1:
    return trees.drop_weak_type(x)
  # New memory: a source may reuse its array for the next batch, and a JAX array
  # on the CPU may alias the memory of a NumPy array.
  out = np.zeros(shape, dtype_of(x))
  try:
    # float64 to float32 overflows to infinity, silently by default.
    with np.errstate(over="raise"):
      out[tuple(map(slice, x.shape))] = x
  except FloatingPointError as e:
    raise ValueError(
      f"batch[{path}] has finite numbers that overflow in {out.dtype}."
    ) from e
  if 0 < len(x) < len(out):
    # Not zeros: a loss that is finite for every example is then finite for the
    # padding too. log(0), or the gradient of a norm at 0, is not. All rows in
    # turn: means that ignore the mask stay close to those of the batch.
    out[len(x) :] = out[np.arange(len(out) - len(x)) % len(x)]
  return out


def _check_leaf(where: str, x: Any) -> Array:
  """Returns a leaf as an array, or raises if JAX would change its values."""
  if isinstance(x, np.ma.MaskedArray):
    raise TypeError(f"{where} is a masked array, whose mask would be lost.")
  if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
    x = np.asarray(x)
  # jnp knows bfloat16 and float8 as numbers, NumPy does not.
  if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
    # An array of objects, as of rows of different lengths, has a wrong shape.
    raise checks.ArgumentTypeError(
      f"{where} must be numbers or booleans, got {x.dtype}, shape {x.shape}."
    )
  if not x.ndim:
    raise ValueError(
      f"{where} is a scalar: every leaf must be an array whose leading "
      "dimension is the batch."
    )
  trees.check_integers(where, x)
  return x
