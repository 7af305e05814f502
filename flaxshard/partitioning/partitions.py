"""Translates a partition of a tensor over logical devices to a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning.specs import Mesh

P = jax.sharding.PartitionSpec


def partition_spec(
  mesh: Mesh, shape: tuple[int, ...], partition_dimensions: Any
) -> P:
  """Returns the spec that splits a tensor over all logical devices.

  Args:
    mesh: The mesh of a strategy.
    shape: The shape of the tensor.
    partition_dimensions: The number of pieces of each dimension; their product
      is the number of logical devices.

  Returns:
    A spec with one entry for each dimension.

  Raises:
    ValueError: There is not one number for each dimension, a number does not
      divide its dimension, the product is not the number of logical devices, or
      the mesh axes cannot be combined to these numbers. The last cannot happen
      on a mesh whose logical axes are prime.
    TypeError: `partition_dimensions` is not a list of integers.

  Example:
    >>> mesh = jax.sharding.AbstractMesh(
    ...     (1, 2, 2, 2), ("replica", "m0", "m1", "m2"))
    >>> partition_spec(mesh, (3, 28, 28, 1), [1, 2, 4, 1])
    P(None, 'm0', ('m1', 'm2'), None)
  """
  pieces = _check_pieces(mesh, shape, partition_dimensions)
  sizes = {name: mesh.shape[name] for name in mesh_lib.logical_axes(mesh)}
  # An axis of size 1 splits nothing.
  names = [name for name in sizes if sizes[name] > 1]
  chosen = _choose_axes(names, sizes, pieces)
  if chosen is None:
    raise ValueError(
      f"partition_dimensions={list(pieces)} cannot be built from the mesh axes "
      f"{sizes}: the number of pieces of each dimension must be a product of "
      "axis sizes. Every partition is possible with a mesh_shape of prime "
      "sizes, or with a device_assignment and no mesh_shape."
    )
  return P(*(axes[0] if len(axes) == 1 else axes or None for axes in chosen))


def _check_pieces(
  mesh: Mesh, shape: tuple[int, ...], partition_dimensions: Any
) -> tuple[int, ...]:
  """Returns the numbers of pieces, if they fit the shape and the mesh."""
  name = f"partition_dimensions={partition_dimensions!r}"
  # An array is not a Sequence. A 2D array becomes nested lists, which the check
  # of each number refuses.
  if isinstance(partition_dimensions, np.ndarray):
    partition_dimensions = partition_dimensions.tolist()
  if not isinstance(partition_dimensions, Sequence) or isinstance(
    partition_dimensions, (str, bytes)
  ):
    raise TypeError(f"{name} must be a list of integers.")
  pieces = tuple(
    checks.integer(f"partition_dimensions[{i}]", count, minimum=1)
    for i, count in enumerate(partition_dimensions)
  )
  if len(pieces) != len(shape):
    raise ValueError(
      f"{name} must have one number for each dimension of the tensor, which "
      f"has shape {shape}: {len(shape)}, got {len(pieces)}."
    )
  for i, (size, count) in enumerate(zip(shape, pieces, strict=True)):
    if size % count:
      raise ValueError(
        f"{name}: dimension {i} of the tensor, which has shape {shape}, cannot "
        f"be divided into {count} pieces."
      )
  num_devices = mesh_lib.num_logical_devices(mesh)
  if math.prod(pieces) != num_devices:
    raise ValueError(
      f"{name}: the product must be the number of logical devices, "
      f"{num_devices}, got {math.prod(pieces)}."
    )
  return pieces


def _choose_axes(
  names: Sequence[str], sizes: Mapping[str, int], pieces: Sequence[int]
) -> list[tuple[str, ...]] | None:
  """Returns mesh axes for each dimension, or None if there is no solution.

  It tries smaller sets of axes first, and sets of one size in the order of the
  mesh. If all sizes are equal, the pieces lie in row-major order.

  Args:
    names: The mesh axes that are still unused, in the order of the mesh.
    sizes: The sizes of the mesh axes.
    pieces: The number of pieces of each dimension that is left.
  """
  if not pieces:
    return []
  # A mesh has few axes, so trying all combinations is fast.
  for count in range(len(names) + 1):
    for axes in itertools.combinations(names, count):
      if math.prod(sizes[name] for name in axes) != pieces[0]:
        continue
      unused = [name for name in names if name not in axes]
      rest = _choose_axes(unused, sizes, pieces[1:])
      if rest is not None:
        return [axes, *rest]
  return None
