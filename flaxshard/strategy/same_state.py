"""The check that a traced program gives every replica the same TrainState.

`Strategy.run` returns one TrainState for all replicas, so its leaves must not
differ between them. JAX does not check that: `jax.shard_map` trusts
`out_specs=P()`, and every device keeps its own array. `check_vma=True` would
refuse any loop that carries a constant. This module follows each value through
the jaxpr instead, before anything is compiled.

For each value it computes which replicas are known to hold the same one. An
operation on several values can only tell more replicas apart. Only collectives
make replicas agree, by the documentation of each in `jax.lax`. A primitive that
the check cannot follow tells all replicas apart: unknown is an error, never
accepted.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from flaxshard.core import jaxprs
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import rows

Groups = Sequence[Sequence[int]]

# These combine the values of all replicas, or of the replicas of a group, and
# give each of them the same result. The `_invariant` variants are what JAX
# traces in a nested `jax.shard_map` with `check_vma=True`.
_REDUCTIONS = frozenset(
  "psum pmax pmin all_gather pbroadcast "
  "psum_invariant all_gather_invariant".split()
)
_SUMS = frozenset(("psum", "psum_invariant"))
# The check cannot look into these. They are trusted to return the same results
# for the same inputs, as the documentation of `pure_callback` demands.
_OPAQUE = frozenset(
  "pure_callback ffi_call pallas_call custom_partitioning "
  "call_hi_primitive".split()
)
# The results of these may differ between devices even for the same inputs.
_IMPURE = frozenset(("io_callback", "infeed", "rng_uniform"))
# Their inputs after the first are indices.
_INDEXED = frozenset(("gather", "dynamic_slice"))

# Marks of what a value was computed from, for the warnings of `mistakes`.
SUMMED = "a sum of the replicas' values"
KEY = "a PRNG key of the replica"
NUMBER = "the number of the replica, or a part that it has chosen"

_MAX_LISTED = 8


class Replication(NamedTuple):
  """Which replicas are known to hold the same value.

  Attributes:
    classes: One number for each replica, counted from 0 in order of appearance.
      Replicas with the same number hold the same value.
    causes: Names of the primitives after which the values may differ; empty if
      they are the same, or if only a replica's own data makes them differ.
    marks: What the value was computed from: `SUMMED`, `KEY`, `NUMBER`.
  """

  classes: tuple[int, ...]
  causes: frozenset[str] = frozenset()
  marks: frozenset[str] = frozenset()

  @property
  def is_replicated(self) -> bool:
    """Whether all replicas are known to hold the same value."""
    return not any(self.classes)


class SameStateCheck(jaxprs.Forward[Replication]):
  """Follows which replicas hold the same values through programs.

  Attributes:
    constant: The fact of a value that all replicas share.
    own: The fact of a value that each replica has for itself.
    gradients: The facts of what `apply_gradients` was about to reduce, once for
      each time that the check met it.
  """

  def __init__(self, num_replicas: int):
    self._facts: dict[Replication, Replication] = {}
    self._joined: dict[frozenset[int], Replication] = {}
    self.constant = self.fact([0] * num_replicas)
    self.own = self.fact(range(num_replicas))
    self.gradients: list[Replication] = []

  def fact(
    self,
    values: Iterable[Hashable],
    causes: Iterable[str] = (),
    marks: Iterable[str] = (),
  ) -> Replication:
    """Returns the fact that replicas with equal `values` hold the same value.

    Equal facts are one object, so that the cost of an equation does not depend
    on the number of replicas.
    """
    numbers: dict[Hashable, int] = {}
    classes = tuple(numbers.setdefault(v, len(numbers)) for v in values)
    kept = frozenset(causes if any(classes) else ())
    new = Replication(classes, kept, frozenset(marks))
    return self._facts.setdefault(new, new)

  def within(self, groups: Groups) -> Replication:
    """Returns the fact of a value that the replicas of each group share."""
    first = {i: group[0] for group in groups for i in group}
    return self.fact(first.get(i, i) for i in self.own.classes)

  def join(self, facts: Iterable[Replication]) -> Replication:
    """Returns the fact of a function of several values.

    Replicas hold the same result if they hold the same values of all inputs.
    """
    distinct = {id(x): x for x in facts if x is not self.constant}
    if len(distinct) < 2:
      return next(iter(distinct.values()), self.constant)
    key = frozenset(distinct)
    if key not in self._joined:
      classes, causes, marks = zip(*distinct.values(), strict=True)
      self._joined[key] = self.fact(
        zip(*classes, strict=True),
        frozenset().union(*causes),
        frozenset().union(*marks),
      )
    return self._joined[key]

  def marked(self, x: Replication, mark: str) -> Replication:
    """Returns a fact with a further mark."""
    return self.fact(x.classes, x.causes, x.marks | {mark})

  def rule(
    self, eqn: Any, given: list[Replication]
  ) -> list[Replication] | None:
    """Returns the facts of the outputs of a mark or a collective."""
    # An asynchronous collective is two primitives. The second one, `*_done`, is
    # a function of the result of the first one.
    name, params = eqn.primitive.name.removesuffix("_start"), eqn.params
    if name == "name":
      return [self._named(params["name"], given[0])]
    if name in _INDEXED and any(x.marks & {KEY, NUMBER} for x in given[1:]):
      return [self.marked(self.join(given), NUMBER)]
    over = params.get("axes", params.get("axis_name"))
    if name in ("pvary", "pcast") or not _names_replicas(over):
      return None
    if name == "axis_index":
      return [self.marked(self.own, NUMBER)]
    return [self._collective(name, params, x) for x in given]

  def _named(self, name: str, x: Replication) -> Replication:
    """Returns the fact of a value that has a name in the program."""
    if name == replica_context.ASSUMED_REPLICATED:
      return self.constant
    if name == replica_context.REPLICA_OF_KEY:
      return self.fact(x.classes, x.causes, {KEY})
    # The rows of a sum are gathered. Other gathers are no sums.
    if name == rows.SUMMED and not x.is_replicated:
      return self.marked(x, SUMMED)
    if name == replica_context.GRADIENTS:
      self.gradients.append(x)
    return x

  def _collective(self, name: str, params: Any, x: Replication) -> Replication:
    """Returns the fact of a collective's result for one operand."""
    groups = params.get("axis_index_groups")
    if name in _SUMS and not x.is_replicated:
      x = self.marked(x, SUMMED)
    if name in _REDUCTIONS and not groups:
      return self.fact(self.constant.classes, (), x.marks)
    axes = specs_lib.axes_of(params.get("axes", params.get("axis_name")))
    # The numbers in groups and permutations are those of replicas only if no
    # other axis is flattened with the replica axis.
    if tuple(axes) == (mesh_lib.REPLICA,):
      if name in _REDUCTIONS:
        members = {i: group for group in groups for i in group}
        # Groups whose members hold the same values, in the same order, have
        # the same result. In another order a sum may round differently.
        values = (
          tuple(x.classes[j] for j in members[i]) for i in self.own.classes
        )
        cause = f"{name} over axis_index_groups"
        return self.fact(values, x.causes | {cause}, x.marks)
      if name == "ppermute":
        # A replica to which no other one sends receives zeros.
        source = {to: x.classes[start] for start, to in params["perm"]}
        return self.fact(
          map(source.get, self.own.classes), x.causes | {name}, x.marks
        )
    # all_to_all and reduce_scatter give each replica another part, even of a
    # replicated operand. What a collective without a rule does is not known.
    return self.fact(self.own.classes, x.causes | {name}, x.marks)

  def unfollowed(self, eqn: Any, given: list[Replication]) -> Replication:
    """Returns the output of an equation as a function of all its inputs."""
    name, found = eqn.primitive.name, self.join(given)
    # A collective in the body of a kernel, or one that this check has no rule
    # for, makes the result more than a function of the inputs.
    if name in _IMPURE or _mentions_replicas(eqn):
      return self.fact(self.own.classes, {name}, found.marks)
    if name in _OPAQUE:
      return self.fact(found.classes, found.causes | {name}, found.marks)
    return found

  def check_results(
    self, results: Iterable[tuple[Any, Replication, Replication]]
  ) -> None:
    """Raises if replicas may differ in a result that they must share.

    Args:
      results: For each result its path in what `fn` returned, what was found,
        and which replicas must hold the same value.

    Raises:
      ValueError: A result may differ; the message names its path, the
        primitives that make it differ, and the remedy.
    """
    own_data, unknown = [], []
    for path, found, wanted in results:
      if self.join([found, wanted]).classes == wanted.classes:
        continue
      where = trees.path_string(path)
      if found.causes:
        unknown.append(f"{where} ({', '.join(sorted(found.causes))})")
      else:
        own_data.append(where)
    problems = [
      f"{problem}: {abbreviate(paths)}"
      for problem, paths in (
        ("follow from a replica's own data", own_data),
        ("may differ after these primitives", unknown),
      )
      if paths
    ]
    if problems:
      raise ValueError(
        "run: a TrainState must come back the same from every replica, but "
        f"these leaves {'; these '.join(problems)}. state.apply_gradients "
        "averages gradients and the collections it is handed; otherwise use "
        "get_replica_context().all_reduce('mean', ...). If you know that a "
        "value is the same on all replicas, bit for bit, mark it with "
        "get_replica_context().assume_replicated(...)."
      )


def _names_replicas(axes: Any) -> bool:
  """Returns whether a parameter of an equation is, or has, the replica axis."""
  # By type first: a NumPy array in a tuple would compare element by element.
  return any(
    isinstance(axis, str) and axis == mesh_lib.REPLICA
    for axis in specs_lib.axes_of(axes)
  )


def _mentions_replicas(eqn: Any) -> bool:
  """Returns whether an equation, or a program in it, names the replica axis."""
  params = dict(eqn.params)
  if eqn.primitive.name == "call_hi_primitive":
    # JAX 0.12 keeps the jaxprs of `custom_root` as attributes of an object.
    for value in eqn.params.values():
      params |= vars(value)
  named = (
    _names_replicas(value)
    for key, value in params.items()
    if key != "name" and isinstance(value, (str, tuple))
  )
  return any(named) or any(
    _mentions_replicas(inner)
    for program in core.jaxprs_in_params(params)
    for inner in program.eqns
  )


def abbreviate(items: list[str]) -> str:
  """Returns some of the items as a list."""
  more = ", ..." if len(items) > _MAX_LISTED else ""
  return ", ".join(items[:_MAX_LISTED]) + more
