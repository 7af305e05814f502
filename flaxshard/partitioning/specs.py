"""Mesh axes that split each dimension of an array.

Rules, Flax's metadata, arrays on a mesh and wrappers all say them by a
PartitionSpec. `check` compares it with a shape and a mesh, and `shortest` gives
it the one form that a state has.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
import itertools
import math
from typing import Any

import jax

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
# The name of the mesh axis of the replicas.
REPLICA = "replica"


def axes_of(entry: Any) -> tuple[Any, ...]:
  """Returns the mesh axes in one entry of a PartitionSpec.

  Example:
    >>> axes_of(None), axes_of("model"), axes_of(("m0", "m1"))
    ((), ('model',), ('m0', 'm1'))
  """
  if entry is None:
    return ()
  return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def axes_in(spec: jax.P) -> set[str]:
  """Returns all mesh axes in a PartitionSpec."""
  return {axis for entry in spec for axis in axes_of(entry)}


def dims_of(spec: jax.P, ndim: int) -> tuple[tuple[str, ...], ...]:
  """Returns the axes that split each dimension of an array of `ndim`.

  Example:
    >>> dims_of(jax.P(None, "model"), 3)
    ((), ('model',), ())
  """
  # A spec may be shorter than the shape: the other dimensions are not split.
  return (*map(axes_of, spec), *((),) * (ndim - len(spec)))


def parts(spec: jax.P, ndim: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """Returns into how many parts each dimension of an array is split.

  Args:
    spec: The PartitionSpec.
    ndim: The number of dimensions.
    sizes: The sizes of the mesh axes.
  """
  return tuple(
    math.prod(sizes[axis] for axis in axes) for axes in dims_of(spec, ndim)
  )


def only(spec: jax.P, axes: Container[str]) -> jax.P:
  """Returns what a PartitionSpec says of some axes, without Nones at its end.

  Args:
    spec: The PartitionSpec.
    axes: The mesh axes.

  Example:
    >>> only(jax.P(("replica", "model"), "expert"), ["replica"])
    P('replica',)
  """
  dims = [tuple(a for a in axes_of(entry) if a in axes) for entry in spec]
  while dims and not dims[-1]:
    dims.pop()
  return jax.P(*dims)


def merge(spec: jax.P, other: jax.P) -> jax.P:
  """Returns a PartitionSpec with entries of another one where it has none."""
  return jax.P(*(a or b for a, b in itertools.zip_longest(spec, other)))


def shortest(spec: jax.P, mesh: Mesh) -> jax.P:
  """Returns a PartitionSpec without axes of size 1 and Nones at its end.

  JAX treats `P("a")`, `P("a", None)` and, if the axis has one device, `P()` as
  three different shardings. XLA may return an output with any of them, and the
  next call would then compile again.
  """
  return only(spec, [axis for axis, size in mesh.shape.items() if size > 1])


def check(
  what: str,
  spec: Any,
  shape: tuple[int, ...] | None,
  mesh: Mesh,
  error: type[ValueError] = ValueError,
) -> None:
  """Checks that a PartitionSpec fits a shape and a mesh.

  Args:
    what: Names the array and the source of its spec, for error messages.
    spec: The PartitionSpec.
    shape: The shape of the array; None checks the axes alone.
    mesh: The mesh.
    error: The class of the errors.

  Raises:
    TypeError: `spec` is not a PartitionSpec.
    ValueError: An unknown axis, an axis twice, more entries than dimensions, or
      a dimension that the axes do not divide. The message starts with `what`.

  Example:
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> check("kernel", jax.P(None, "model"), (3, 8), mesh)
  """
  if not isinstance(spec, jax.P):
    raise TypeError(f"{what}: must be a PartitionSpec, got {spec!r}.")
  try:
    sharding = jax.sharding.NamedSharding(mesh, spec)
    if shape is not None:
      sharding.check_compatible_aval(shape)
      sharding.shard_shape(shape)
  except Exception as e:  # JAX's error for an axis given twice is no ValueError
    raise error(f"{what}: {e}") from e
