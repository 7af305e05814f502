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

from collections.abc import Mapping, Sequence
import dataclasses
import logging
import math
import re
from typing import Any, NamedTuple

from flax import linen as nn
import jax

from flaxshard.core import checks
from flaxshard.core import patterns
from flaxshard.core import registry
from flaxshard.core import trees
from flaxshard.partitioning import specs
from flaxshard.partitioning.specs import Mesh
from flaxshard.partitioning.specs import RuleError

PyTree = Any
P = jax.sharding.PartitionSpec

_log = logging.getLogger(__name__)

_ALLOWED = (
  "allowed: a pair (regex, PartitionSpec), a pair (logical name, mesh axis or "
  "tuple of axes or None), and last 'fsdp' or an FSDP"
)


@dataclasses.dataclass(frozen=True)
class FSDP:
  """Splits every large parameter over a mesh axis: fully sharded data parallel.

  For each parameter it splits the largest dimension that no other rule splits
  and that the size of the axis divides; of equal dimensions the first one. It
  leaves a parameter as it is if another rule already splits it over the axis.
  The log names large parameters that stay whole.

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
    RuleError: A rule has an unknown mesh axis, matches no parameter, or gives a
      spec that does not fit the shape. The message names the rule, the path,
      the shape and the mesh axes. A RuleError is a ValueError.
    ValueError: The metadata of a parameter has an unknown name or does not fit
      its shape, or an array is on another mesh.

  Example:
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> params = {
    ...   "mlp_in": {"kernel": jax.ShapeDtypeStruct((128, 512), "float32")},
    ...   "norm": {"scale": jax.ShapeDtypeStruct((128,), "float32")},
    ... }
    >>> resolve((("mlp_in/kernel", P(None, "model")), "fsdp"), mesh, params)
    {'mlp_in': {'kernel': P('replica', 'model')}, 'norm': {'scale': P()}}
  """
  parsed = _parse(rules, "rules")
  _check_mesh_axes(parsed, mesh)
  leaves: list[_Leaf] = []
  used: set[int] = set()
  # Position of a rule -> position of the earlier rule that took its parameter.
  shadowed: dict[int, int] = {}
  has_logical_names = False
  for path, value, box in specs.iterate_leaves(params):
    name = trees.path_string(path)
    shape = tuple(value.shape)
    leaf_name = f"{argument}[{name}]"
    has_logical_names |= isinstance(box, nn.LogicallyPartitioned)
    matching = [rule for rule in parsed.regexes if rule.regex.search(name)]
    if matching:
      first, *later = matching
      used.add(first.position)
      shadowed.update({rule.position: first.position for rule in later})
      try:
        dims = specs.check(
          f"{first.description}: {leaf_name}", first.spec, shape, mesh
        )
      except ValueError as e:
        raise RuleError(str(e)) from e
    else:
      source, spec = specs.spec_of_leaf(
        leaf_name, value, box, parsed.logical, mesh, strict
      )
      dims = specs.check(f"{source}: {leaf_name}", spec, shape, mesh)
    # The spec P() of a regex excludes a parameter from FSDP.
    keep_whole = bool(matching) and not tuple(matching[0].spec)
    leaves.append(_Leaf(name, shape, dims, keep_whole))

  for rule in parsed.regexes:
    is_catch_all = rule is parsed.regexes[-1] and all(
      rule.regex.search(leaf.path) for leaf in leaves
    )
    if rule.position not in used and not is_catch_all:
      _raise_unused(rule, shadowed, argument, [leaf.path for leaf in leaves])
  if parsed.logical and not has_logical_names:
    raise RuleError(
      f"rules: the pairs {parsed.logical!r} are for logical names, and no leaf "
      f"of {argument} has logical names; {_ALLOWED}."
    )
  if parsed.fsdp:
    leaves = _split_leaves(parsed.fsdp, mesh, leaves)
  return jax.tree.unflatten(
    jax.tree.structure(specs.unbox(params)),
    [specs.shortest(leaf.dims, mesh) for leaf in leaves],
  )


def from_config(value: Any, *, argument: str = "rules") -> Rules:
  """Converts the plain values of a config to rules.

  Args:
    value: None, `"fsdp"`, a dict `{"name": "fsdp", ...}` with fields of `FSDP`,
      or a sequence of pairs that may end with one of those two. The type of the
      second element decides what a pair is. A tuple is the PartitionSpec of a
      regex, as in `("mlp_in/kernel", (None, "model"))`. A string or None is the
      mesh axis of a logical name, as in `("mlp", "model")`. A dict gives a
      logical name several axes, as in `("mlp", {"axes": ("m0", "m1")})`. Lists
      are read as tuples.
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
  rules: Rules
  if registry.is_dict(value):
    rules = registry.call(argument, value, {"fsdp": FSDP})
  elif isinstance(value, (tuple, list)):
    rules = tuple(
      _entry_from_config(f"{argument}[{i}]", entry)
      for i, entry in enumerate(registry.to_plain(value))
    )
  elif value is None or isinstance(value, str):
    rules = value
  else:
    raise TypeError(
      f"{argument} must be None, 'fsdp', a dict with the name 'fsdp', or a "
      f"sequence of pairs, got {value!r}."
    )
  # Parse now, so that an error names the field of the config.
  _parse(rules, argument)
  return rules


class _RegexRule(NamedTuple):
  position: int
  regex: re.Pattern[str]
  spec: P

  @property
  def description(self) -> str:
    return f"rules[{self.position}]={(self.regex.pattern, self.spec)!r}"


class _ParsedRules(NamedTuple):
  regexes: list[_RegexRule]
  logical: tuple[tuple[str, Any], ...]
  fsdp: FSDP | None
  # The mesh axes of the logical rules and of FSDP, with the rule's description.
  axes: list[tuple[str, Any]]


def _parse(rules: Rules, argument: str) -> _ParsedRules:
  """Sorts the rules by their forms; needs no mesh and no parameters."""
  if rules is None:
    rules = ()
  elif isinstance(rules, (str, FSDP)):
    rules = (rules,)
  # A PartitionSpec is a sequence too.
  elif isinstance(rules, P) or not isinstance(rules, Sequence):
    raise TypeError(
      f"{argument} must be None, 'fsdp', an FSDP or a sequence, got {rules!r}; "
      f"{_ALLOWED}."
    )
  parsed = _ParsedRules([], (), None, [])
  for i, rule in enumerate(rules):
    name = f"{argument}[{i}]"
    if isinstance(rule, (str, FSDP)):
      if isinstance(rule, str) and rule != "fsdp":
        hint = checks.did_you_mean(rule, ["fsdp"])
        if not hint and len(rules) == 2:
          # ("kernel", P()) is two rules, (("kernel", P()),) is one.
          hint = f" A single pair needs a comma: ({tuple(rules)!r},)."
        raise RuleError(f"{name}: unknown name {rule!r}; {_ALLOWED}.{hint}")
      if i < len(rules) - 1:
        raise RuleError(
          f"{name}={rule!r} must be the last entry, got {rules!r}; {_ALLOWED}."
        )
      fsdp = FSDP() if isinstance(rule, str) else rule
      parsed.axes.append((f"{name}={fsdp!r}", fsdp.axis))
      parsed = parsed._replace(fsdp=fsdp)
      continue
    is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2
    if not is_pair or not isinstance(rule[0], str):
      raise TypeError(f"{name} must be a rule, got {rule!r}; {_ALLOWED}.")
    pattern, value = rule
    entries = tuple(value) if isinstance(value, P) else (value,)
    axes = [axis for entry in entries for axis in specs.axes_of(entry)]
    if not all(isinstance(axis, str) for axis in axes):
      raise TypeError(
        f"{name}: the second of a pair must be a PartitionSpec, such as "
        "PartitionSpec(None, 'model'), or the mesh axes of a logical name, got "
        f"{rule!r}; {_ALLOWED}."
      )
    if isinstance(value, P):
      try:
        parsed.regexes.append(_RegexRule(i, re.compile(pattern), value))
      except re.error as e:
        raise RuleError(f"{name}: {pattern!r} is not a regex: {e}.") from e
    else:
      parsed.axes.append((f"{name}={rule!r}", value))
      # Flax's logical_to_mesh_axes takes tuples, not lists.
      pair = (pattern, tuple(value) if isinstance(value, list) else value)
      parsed = parsed._replace(logical=(*parsed.logical, pair))
  return parsed


def _check_mesh_axes(parsed: _ParsedRules, mesh: Mesh) -> None:
  for description, axes in parsed.axes:
    for axis in specs.axes_of(axes):
      if axis not in mesh.axis_names:
        raise RuleError(
          f"{description}: the mesh has no axis {axis!r}; mesh axes: "
          f"{dict(mesh.shape)}.{checks.did_you_mean(axis, mesh.axis_names)}"
        )


def _raise_unused(
  rule: _RegexRule, shadowed: Mapping[int, int], argument: str, paths: list[str]
) -> None:
  if rule.position in shadowed:
    raise RuleError(
      f"{rule.description} is never used: earlier rules, such as "
      f"rules[{shadowed[rule.position]}], match all its parameters."
    )
  message = patterns.describe_no_match(
    rule.description, rule.regex.pattern, argument, paths
  )
  raise RuleError(message)


def _entry_from_config(name: str, entry: Any) -> Any:
  """Converts one entry of a config's rules; `_parse` refuses unknown forms."""
  if registry.is_dict(entry):
    return registry.call(name, entry, {"fsdp": FSDP})
  if not isinstance(entry, tuple) or len(entry) != 2:
    return entry
  pattern, value = entry
  if registry.is_dict(value):
    if set(value) != {"axes"}:
      raise ValueError(
        f"{name}: a dict in a pair must have the key 'axes', the mesh axes of "
        f"a logical name, and no other key; got {entry!r}."
      )
    return pattern, value["axes"]
  return pattern, P(*value) if isinstance(value, tuple) else value


class _Leaf(NamedTuple):
  """A parameter and the axes that split it.

  Attributes:
    path: The path of the parameter, such as `block0/mlp_in/kernel`.
    shape: Its shape.
    dims: For each dimension, the mesh axes that split it.
    keep_whole: Whether a rule excludes the parameter from FSDP.
  """

  path: str
  shape: tuple[int, ...]
  dims: specs.Dims
  keep_whole: bool


def _split_leaves(
  fsdp: FSDP, mesh: Mesh, leaves: Sequence[_Leaf]
) -> list[_Leaf]:
  """Splits one more dimension of each large leaf over the axis of `fsdp`.

  Args:
    fsdp: The rule.
    mesh: The mesh; it has the axes of `fsdp`.
    leaves: The parameters as the other rules split them.

  Returns:
    The leaves with their new `dims`.

  Raises:
    RuleError: No leaf is split, although the axis has more than one device.
  """
  axes = specs.axes_of(fsdp.axis)
  axis_size = math.prod(mesh.shape[axis] for axis in axes)
  new_leaves = list(leaves)
  is_split = axis_size == 1  # as on a single device: no mistake in the rules
  indivisible = []
  for i, leaf in enumerate(leaves):
    if leaf.keep_whole:
      continue
    free_dims = [
      dim
      for dim, size in enumerate(leaf.shape)
      if not leaf.dims[dim] and size % axis_size == 0
    ]
    # A mesh axis can split an array only once.
    if any(axis in axes for dim in leaf.dims for axis in dim):
      is_split = True
    elif math.prod(leaf.shape) >= fsdp.min_size and not free_dims:
      indivisible.append(leaf.path)
    elif math.prod(leaf.shape) >= fsdp.min_size:
      is_split = True
      # Of equal dimensions `max` returns the first.
      largest = max(free_dims, key=lambda dim: leaf.shape[dim])
      dims = (*leaf.dims[:largest], axes, *leaf.dims[largest + 1 :])
      new_leaves[i] = leaf._replace(dims=dims)
  whole = ", ".join([*indivisible[:3], *["…"] * (len(indivisible) > 3)])
  if not is_split:
    raise specs.RuleError(
      f"rules: {fsdp!r} splits no parameter: of {len(leaves)} parameters all "
      "but the following are smaller than min_size, and these have no unsplit "
      f"dimension that the axis, of size {axis_size}, divides: "
      f"{whole or 'none'}; allowed: a smaller min_size, another axis, or other "
      "rules."
    )
  # A large parameter that stays whole takes its memory on every device.
  if indivisible:
    _log.warning(
      "FSDP: %d large parameters are not split, because %r, of size %d, "
      "divides no dimension that is still unsplit: %s",
      len(indivisible),
      fsdp.axis,
      axis_size,
      whole,
    )
  return new_leaves
