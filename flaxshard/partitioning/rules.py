"""Partitioning rules: which mesh axes split the dimensions of each parameter.

The argument `rules` of `create_train_state` is one of:

- None. Each parameter follows its own metadata, and is replicated if it has
  none. Metadata is that of `nn.with_partitioning` (mesh axes), that of
  `nn.with_logical_partitioning` and `nnx.with_partitioning` (logical names), or
  the sharding of an array that is already on the mesh.
- `"fsdp"`, which is the same as `FSDP()`.
- A sequence of these entries:

  - Pairs `(regex, PartitionSpec)`. The first pair whose regex is found
    (`re.search`) in the path of a parameter, such as `block0/mlp_in/kernel`,
    sets its spec. The metadata of the parameter is then ignored.
  - Pairs `(logical name, axes)`, where `axes` is a mesh axis, a tuple of mesh
    axes, or None. They are tried before the rules of the context manager
    `flax.linen.logical_axis_rules`. A logical name that has no rule but equals
    a mesh axis stands for this axis; any other name without a rule is an error.
    With `strict=False` it leaves its dimension unsplit, as in Flax. A rule may
    name what no parameter has, because activations may have it.
  - As the last entry `"fsdp"` or an `FSDP`. It splits one more dimension of
    every large parameter. A regex with the empty `PartitionSpec()` excludes a
    parameter from FSDP.

A rule that cannot be followed or has no effect raises an error before anything
is compiled. The last regex may be a catch-all, found in every path, such as
`(".*", PartitionSpec())`: it may have no parameters left.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
import re
from typing import Any, NamedTuple

from flax import linen as nn
import jax

from flaxshard.core import checks
from flaxshard.core import patterns
from flaxshard.core import registry
from flaxshard.core import trees
from flaxshard.core.patterns import PatternError
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning.mesh import Mesh

PyTree = Any

_ALLOWED = (
  "allowed: a sequence of pairs (regex, PartitionSpec), pairs (logical name, "
  "mesh axis or tuple of axes or None), and last 'fsdp' or an FSDP"
)


@dataclasses.dataclass(frozen=True)
class FSDP:
  """Splits every large parameter over a mesh axis: fully sharded data parallel.

  For each parameter it splits the largest dimension that no other rule splits
  and that the size of the axis divides; of equal dimensions the first one. It
  leaves a parameter as it is if another rule already splits it over the axis.
  `Strategy.describe` marks large parameters that stay whole.

  Source: stage 3 of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054). The
  choice of the dimension and the smallest size follow big_vision's `fsdp`.

  Attributes:
    axis: Name of the mesh axis, or a tuple of several names.
    min_size: Number of elements below which a parameter stays whole.

  Example:
    >>> import flaxshard as fs, jax
    >>> from flaxshard.partitioning import rules
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> kernel = jax.ShapeDtypeStruct((512, 2048), "float32")
    >>> rules.resolve(fs.FSDP(min_size=1024), mesh, {"kernel": kernel})
    {'kernel': P(None, 'replica')}
  """

  axis: str | tuple[str, ...] = "replica"
  min_size: int = 2**14


# A rule is a pair, an FSDP, or "fsdp"; see the docstring of the module.
Rules = Sequence[Any] | FSDP | str | None


def resolve(
  rules: Rules,
  mesh: Mesh,
  params: PyTree,
  *,
  argument: str = "params",
  strict: bool = True,
) -> PyTree:
  """Returns the PartitionSpec of every parameter.

  Args:
    rules: None, `"fsdp"`, an `FSDP`, or a sequence of pairs that may end with
      one of those two; see the docstring of the module.
    mesh: The mesh over which the parameters are split.
    params: A tree of arrays or `jax.ShapeDtypeStruct`s, with or without Flax's
      metadata boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`).
    argument: Name of the tree, for error messages.
    strict: Whether a logical name without a rule is an error. If not, its
      dimension is unsplit.

  Returns:
    A tree of PartitionSpecs with the structure of `params` without boxes. The
    specs have no axes of size 1 and no Nones at the end.

  Raises:
    TypeError: An entry of `rules` has none of the allowed forms.
    PatternError: A rule has an unknown mesh axis, matches no parameter, or
      gives a spec that does not fit the shape. The message begins with the
      number of the rule. A PatternError is a ValueError.
    ValueError: The metadata of a parameter has an unknown name or does not fit
      its shape, or an array is on another mesh.

  Example:
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> params = {
    ...   "mlp_in": {"kernel": jax.ShapeDtypeStruct((128, 512), "float32")},
    ...   "norm": {"scale": jax.ShapeDtypeStruct((128,), "float32")},
    ... }
    >>> resolve((("mlp_in/kernel", jax.P(None, "model")), "fsdp"), mesh, params)
    {'mlp_in': {'kernel': P('replica', 'model')}, 'norm': {'scale': P()}}
  """
  parsed = _parse(rules, "rules", mesh)
  regexes = [pattern for _, pattern, _ in parsed.regexes]
  paths: list[str] = []
  found: list[jax.P] = []
  has_logical_names = False
  for key_path, leaf in jax.tree_util.tree_leaves_with_path(
    params, is_leaf=nn.meta.is_axis_metadata
  ):
    path, shape = trees.path_string(key_path), tuple(unbox(leaf).shape)
    where = f"{argument}[{path}]"
    has_logical_names |= isinstance(leaf, nn.LogicallyPartitioned)
    error: type[ValueError] = ValueError
    i = patterns.first_match(regexes, path)
    if i is None:
      source, spec = _own_spec(where, leaf, parsed.logical, mesh, strict)
    else:
      (source, _, spec), error = parsed.regexes[i], PatternError
    mesh_lib.check_spec(f"{source}: {where}", spec, shape, mesh, error)
    # The spec P() of a regex excludes a parameter from FSDP.
    if parsed.fsdp and (i is None or tuple(spec)):
      spec = _split_further(parsed.fsdp, mesh, shape, spec)
    paths.append(path)
    found.append(mesh_lib.shortest(spec, mesh))
  if regexes and all(re.search(regexes[-1], path) for path in paths):
    regexes.pop()  # a catch-all
  patterns.check_used("rules", regexes, paths)
  if parsed.logical and not has_logical_names:
    raise PatternError(
      f"rules: the pairs {parsed.logical!r} are for logical names, and no leaf "
      f"of {argument} has logical names; {_ALLOWED}."
    )
  if parsed.fsdp:
    axes = mesh_lib.shortest(jax.P(parsed.fsdp.axis), mesh)
    # On a single device there is nothing to split: no mistake in the rules.
    used = mesh_lib.axes_in(axes)
    if used and not any(used & mesh_lib.axes_in(spec) for spec in found):
      raise PatternError(
        f"rules: {parsed.fsdp!r} splits none of {len(found)} parameters: they "
        "are smaller than min_size, or have no unsplit dimension that the axis "
        f"divides, in the mesh {dict(mesh.shape)}; allowed: a smaller "
        "min_size, another axis, or other rules."
      )
  return jax.tree.unflatten(jax.tree.structure(unbox(params)), found)


def from_config(value: Any, *, argument: str = "rules") -> Rules:
  """Converts the plain values of a config to rules.

  Args:
    value: None, `"fsdp"`, a dict `{"name": "fsdp", ...}` with fields of `FSDP`,
      or a sequence of pairs that may end with one of those two. The type of the
      second element decides what a pair is. A tuple is the PartitionSpec of a
      regex, as in `("mlp_in/kernel", (None, "model"))`. A string or None is the
      mesh axis of a logical name, as in `("mlp", "model")`. Lists are read as
      tuples.
    argument: Name of the value, for error messages.

  Returns:
    Rules for `resolve`.

  Raises:
    TypeError: `value` or an entry has none of the allowed forms.
    ValueError: An unknown name or argument, or an invalid regex.

  Example:
    >>> from_config((("mlp_in/kernel", (None, "model")), "fsdp"))
    (('mlp_in/kernel', P(None, 'model')), 'fsdp')
  """

  def convert(name: str, entry: Any) -> Any:
    if registry.is_dict(entry):
      return registry.call(name, entry, {"fsdp": FSDP})
    match entry:
      case (pattern, tuple() as spec):
        return pattern, jax.P(*spec)
    return entry

  if isinstance(value, (tuple, list)):
    entries = enumerate(registry.to_plain(value))
    rules: Rules = tuple(convert(f"{argument}[{i}]", x) for i, x in entries)
  else:
    rules = convert(argument, value)
  # Parse now, so that an error names the field of the config.
  _parse(rules, argument)
  return rules


class _Rules(NamedTuple):
  """Rules by their forms.

  Attributes:
    regexes: The description, the pattern and the spec of each regex.
    logical: Pairs of a logical name and its mesh axes.
    fsdp: The last entry, if it is one.
  """

  regexes: list[tuple[str, str, jax.P]]
  logical: list[tuple[str, Any]]
  fsdp: FSDP | None


def _parse(rules: Rules, argument: str, mesh: Mesh | None = None) -> _Rules:
  """Sorts rules by their forms; without a mesh, axes are not checked."""
  if rules is None or isinstance(rules, (str, FSDP)):
    rules = () if rules is None else (rules,)
  # A PartitionSpec is a sequence too.
  if isinstance(rules, jax.P) or not isinstance(rules, Sequence):
    raise checks.ArgumentTypeError(
      f"{argument}={rules!r} are no rules; {_ALLOWED}."
    )
  regexes: list[tuple[str, str, jax.P]] = []
  logical: list[tuple[str, Any]] = []
  fsdp = None
  for i, rule in enumerate(rules):
    name, where = f"{argument}[{i}]", f"{argument}[{i}]={rule!r}"
    axes: Any = ()
    match rule:
      case FSDP() | "fsdp" if i == len(rules) - 1:
        fsdp = rule if isinstance(rule, FSDP) else FSDP()
        axes = fsdp.axis
      case (str(pattern), jax.P() as spec):
        patterns.check(name, [pattern])
        regexes.append((where, pattern, spec))
      case (str(pattern), axes) if all(
        isinstance(axis, str) for axis in mesh_lib.axes_of(axes)
      ):
        # Flax's logical_to_mesh_axes takes tuples, not lists.
        axes = tuple(axes) if isinstance(axes, list) else axes
        logical.append((pattern, axes))
      case _:
        raise checks.ArgumentTypeError(f"{where} is no rule; {_ALLOWED}.")
    if mesh is not None:
      axes = jax.P(mesh_lib.axes_of(axes))
      mesh_lib.check_spec(where, axes, None, mesh, PatternError)
  return _Rules(regexes, logical, fsdp)


def _split_further(
  fsdp: FSDP, mesh: Mesh, shape: tuple[int, ...], spec: jax.P
) -> jax.P:
  """Returns a spec that splits one more dimension of a large array, if any."""
  dims = list(mesh_lib.dims_of(spec, len(shape)))
  axes = mesh_lib.axes_of(fsdp.axis)
  size = math.prod(mesh.shape[axis] for axis in axes)
  free = [i for i, n in enumerate(shape) if not dims[i] and n % size == 0]
  # A mesh axis can split an array only once.
  is_split = not mesh_lib.axes_in(spec).isdisjoint(axes)
  if not free or is_split or math.prod(shape) < fsdp.min_size:
    return spec
  # Of equal dimensions `max` returns the first.
  dims[max(free, key=lambda i: shape[i])] = axes
  return jax.P(*dims)


# -- What an array says of itself: Flax's metadata, or its sharding.


def unbox(tree: PyTree) -> PyTree:
  """Replaces Flax's metadata boxes in a tree by the arrays in them."""
  # `Partitioned.unbox` would add a sharding constraint to the array.
  return jax.tree.map(
    lambda x: x.value if nn.meta.is_axis_metadata(x) else x,
    tree,
    is_leaf=nn.meta.is_axis_metadata,
  )


def _own_spec(
  where: str, leaf: Any, rules: Sequence[Any], mesh: Mesh, strict: bool
) -> tuple[str, jax.P]:
  """Returns the spec that a leaf's metadata or sharding gives.

  Args:
    where: Name of the leaf, for error messages.
    leaf: An array or a `jax.ShapeDtypeStruct`, or a metadata box of one.
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
  if isinstance(leaf, nn.LogicallyPartitioned):
    source = f"logical names {tuple(leaf.names)!r}"
    # Flax takes the first rule of a name whose axes are still unused.
    rules = (*rules, *(leaf.rules or ()), *nn.get_logical_axis_rules())
    known = {logical for logical, _ in rules}
    # As in NNX, a name without a rule may be that of a mesh axis.
    rules = (*rules, *((a, a) for a in mesh.axis_names if a not in known))
    known |= set(mesh.axis_names)
    for logical in leaf.names if strict else ():
      # Flax would leave the dimension unsplit: a typo would pass.
      if isinstance(logical, str) and logical not in known:
        raise ValueError(
          f"{where} has the {source}, and no rule maps {logical!r} to a mesh "
          f"axis; allowed: {sorted(known)}, or a rule such as ({logical!r}, "
          "None) in `rules` or flax.linen.logical_axis_rules; with "
          "strict=False such a dimension is unsplit."
          f"{checks.did_you_mean(logical, known)}"
        )
    try:
      spec: Any = nn.logical_to_mesh_axes(leaf.names, rules)
    except ValueError as e:
      raise ValueError(f"{where} has the {source}: {e}") from e
    return source, spec
  if nn.meta.is_axis_metadata(leaf):
    return f"metadata {leaf.names!r}", jax.P(*leaf.names)
  # A traced array has no sharding on devices.
  is_traced = isinstance(leaf, jax.core.Tracer)
  sharding = None if is_traced else getattr(leaf, "sharding", None)
  if sharding is None or sharding.is_fully_replicated:
    return "no rule", jax.P()
  if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh == mesh:
    return "its sharding", sharding.spec
  raise ValueError(
    f"{where} is split over another mesh: {sharding}; allowed: an array on one "
    f"device, a replicated one, or a NamedSharding on {mesh}."
  )
