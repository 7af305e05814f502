"""Rules that say how parameters are split over a mesh, and what resolves them.

`rules` is one of

- None: what the parameters say themselves, else replicated. That is Flax's
  metadata, of `nn.with_partitioning` (mesh axes), or of
  `nn.with_logical_partitioning` and `nnx.with_partitioning` (logical names), or
  the sharding of an array that lies on the mesh already.
- `"fsdp"`, the same as `FSDP()`.
- A sequence of
  - pairs `(regex, PartitionSpec)`. The first whose regex is found (`re.search`)
    in a parameter's path, such as `block0/mlp_in/kernel`, gives the spec, in
    place of what the parameter says itself.
  - pairs `(logical name, mesh axis or tuple of axes or None)`, as in
    `flax.linen.logical_axis_rules` and in front of those in force. A name
    without a rule that is a mesh axis stands for that axis; any other is an
    error. Names that no parameter has are passed over: activations have some.
  - last, `"fsdp"` or an `FSDP`, which splits a dimension that the rest leaves
    whole. A regex rule with the empty `PartitionSpec()` keeps a parameter
    whole, from FSDP too.

Nothing is guessed: what cannot be done, or has no effect, is an error before
anything is compiled.
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
from flaxshard.core import registry
from flaxshard.core import trees
from flaxshard.partitioning import specs
from flaxshard.partitioning.specs import Mesh

PyTree = Any
P = jax.sharding.PartitionSpec

_log = logging.getLogger(__name__)

_FORMS = (
  "allowed: a pair (regex, PartitionSpec), a pair (logical name, mesh axis or "
  "tuple of axes or None), and last 'fsdp' or an FSDP"
)


@dataclasses.dataclass(frozen=True)
class FSDP:
  """Splits every large parameter over an axis: fully sharded data parallel.

  Of the dimensions that no other rule splits, the largest that the axis divides
  is split; the first of equals. Parameters that are split over the axis already
  stay as they are. One line in the log says what stays whole.

  Source: stage 3 of ZeRO (Rajbhandari et al., 2020, arXiv:1910.02054); which
  dimension, and a smallest size, as in big_vision's `fsdp`.

  Attributes:
    axis: The mesh axis, or a tuple of several.
    min_size: Parameters with fewer elements stay whole.

  Raises:
    TypeError: A field is of a wrong type.
    ValueError: `min_size` is negative, or `axis` is empty.

  Example:
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> kernel = jax.ShapeDtypeStruct((512, 2048), "float32")
    >>> resolve(FSDP(min_size=1024), mesh, {"kernel": kernel})
    {'kernel': P(None, 'replica')}
  """

  axis: str | tuple[str, ...] = "replica"
  min_size: int = 2**14

  def __post_init__(self) -> None:
    if not isinstance(self.axis, (str, tuple)) or not all(
      isinstance(a, str) for a in specs.axes_of(self.axis)
    ):
      raise TypeError(
        f"FSDP: axis must be a mesh axis or a tuple of them, got {self.axis!r}."
      )
    if not self.axis:
      raise ValueError(f"FSDP: axis must not be empty, got {self.axis!r}.")
    if isinstance(self.min_size, bool) or not isinstance(self.min_size, int):
      raise TypeError(
        f"FSDP: min_size must be a number of elements, got {self.min_size!r}."
      )
    if self.min_size < 0:
      raise ValueError(
        f"FSDP: min_size must be at least 0, got {self.min_size}."
      )


# A rule is a pair, an FSDP or its name; see the docstring of the module.
Rules = Sequence[Any] | FSDP | str | None


def resolve(
  rules: Rules, mesh: Mesh, params: PyTree, *, argument: str = "params"
) -> PyTree:
  """Returns the PartitionSpec of every parameter.

  Args:
    rules: None, `"fsdp"`, an `FSDP`, or a sequence of pairs that may end with
      one of those two; see the docstring of the module.
    mesh: The mesh that is split over.
    params: A tree of arrays or `jax.ShapeDtypeStruct`s, with or without Flax's
      metadata boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`).
    argument: How to call the tree in errors.

  Returns:
    A tree like `params` without boxes. The specs are in their shortest form,
    without axes of size 1 and without Nones at the end.

  Raises:
    TypeError: A rule is of none of the forms.
    ValueError: An unknown mesh axis or logical name, an axis twice in a spec, a
      spec longer than the shape, a dimension that the axes do not divide, a
      rule that applies to nothing, or an array on another mesh. The message
      names the rule, the path, the shape and the axes.

  Example:
    >>> mesh = jax.sharding.AbstractMesh((4, 2), ("replica", "model"))
    >>> params = {
    ...   "mlp_in": {"kernel": jax.ShapeDtypeStruct((128, 512), "float32")},
    ...   "norm": {"scale": jax.ShapeDtypeStruct((128,), "float32")},
    ... }
    >>> resolve((("mlp_in/kernel", P(None, "model")), "fsdp"), mesh, params)
    {'mlp_in': {'kernel': P('replica', 'model')}, 'norm': {'scale': P()}}
  """
  regexes, logical, fsdp = _parse(rules, mesh)
  leaves = []
  applied: set[int] = set()
  shadowed: dict[int, int] = {}  # a rule, and the one that is in front of it
  has_names = False
  for path, value, box in specs.leaves_of(params):
    name = trees.path_string(path)
    where = f"{argument}[{name}]"
    has_names |= isinstance(box, nn.LogicallyPartitioned)
    found = [rule for rule in regexes if rule.regex.search(name)]
    if found:
      first, *later = found
      applied.add(first.position)
      shadowed.update({rule.position: first.position for rule in later})
      source, spec = first.source, first.spec
    else:
      source, spec = specs.of_leaf(where, value, box, logical, mesh)
    shape = tuple(value.shape)
    dims = specs.check(f"{source}: {where}", spec, shape, mesh)
    leaves.append(_Leaf(name, shape, dims, bool(found) and not tuple(spec)))

  for rule in regexes:
    if rule.position not in applied:
      _raise_unused(rule, shadowed, argument, [leaf.path for leaf in leaves])
  if logical and not has_names:
    raise ValueError(
      f"rules: the pairs {logical!r} are about logical names, and no leaf of "
      f"{argument} has any; {_FORMS}."
    )
  if fsdp:
    leaves = _split_largest(fsdp, mesh, leaves)
  return jax.tree.unflatten(
    jax.tree.structure(specs.unbox(params)),
    [specs.shortest(leaf.dims, mesh) for leaf in leaves],
  )


def from_config(value: Any) -> Rules:
  """Returns the rules that a config holds as plain values.

  Args:
    value: None, `"fsdp"`, a dict `{"name": "fsdp", ...}` with fields of `FSDP`,
      or a sequence of pairs that may end with one of those two. The second of a
      pair tells what the pair is: a tuple is the PartitionSpec of a regex rule,
      as in `("mlp_in/kernel", (None, "model"))`; a string or None is what a
      logical name stands for, as in `("mlp", "model")`; a dict is that for
      several axes, as in `("mlp", {"axes": ("m0", "m1")})`. Lists are tuples.

  Returns:
    Rules for `resolve`, which refuses what is none.

  Raises:
    TypeError: `value` is of another type.
    ValueError: An unknown name or argument.

  Example:
    >>> from_config((("mlp_in/kernel", (None, "model")), "fsdp"))
    (('mlp_in/kernel', P(None, 'model')), 'fsdp')
  """
  if value is None or isinstance(value, str):
    return value
  if registry.is_dict(value):
    return registry.call("rules", value, {"fsdp": FSDP})
  if not isinstance(value, (tuple, list)):
    raise TypeError(
      "rules must be None, 'fsdp', a dict with the name 'fsdp', or a sequence "
      f"of pairs, got {value!r}."
    )
  return tuple(
    _entry_from_config(f"rules[{i}]", entry)
    for i, entry in enumerate(registry.plain(value))
  )


class _Regex(NamedTuple):
  position: int
  regex: re.Pattern[str]
  spec: P

  @property
  def source(self) -> str:
    return f"rules[{self.position}]={(self.regex.pattern, self.spec)!r}"


class _Leaf(NamedTuple):
  path: str
  shape: tuple[int, ...]
  dims: specs.Dims
  whole: bool  # because a rule says so


def _parse(
  rules: Rules, mesh: Mesh
) -> tuple[list[_Regex], tuple[tuple[str, Any], ...], FSDP | None]:
  """Returns the regex rules, the logical ones, and the FSDP."""
  if rules is None:
    rules = ()
  elif isinstance(rules, (str, FSDP)):
    rules = (rules,)
  elif isinstance(rules, P) or not isinstance(rules, Sequence):
    raise TypeError(
      f"rules must be None, 'fsdp', an FSDP or a sequence, got {rules!r}; "
      f"{_FORMS}."
    )
  regexes, logical, fsdp = [], [], None
  for i, rule in enumerate(rules):
    where = f"rules[{i}]"
    if isinstance(rule, (str, FSDP)):
      if isinstance(rule, str) and rule != "fsdp":
        raise ValueError(f"{where}: unknown name {rule!r}; {_FORMS}.")
      if i < len(rules) - 1:
        raise ValueError(
          f"{where}={rule!r} must come last, got {rules!r}; {_FORMS}."
        )
      fsdp = FSDP() if isinstance(rule, str) else rule
      _check_axes(f"{where}={fsdp!r}", fsdp.axis, mesh)
      continue
    pair = isinstance(rule, (tuple, list)) and len(rule) == 2
    if not pair or not isinstance(rule[0], str):
      raise TypeError(f"{where} must be a rule, got {rule!r}; {_FORMS}.")
    name, value = rule
    if isinstance(value, P):
      try:
        regexes.append(_Regex(i, re.compile(name), value))
      except re.error as e:
        raise ValueError(f"{where}: {name!r} is no regex: {e}.") from e
    elif all(isinstance(a, str) for a in specs.axes_of(value)):
      _check_axes(f"{where}={rule!r}", value, mesh)
      value = tuple(value) if isinstance(value, list) else value
      logical.append((name, value))
    else:
      raise TypeError(
        f"{where}: the second of a pair must be a PartitionSpec, such as "
        "PartitionSpec(None, 'model'), or what a logical name stands for, got "
        f"{rule!r}; {_FORMS}."
      )
  return regexes, tuple(logical), fsdp


def _check_axes(where: str, axes: Any, mesh: Mesh) -> None:
  for axis in specs.axes_of(axes):
    if axis not in mesh.axis_names:
      raise ValueError(
        f"{where}: the mesh has no axis {axis!r}; mesh axes: "
        f"{dict(mesh.shape)}.{checks.did_you_mean(axis, mesh.axis_names)}"
      )


def _split_largest(fsdp: FSDP, mesh: Mesh, leaves: list[_Leaf]) -> list[_Leaf]:
  axes = specs.axes_of(fsdp.axis)
  count = math.prod(mesh.shape[a] for a in axes)
  split, small, indivisible = [], [], []
  for i, leaf in enumerate(leaves):
    free = [
      d
      for d, size in enumerate(leaf.shape)
      if not leaf.dims[d] and size % count == 0
    ]
    if leaf.whole:
      continue
    elif any(a in axes for dim in leaf.dims for a in dim):
      split.append(leaf.path)
    elif math.prod(leaf.shape) < fsdp.min_size:
      small.append(leaf.path)
    elif not free:
      indivisible.append(leaf.path)
    else:
      split.append(leaf.path)
      largest = max(free, key=lambda d: leaf.shape[d])
      dims = (*leaf.dims[:largest], axes, *leaf.dims[largest + 1 :])
      leaves[i] = leaf._replace(dims=dims)
  if not split and count > 1:
    raise ValueError(
      f"rules: {fsdp!r} splits nothing: {len(small)} of {len(leaves)} "
      f"parameters are smaller than min_size ({_few(small)}), and in "
      f"{len(indivisible)} the axis, of size {count}, divides no dimension "
      f"that is whole ({_few(indivisible)}); allowed: a smaller min_size, "
      "another axis, or other rules."
    )
  _log.info(
    "fsdp: %d of %d parameters are split over %r; %d with fewer than %d "
    "elements are not: %s",
    len(split),
    len(leaves),
    fsdp.axis,
    len(small),
    fsdp.min_size,
    _few(small),
  )
  if indivisible:
    _log.warning(
      "fsdp: %d large parameters are not split, as %r, of size %d, divides no "
      "dimension that is whole: %s",
      len(indivisible),
      fsdp.axis,
      count,
      _few(indivisible),
    )
  return leaves


def _few(paths: Sequence[str]) -> str:
  return ", ".join((*paths[:3], *(["…"] if len(paths) > 3 else []))) or "none"


def _raise_unused(
  rule: _Regex, shadowed: Mapping[int, int], argument: str, paths: list[str]
) -> None:
  if rule.position in shadowed:
    raise ValueError(
      f"{rule.source} applies to nothing: earlier rules, such as "
      f"rules[{shadowed[rule.position]}], match all that it matches."
    )
  raise ValueError(
    f"{rule.source} matches nothing: the paths in {argument} are "
    f"{', '.join(paths[:20])}{', …' if len(paths) > 20 else ''}."
    f"{checks.did_you_mean(rule.regex.pattern, paths)}"
  )


def _entry_from_config(where: str, entry: Any) -> Any:
  if registry.is_dict(entry):
    return registry.call(where, entry, {"fsdp": FSDP})
  if not isinstance(entry, tuple) or len(entry) != 2:
    return entry
  name, value = entry
  if registry.is_dict(value):
    if set(value) != {"axes"}:
      raise ValueError(
        f"{where}: a dict in a pair must have 'axes', the mesh axes that a "
        f"logical name stands for, and nothing else; got {entry!r}."
      )
    return name, value["axes"]
  return name, P(*value) if isinstance(value, tuple) else value
