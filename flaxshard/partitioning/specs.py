"""PartitionSpecs: reads them from Flax's metadata and checks that they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


class RuleError(ValueError):
  """A partitioning rule that cannot be followed.

  The message starts with `rules`, the argument's name in `create_train_state`.
  """


def axes_of(entry: Any) -> tuple[Any, ...]:
  """Returns the mesh axes in one entry of a PartitionSpec.

  Example:
    >>> axes_of(None), axes_of("model"), axes_of(("m0", "m1"))
    ((), ('model',), ('m0', 'm1'))
  """
  if entry is None:
    return ()
  return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def axes_in(spec: P) -> set[str]:
  """Returns all mesh axes in a PartitionSpec."""
  return {axis for entry in spec for axis in axes_of(entry)}


def check(
  what: str, spec: Any, shape: tuple[int | str, ...], mesh: Mesh
) -> Dims:
  """Checks that a PartitionSpec fits a shape and a mesh.

  Args:
    what: Names the array and the source of its spec, for error messages.
    spec: The PartitionSpec.
    shape: The shape of the array. A dimension may have a name for its size; it
      is then not checked whether the axes divide it.
    mesh: The mesh.

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
  sizes = dict(mesh.shape)
  is_known = not shape or any(isinstance(size, int) for size in shape)
  array = f"the shape {shape}" if is_known else f"an array of ndim={len(shape)}"
  context = f"got {spec} for {array}; mesh axes: {sizes}."
  if not isinstance(spec, P):
    raise TypeError(f"{what}: must be a PartitionSpec, got {spec!r}.")
  if len(spec) > len(shape):
    raise ValueError(
      f"{what}: the spec has more entries than the array has dimensions; "
      f"{context}"
    )
  seen: set[str] = set()
  for i, entry in enumerate(spec):
    for axis in axes_of(entry):
      if axis not in sizes:
        raise ValueError(
          f"{what}: the mesh has no axis {axis!r}; {context}"
          f"{checks.did_you_mean(str(axis), sizes)}"
        )
      if axis in seen:
        raise ValueError(
          f"{what}: the axis {axis!r} must not be used twice; {context}"
        )
      seen.add(axis)
    size, count = shape[i], math.prod(sizes[a] for a in axes_of(entry))
    if isinstance(size, int) and size % count:
      raise ValueError(
        f"{what}: dimension {i}, of size {size}, cannot be divided by "
        f"{count}, the size of {entry!r}; {context}"
      )
  dims = tuple(axes_of(entry) for entry in spec)
  # A spec may be shorter than the shape: the other dimensions are not split.
  return (*dims, *((),) * (len(shape) - len(dims)))


def shortest(dims: Sequence[tuple[str, ...]], mesh: Mesh) -> P:
  """Returns the spec without axes of size 1 and without Nones at its end.

  JAX treats `P("a")`, `P("a", None)` and, if the axis has one device, `P()` as
  three different shardings. XLA may return an output with any of them, and the
  next call would then compile again.

  Args:
    dims: For each dimension, the mesh axes that split it.
    mesh: The mesh.
  """
  kept = [tuple(a for a in axes if mesh.shape[a] > 1) for axes in dims]
  while kept and not kept[-1]:
    kept.pop()
  return P(*((axes[0] if len(axes) == 1 else axes or None) for axes in kept))


def unbox(tree: PyTree) -> PyTree:
  """Replaces Flax's metadata boxes in a tree by the arrays in them."""

  def unbox_leaf(leaf: Any) -> Any:
    # `Partitioned.unbox` would add a sharding constraint to the array.
    if isinstance(leaf, nn.Partitioned):
      return unbox(leaf.unbox(apply_constraint=False))
    return unbox(leaf.unbox()) if nn.meta.is_axis_metadata(leaf) else leaf

  return jax.tree.map(unbox_leaf, tree, is_leaf=nn.meta.is_axis_metadata)


def iterate_leaves(tree: PyTree) -> Iterator[tuple[trees.Path, Any, Any]]:
  """Yields the path, the array, and the metadata box or None, of each leaf."""
  flat = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=nn.meta.is_axis_metadata
  )
  for path, leaf in flat:
    box = leaf if nn.meta.is_axis_metadata(leaf) else None
    # A box may hold a tree.
    for inner, value in jax.tree_util.tree_leaves_with_path(unbox(leaf)):
      yield (*path, *inner), value, box


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
    TypeError: The box is of an unknown type.
    ValueError: A logical name has no rule, or the array is on another mesh.
  """
  if isinstance(box, nn.LogicallyPartitioned):
    # Flax takes the first rule of a name whose axes are still unused.
    rules = (*rules, *(box.rules or ()), *nn.get_logical_axis_rules())
    return (
      f"logical names {box.names!r}",
      _spec_of_logical_names(name, box, rules, mesh, strict),
    )
  if isinstance(box, nn.Partitioned):
    return f"metadata {box.names!r}", P(*box.names)
  if box is not None:
    raise TypeError(
      f"{name}: cannot read partitioning metadata of type "
      f"{type(box).__name__}; allowed: nn.Partitioned, nn.LogicallyPartitioned."
    )
  sharding = None
  # A traced array has no sharding on devices.
  if isinstance(value, (jax.Array, jax.ShapeDtypeStruct)) and not isinstance(
    value, jax.core.Tracer
  ):
    sharding = value.sharding
  if sharding is None or sharding.is_fully_replicated:
    return "no rule", P()
  if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh:
    return "its sharding", sharding.spec
  raise ValueError(
    f"{name} is split over another mesh: {sharding}; allowed: an array on one "
    f"device, a replicated one, or a NamedSharding on {mesh}."
  )


def _spec_of_logical_names(
  leaf_name: str,
  box: nn.LogicallyPartitioned,
  rules: Sequence[Any],
  mesh: Mesh,
  strict: bool,
) -> P:
  """Translates the logical names of a box to mesh axes."""
  names = tuple(box.names)
  known = {name for name, _ in rules}
  # As in NNX, a name without a rule may be that of a mesh axis.
  rules = (*rules, *((a, a) for a in mesh.axis_names if a not in known))
  known |= set(mesh.axis_names)
  for name in names if strict else ():
    # Flax would leave the dimension unsplit: a typo would pass.
    if isinstance(name, str) and name not in known:
      raise ValueError(
        f"{leaf_name} has the logical names {names!r}, and no rule maps "
        f"{name!r} to a mesh axis; allowed: {sorted(known)}, or a rule such as "
        f"({name!r}, None) in `rules` or flax.linen.logical_axis_rules; with "
        "strict=False such a dimension is unsplit."
        f"{checks.did_you_mean(name, known)}"
      )
  try:
    return nn.logical_to_mesh_axes(names, rules)  # type: ignore[return-value]
  except ValueError as e:
    raise ValueError(f"{leaf_name} has the logical names {names!r}: {e}") from e
