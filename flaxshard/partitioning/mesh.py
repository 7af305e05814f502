"""Arrays on a mesh: which mesh axes split them, and how they get there.

Rules, Flax's metadata, arrays on a mesh and wrappers all say by a PartitionSpec
which axes split each dimension. `check_spec` compares it with a shape and a
mesh, and `shortest` gives it the one form that a state has.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
# The name of the mesh axis of the replicas.
REPLICA = "replica"


def logical_axes(mesh: Mesh) -> tuple[str, ...]:
  """Returns the names of the axes of a replica's logical devices."""
  return mesh.axis_names[1:]


# -- What splits an array.


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


def check_spec(
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
    >>> check_spec("kernel", jax.P(None, "model"), (3, 8), mesh)
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


# -- Arrays on a mesh.


def is_compile_only(mesh: Any) -> bool:
  """Returns whether the devices of a mesh, if any, are for compiling alone."""
  if not isinstance(mesh, jax.sharding.Mesh):
    return False
  client = getattr(mesh.devices.flat[0], "client", None)
  return getattr(client, "runtime_type", None) == "compile_only_runtime"


def check_can_run(where: str, mesh: Any) -> None:
  """Raises a ValueError if a mesh has devices for compiling alone.

  Args:
    where: What needs to run on the devices, for the error message.
    mesh: The mesh.
  """
  if is_compile_only(mesh):
    raise ValueError(
      f"{where}: the mesh has {mesh.size} devices of the kind "
      f"{mesh.devices.flat[0].device_kind!r} that exist for compiling alone; "
      "they run nothing and hold no arrays. Strategy.jit(fn).lower(...) and "
      "jax.jit(fn).lower(...) work, with jax.ShapeDtypeStructs; to run, create "
      "the Strategy from the devices of this machine."
    )


def abstract_array(
  x: Any, sharding: jax.sharding.Sharding | None
) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of an array, with another sharding.

  Args:
    x: An array, a number, or a `jax.ShapeDtypeStruct`.
    sharding: The sharding.
  """
  if not isinstance(x, jax.ShapeDtypeStruct):
    x = jax.typeof(x)
  return jax.ShapeDtypeStruct(
    x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type
  )


def put(
  x: Any, sharding: jax.sharding.NamedSharding, *, compare: bool = True
) -> jax.Array:
  """Puts an array on the mesh, also if it has devices of other processes.

  Args:
    x: An array; all processes give the same values.
    sharding: Where to put it.
    compare: Whether JAX compares the values of all processes, with one exchange
      for each call.
  """
  # In a trace nothing is moved: the program may be for other devices.
  if not isinstance(x, jax.core.Tracer):
    check_can_run("putting an array on the mesh", sharding.mesh)
  is_array = isinstance(x, jax.Array)
  # A traced array does not say whether it is addressable: that comes second.
  if sharding.is_fully_addressable or (is_array and not x.is_fully_addressable):
    return jax.device_put(x, sharding)
  # Onto devices of other processes JAX puts NumPy arrays, but neither committed
  # arrays nor keys.
  if is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    data = put(jax.random.key_data(x), sharding, compare=compare)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  if compare:
    return jax.device_put(np.asarray(x) if is_array else x, sharding)
  values = np.asarray(x)
  return jax.make_array_from_callback(
    values.shape, sharding, lambda index: values[index]
  )


def constrain(x: jax.Array, sharding: jax.sharding.NamedSharding) -> jax.Array:
  """Gives a traced array a sharding, whatever the types of the mesh axes."""
  # With Explicit axes the sharding is a part of the array's type.
  if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
    return jax.sharding.reshard(x, sharding)
  return jax.lax.with_sharding_constraint(x, sharding)
