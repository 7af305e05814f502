"""Which replicas hold the same value, and how collectives change that.

Each rule follows the documentation of the collective in `jax.lax`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib

Groups = Sequence[Sequence[int]]

# These combine the values of all replicas, or of the replicas of a group, and
# give each of them the same result. The `_invariant` variants are what JAX
# traces in a nested `jax.shard_map` with `check_vma=True`.
_REDUCTIONS = frozenset(
  "psum pmax pmin all_gather pbroadcast "
  "psum_invariant all_gather_invariant".split()
)


@dataclasses.dataclass(frozen=True)
class Replication:
  """Which replicas are known to hold the same value.

  Attributes:
    classes: One number for each replica, counted from 0 in order of appearance.
      Replicas with the same number hold the same value.
    causes: Names of the primitives after which the values may differ; empty if
      they are the same, or if only a replica's own data makes them differ.

  Example:
    >>> Replication((0, 0, 1, 1), frozenset({"ppermute"})).is_replicated
    False
  """

  classes: tuple[int, ...]
  causes: frozenset[str] = frozenset()

  @functools.cached_property
  def is_replicated(self) -> bool:
    """Whether all replicas are known to hold the same value."""
    return not any(self.classes)

  def same_within(self, groups: Groups) -> bool:
    """Returns whether the replicas of each group hold the same value."""
    return all(len({self.classes[i] for i in group}) == 1 for group in groups)


def replicated(num_replicas: int) -> Replication:
  """Returns the `Replication` of a value that all replicas share."""
  return Replication((0,) * num_replicas)


def per_replica(num_replicas: int, *causes: str) -> Replication:
  """Returns the `Replication` of a value that each replica has for itself."""
  return Replication(tuple(range(num_replicas)), frozenset(causes))


def by_groups(groups: Groups, num_replicas: int) -> Replication:
  """Returns the `Replication` of a value that the replicas of a group share.

  Args:
    groups: Groups of replicas. A replica without one has its own value.
    num_replicas: The number of replicas.
  """
  group_of = {i: ("group", g) for g, group in enumerate(groups) for i in group}
  return _classify(
    (group_of.get(i, ("replica", i)) for i in range(num_replicas)), frozenset()
  )


def join(given: Iterable[Replication], num_replicas: int) -> Replication:
  """Returns the `Replication` of a function of several values.

  Replicas hold the same result if they hold the same values of all inputs.
  """
  found: Replication | None = None
  for x in given:
    # Most values of a program share one of two objects. The test of identity
    # keeps the cost of an equation independent of the number of replicas.
    if x is found:
      continue
    if found is None or found.is_replicated:
      found = x
    elif not x.is_replicated and x != found:
      pairs = zip(found.classes, x.classes, strict=True)
      found = _classify(pairs, found.causes | x.causes)
  return replicated(num_replicas) if found is None else found


def names_replicas(axes: Any) -> bool:
  """Returns whether a parameter of an equation is, or has, the replica axis."""
  # By type first: a NumPy array in a tuple would compare element by element.
  return any(
    isinstance(axis, str) and axis == mesh_lib.REPLICA
    for axis in specs_lib.axes_of(axes)
  )


def apply_collective(
  name: str, params: Mapping[str, Any], x: Replication
) -> Replication:
  """Returns the `Replication` of a collective's result for one operand.

  Args:
    name: The name of the primitive.
    params: Its parameters, as they are in the jaxpr. They name the replica
      axis, alone or among others.
    x: The `Replication` of the operand.
  """
  num_replicas = len(x.classes)
  groups = params.get("axis_index_groups")
  if name in _REDUCTIONS and not groups:
    return replicated(num_replicas)
  axes = specs_lib.axes_of(params.get("axes", params.get("axis_name")))
  # The numbers in groups and permutations are those of replicas only if no
  # other axis is flattened with the replica axis.
  if tuple(axes) == (mesh_lib.REPLICA,):
    if name in _REDUCTIONS and groups:
      members = {i: group for group in groups for i in group}
      # Groups whose members hold the same values, in the same order, have the
      # same result. In another order a sum may round differently.
      results = (
        tuple(x.classes[j] for j in members[i]) for i in range(num_replicas)
      )
      return _classify(results, x.causes | {f"{name} over axis_index_groups"})
    if name == "ppermute":
      # A replica to which no other one sends receives zeros.
      source = {to: x.classes[start] for start, to in params["perm"]}
      received = (source.get(i) for i in range(num_replicas))
      return _classify(received, x.causes | {name})
  # all_to_all and reduce_scatter give each replica another part, even of a
  # replicated operand. What a collective without a rule does is not known.
  return per_replica(num_replicas, *x.causes, name)


def _classify(
  values: Iterable[Hashable], causes: frozenset[str]
) -> Replication:
  """Returns a `Replication` with a class for each different value."""
  numbers: dict[Hashable, int] = {}
  classes = tuple(numbers.setdefault(v, len(numbers)) for v in values)
  return Replication(classes, causes if any(classes) else frozenset())
