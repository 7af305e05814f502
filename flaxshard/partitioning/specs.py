"""PartitionSpecs: what arrays and Flax's metadata say, and whether they fit."""

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


def axes_of(entry: Any) -> tuple[Any, ...]:
  """Returns the mesh axes in an entry of a PartitionSpec."""
  if entry is None:
    return ()
  return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def axes_in(spec: P) -> set[str]:
  """Returns all mesh axes in a PartitionSpec."""
  return {axis for entry in spec for axis in axes_of(entry)}


def check(what: str, spec: Any, shape: tuple[int, ...], mesh: Mesh) -> Dims:
  """Returns the axes that split each dimension, once `spec` fits `shape`.

  Raises:
    TypeError: `spec` is no PartitionSpec, or an entry is of a wrong type.
    ValueError: An unknown axis, an axis twice, more entries than dimensions, or
      a dimension that the axes do not divide. The message starts with `what`.

  Example:
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> check("kernel", P(None, "model"), (3, 8), mesh)
    ((), ('model',))
  """
  sizes = dict(mesh.shape)
  facts = f"got {spec} for the shape {shape}; mesh axes: {sizes}."
  if not isinstance(spec, P):
    raise TypeError(f"{what}: must be a PartitionSpec, got {spec!r}.")
  if len(spec) > len(shape):
    raise ValueError(
      f"{what}: a spec has no more entries than there are dimensions; {facts}"
    )
  if spec.unreduced or spec.reduced:
    raise ValueError(
      f"{what}: unreduced and reduced axes are not for arrays at rest; {facts}"
    )
  seen: set[str] = set()
  for i, entry in enumerate(spec):
    for axis in axes_of(entry):
      if not isinstance(axis, str):
        raise TypeError(
          f"{what}: entry {i} must be a mesh axis, a tuple of them or None; "
          f"{facts}"
        )
      if axis not in sizes:
        raise ValueError(
          f"{what}: the mesh has no axis {axis!r}; {facts}"
          f"{checks.did_you_mean(axis, sizes)}"
        )
      if axis in seen:
        raise ValueError(
          f"{what}: the axis {axis!r} cannot split twice; {facts}"
        )
      seen.add(axis)
    count = math.prod(sizes[a] for a in axes_of(entry))
    if shape[i] % count:
      raise ValueError(
        f"{what}: dimension {i}, of {shape[i]}, cannot be divided by {count}, "
        f"the size of {entry!r}; {facts}"
      )
  dims = tuple(axes_of(entry) for entry in spec)
  return (*dims, *((),) * (len(shape) - len(dims)))


def shortest(dims: Sequence[tuple[str, ...]], mesh: Mesh) -> P:
  """Returns a spec without axes of size 1 and without Nones at its end.

  JAX holds `P("a")`, `P("a", None)` and, where the axis has one device, `P()`
  for three shardings, and what XLA gives back may be any of them: a step would
  compile again.
  """
  kept = [tuple(a for a in axes if mesh.shape[a] > 1) for axes in dims]
  while kept and not kept[-1]:
    kept.pop()
  return P(*((axes[0] if len(axes) == 1 else axes or None) for axes in kept))


def unbox(tree: PyTree) -> PyTree:
  """Takes Flax's metadata boxes off, without the constraints that they put."""

  def value(leaf: Any) -> Any:
    if isinstance(leaf, nn.Partitioned):
      return unbox(leaf.unbox(apply_constraint=False))
    return unbox(leaf.unbox()) if nn.meta.is_axis_metadata(leaf) else leaf

  return jax.tree.map(value, tree, is_leaf=nn.meta.is_axis_metadata)


def leaves_of(tree: PyTree) -> Iterator[tuple[trees.Path, Any, Any]]:
  """Yields the path, the array and the box, or None, of every leaf."""
  flat = jax.tree_util.tree_leaves_with_path(
    tree, is_leaf=nn.meta.is_axis_metadata
  )
  for path, leaf in flat:
    box = leaf if nn.meta.is_axis_metadata(leaf) else None
    for inner, value in jax.tree_util.tree_leaves_with_path(unbox(leaf)):
      yield (*path, *inner), value, box


def of_leaf(
  where: str, value: Any, box: Any, rules: Sequence[Any], mesh: Mesh
) -> tuple[str, Any]:
  """Returns what a leaf says of itself, after how to call that in errors.

  Args:
    where: How to call the leaf.
    value: An array or a `jax.ShapeDtypeStruct`.
    box: Its metadata, or None.
    rules: Pairs of a logical name and what it stands for; those of the box and
      of `flax.linen.logical_axis_rules` come after them.
    mesh: The mesh.
  """
  if isinstance(box, nn.LogicallyPartitioned):
    rules = (*rules, *(box.rules or ()), *nn.get_logical_axis_rules())
    return f"logical names {box.names!r}", _of_names(where, box, rules, mesh)
  if isinstance(box, nn.Partitioned):
    return f"metadata {box.names!r}", P(*box.names)
  if box is not None:
    raise TypeError(
      f"{where}: cannot read partitioning metadata of type "
      f"{type(box).__name__}; allowed: nn.Partitioned, nn.LogicallyPartitioned."
    )
  # A traced array does not tell where it lies.
  traced = isinstance(value, jax.core.Tracer)
  sharding = None if traced else getattr(value, "sharding", None)
  if sharding is None or sharding.is_fully_replicated:
    return "no rule", P()
  if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh:
    return "its sharding", sharding.spec
  raise ValueError(
    f"{where} is split over another mesh: {sharding}; allowed: an array on one "
    f"device, a replicated one, or a NamedSharding on {mesh}."
  )


def _of_names(
  where: str, box: nn.LogicallyPartitioned, rules: Sequence[Any], mesh: Mesh
) -> P:
  names = tuple(box.names)
  known = {name for name, _ in rules}
  # As in NNX: a name without a rule is that of a mesh axis.
  rules = (*rules, *((a, a) for a in mesh.axis_names if a not in known))
  known |= set(mesh.axis_names)
  for name in names:
    if isinstance(name, str) and name not in known:
      raise ValueError(
        f"{where} has the logical names {names!r}, and no rule says what "
        f"{name!r} stands for; allowed: {sorted(known)}, or a rule such as "
        f"({name!r}, None) in `rules` or flax.linen.logical_axis_rules."
        f"{checks.did_you_mean(name, known)}"
      )
  try:
    return nn.logical_to_mesh_axes(names, rules)  # type: ignore[return-value]
  except ValueError as e:
    raise ValueError(f"{where} has the logical names {names!r}: {e}") from e
