"""Mesh axes that split each dimension of an array.

Rules, Flax's metadata, arrays on a mesh and wrappers say them as a
PartitionSpec, in several forms. `check` reads each of them once, as `Dims`, and
`shortest` writes it in the one form that a state has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import math
from typing import Any

from flax import linen as nn
import jax

from flaxshard.core import checks
from flaxshard.core import trees

PyTree = Any
P = jax.sharding.PartitionSpec
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
# For each dimension of an array, the mesh axes that split it.
Dims = tuple[tuple[str, ...], ...]
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


def entry_of(axes: tuple[str, ...]) -> Any:
  """Returns the entry of a PartitionSpec for mesh axes; undoes `axes_of`."""
  return axes[0] if len(axes) == 1 else axes or None


def axes_in(spec: P) -> set[str]:
  """Returns all mesh axes in a PartitionSpec."""
  return {axis for entry in spec for axis in axes_of(entry)}


def replica_part(spec: P) -> P:
  """Returns what a PartitionSpec says of the replicas.

  Example:
    >>> replica_part(P(("replica", "model"), "model"))
    P('replica', None)
  """
  return P(*(REPLICA if REPLICA in axes_of(entry) else None for entry in spec))


def logical_part(spec: P) -> P:
  """Returns what a PartitionSpec says of the logical axes.

  Example:
    >>> logical_part(P(("replica", "model"), "model"))
    P('model', 'model')
  """
  dims = [[axis for axis in axes_of(e) if axis != REPLICA] for e in spec]
  return P(*(entry_of(tuple(axes)) for axes in dims))


def dims_of(spec: P, ndim: int) -> Dims:
  """Returns the axes that split each dimension of an array of `ndim`.

  Example:
    >>> dims_of(P(None, "model"), 3)
    ((), ('model',), ())
  """
  # A spec may be shorter than the shape: the other dimensions are not split.
  return (*map(axes_of, spec), *((),) * (ndim - len(spec)))


def check(
  what: str,
  spec: Any,
  shape: tuple[int | str, ...],
  mesh: Mesh,
  error: type[ValueError] = ValueError,
) -> Dims:
  """Checks that a PartitionSpec fits a shape and a mesh.

  Args:
    what: Names the array and the source of its spec, for error messages.
    spec: The PartitionSpec.
    shape: The shape of the array. A dimension may have a name for its size; it
      is then not checked whether the axes divide it.
    mesh: The mesh.
    error: The class of the errors.

  Returns:
    The axes that split each dimension: one tuple for each.

  Raises:
    TypeError: `spec` is not a PartitionSpec.
    ValueError: An unknown axis, an axis twice, more entries than dimensions, or
      a dimension that the axes do not divide. The message starts with `what`.

  Example:
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> check("kernel", P(None, "model"), (3, 8), mesh)
    ((), ('model',))
  """
  if not isinstance(spec, P):
    raise TypeError(f"{what}: must be a PartitionSpec, got {spec!r}.")
  sizes, dims = dict(mesh.shape), dims_of(spec, len(shape))
  axes = [axis for dim in dims for axis in dim]
  unknown = [axis for axis in axes if axis not in sizes]
  twice = [axis for axis in axes if axes.count(axis) > 1]
  problem, hint = "", ""
  if len(spec) > len(shape):
    problem = "the spec has more entries than the array has dimensions"
  elif unknown:
    problem = f"the mesh has no axis {unknown[0]!r}"
    hint = checks.did_you_mean(str(unknown[0]), sizes)
  elif twice:
    problem = f"the axis {twice[0]!r} must not be used twice"
  else:
    counts = parts(dims, sizes)
    for i, (size, count) in enumerate(zip(shape, counts, strict=True)):
      if isinstance(size, int) and size % count:
        problem = (
          f"dimension {i}, of size {size}, cannot be divided by {count}, the "
          f"size of {spec[i]!r}"
        )
        break
  if problem:
    raise error(
      f"{what}: {problem}; got {spec} for ndim={len(shape)}, the shape "
      f"{shape}; mesh axes: {sizes}.{hint}"
    )
  return dims


def parts(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
  """Returns the number of parts of each dimension.

  Args:
    dims: For each dimension, the mesh axes that split it.
    sizes: The sizes of the mesh axes.
  """
  return tuple(math.prod(sizes[axis] for axis in axes) for axes in dims)


def spec_of(dims: Sequence[tuple[str, ...]]) -> P:
  """Returns the PartitionSpec without Nones at its end.

  Example:
    >>> spec_of(((), ("model",), ()))
    P(None, 'model')
  """
  entries = [entry_of(axes) for axes in dims]
  while entries and entries[-1] is None:
    entries.pop()
  return P(*entries)


def shortest(dims: Sequence[tuple[str, ...]], mesh: Mesh) -> P:
  """Returns the spec without axes of size 1 and without Nones at its end.

  JAX treats `P("a")`, `P("a", None)` and, if the axis has one device, `P()` as
  three different shardings. XLA may return an output with any of them, and the
  next call would then compile again.

  Args:
    dims: For each dimension, the mesh axes that split it.
    mesh: The mesh.
  """
  return spec_of([tuple(a for a in d if mesh.shape[a] > 1) for d in dims])


# -- What an array says of itself: Flax's metadata, or its sharding.


def unbox(tree: PyTree) -> PyTree:
  """Replaces Flax's metadata boxes in a tree by the arrays in them."""
  # `Partitioned.unbox` would add a sharding constraint to the array.
  return jax.tree.map(
    lambda x: x.value if nn.meta.is_axis_metadata(x) else x,
    tree,
    is_leaf=nn.meta.is_axis_metadata,
  )


def iterate_leaves(tree: PyTree) -> Iterator[tuple[str, Any, Any]]:
  """Yields the path, the array, and the metadata box or None, of each leaf."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=nn.meta.is_axis_metadata
  ):
    box = leaf if nn.meta.is_axis_metadata(leaf) else None
    yield trees.path_string(path), unbox(leaf), box


def spec_of_leaf(
  name: str,
  value: Any,
  box: Any,
  rules: Sequence[Any],
  mesh: Mesh,
  strict: bool = True,
) -> tuple[str, P]:
  """Returns the spec that a leaf's metadata or sharding gives.

  Args:
    name: Name of the leaf, for error messages.
    value: An array or a `jax.ShapeDtypeStruct`.
    box: Its metadata box, or None.
    rules: Pairs of a logical name and its mesh axes. They are tried before
      those of the box and of `flax.linen.logical_axis_rules`.
    mesh: The mesh.
    strict: Whether a logical name without a rule is an error. If not, its
      dimension is unsplit.

  Returns:
    The source of the spec, for error messages, and the spec.

  Raises:
    ValueError: A logical name has no rule, or the array is on another mesh.
  """
  if isinstance(box, nn.LogicallyPartitioned):
    source = f"logical names {tuple(box.names)!r}"
    # Flax takes the first rule of a name whose axes are still unused.
    rules = (*rules, *(box.rules or ()), *nn.get_logical_axis_rules())
    known = {logical for logical, _ in rules}
    # As in NNX, a name without a rule may be that of a mesh axis.
    rules = (*rules, *((a, a) for a in mesh.axis_names if a not in known))
    known |= set(mesh.axis_names)
    for logical in box.names if strict else ():
      # Flax would leave the dimension unsplit: a typo would pass.
      if isinstance(logical, str) and logical not in known:
        raise ValueError(
          f"{name} has the {source}, and no rule maps {logical!r} to a mesh "
          f"axis; allowed: {sorted(known)}, or a rule such as ({logical!r}, "
          "None) in `rules` or flax.linen.logical_axis_rules; with "
          "strict=False such a dimension is unsplit."
          f"{checks.did_you_mean(logical, known)}"
        )
    try:
      spec: Any = nn.logical_to_mesh_axes(box.names, rules)
    except ValueError as e:
      raise ValueError(f"{name} has the {source}: {e}") from e
    return source, spec
  if box is not None:
    return f"metadata {box.names!r}", P(*box.names)
  # A traced array has no sharding on devices.
  is_traced = isinstance(value, jax.core.Tracer)
  sharding = None if is_traced else getattr(value, "sharding", None)
  if sharding is None or sharding.is_fully_replicated:
    return "no rule", P()
  if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh:
    return "its sharding", sharding.spec
  raise ValueError(
    f"{name} is split over another mesh: {sharding}; allowed: an array on one "
    f"device, a replicated one, or a NamedSharding on {mesh}."
  )
