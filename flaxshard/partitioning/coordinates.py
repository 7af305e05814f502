"""Coordinates in a mesh of cores: argument checks and lookup tables.

Coordinates are four integers: x, y and z of the chip, and the core on the chip.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flaxshard.core import checks

Lengths = tuple[int, int, int, int]


def in_mesh(
  argument: str, value: Any, ndim: int, mesh_shape: Sequence[int]
) -> np.ndarray:
  """Returns coordinates as an int64 array, a copy.

  Args:
    argument: Name of the argument that holds the coordinates, for errors.
    value: An array, or nested lists of integers, `[..., 4]`.
    ndim: The expected number of dimensions.
    mesh_shape: Four lengths.

  Raises:
    ArgumentTypeError: The shape is wrong, there are no coordinates, or an
      element is not an integer.
    ValueError: Coordinates are outside of the mesh.
  """
  array = np.asarray(value)
  has_shape = array.ndim == ndim and array.shape[-1] == 4 and array.size
  # Signed or unsigned integers; booleans and floats are other kinds.
  if not has_shape or array.dtype.kind not in "iu":
    raise checks.ArgumentTypeError(
      f"{argument} must be integers in {ndim} dimensions, the last of x, y, "
      f"z and core, got {array.dtype}{list(array.shape)}."
    )
  outside = (array < 0) | (array >= np.array(mesh_shape))
  condition = f"must be at least 0 and below the mesh's {list(mesh_shape)}"
  raise_if_any(outside.any(axis=-1), argument, array, condition)
  return array.astype(np.int64)


def mesh_lengths(argument: str, value: Any) -> Lengths:
  """Returns `value` as the four side lengths of a mesh or of a part of it.

  Args:
    argument: Name of the argument, for error messages.
    value: Four positive integers.

  Raises:
    ValueError: Not four, or not positive.
    TypeError: A length is not an integer.
  """
  if np.shape(value) != (4,):
    raise ValueError(f"{argument} must be four lengths, got {value!r}.")
  x, y, z, cores = (
    checks.integer(f"{argument}[{i}]", length, minimum=1)
    for i, length in enumerate(value)
  )
  return x, y, z, cores


def raise_if_any(
  invalid: np.ndarray | np.bool_,
  argument: str,
  coordinates: np.ndarray,
  condition: str,
) -> None:
  """Raises a ValueError that names the first invalid coordinates.

  Args:
    invalid: bool [...], True for invalid coordinates.
    argument: Name of the argument that holds the coordinates.
    coordinates: ints [..., 4].
    condition: The condition that they violate, such as "must be even".
  """
  if invalid.any():
    at = np.argwhere(invalid)[0].tolist()
    got = coordinates[tuple(at)].tolist()
    raise ValueError(f"{argument}{at or ''} {condition}, got {got}.")


def all_coordinates(shape: Sequence[int]) -> np.ndarray:
  """Returns all coordinates of a mesh: cores vary fastest, then x, y and z.

  TPU hosts number their cores in this order.

  Args:
    shape: Four lengths.

  Returns:
    int64 [product of `shape`, 4].

  Example:
    >>> all_coordinates((2, 2, 1, 1)).tolist()
    [[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0]]
  """
  x, y, z, cores = shape
  # np.indices varies its last axis fastest.
  indices = np.indices((z, y, x, cores)).reshape(4, -1)
  return indices[[2, 1, 0, 3]].T


def number_places(
  argument: str, coordinates: np.ndarray, mesh_shape: Sequence[int]
) -> np.ndarray:
  """Returns the number of the coordinates at each place of a mesh.

  Args:
    argument: Name of the argument that holds the coordinates, for errors.
    coordinates: ints [n, m, 4]; they are numbered through n and m.
    mesh_shape: Four lengths.

  Returns:
    int32 of shape `mesh_shape`; -1 where there are none.

  Raises:
    ValueError: Coordinates appear twice.
  """
  numbers = np.arange(coordinates[..., 0].size).reshape(coordinates.shape[:2])
  places = tuple(np.moveaxis(coordinates, -1, 0))
  table = np.full(mesh_shape, -1, np.int32)
  table[places] = numbers
  # Of two numbers for the same place, the table keeps only the later one.
  condition = "must not be the place of another core"
  raise_if_any(table[places] != numbers, argument, coordinates, condition)
  return table


def read_only(value: Any, dtype: Any) -> np.ndarray:
  """Returns a copy of an array that cannot be written to."""
  array = np.array(value, dtype)
  array.flags.writeable = False
  return array
