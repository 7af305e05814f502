"""CrossShard: gradients summed or averaged over replicas, or groups of them."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import operator
from typing import Any, ClassVar
import warnings

import jax

from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base

Groups = tuple[tuple[int, ...], ...]

# More groups than that are counted, not listed.
_MAX_LISTED = 8


@dataclasses.dataclass(frozen=True)
class CrossShard(base.Base):
  """Reduces gradients over the replicas, or within equal groups of them.

  Inside `Strategy.run` the gradients of all parameters are reduced in one
  collective, of as many bytes as they have. `"mean"` over N replicas is a step
  of one replica on the whole batch, at the same learning rate; `"sum"` is N
  times its gradient. The mean is over the replicas of a group.

  Clipping in `tx` is "reduce, then clip". Clipping `grads` before
  `apply_gradients`, or in a wrapper outside of this one, is "clip per replica,
  then reduce".

  With several groups, parameters, optimizer state and collections differ
  between groups, though their sharding calls them replicated.
  `divergence.of_first_replica(state)` gives all devices what replica 0 has;
  the training loop evaluates that, and checkpoints hold it. Nothing may be
  split over `"replica"` then. Collections are averaged within groups.

  Other notes: gradients that `skip_gradients_aggregation=True` says are the
  same everywhere are not reduced. Outside of `Strategy.run` there is a warning
  and one shard.

  Args:
    reduction: `"mean"` or `"sum"`.
    group_assignment: Groups of replica numbers, such as `((0, 2), (1, 3))`:
      each replica in one group, all of one size, in any order. Lists will do.
      None, and one group of all, reduce over all replicas.

  Raises:
    ValueError: Another reduction; groups that are empty, overlap or differ in
      size. In `check_replicas`: groups that are not those of all replicas.
    TypeError: `group_assignment` is no sequence of sequences of integers.

  Example:
    >>> import flaxshard as fs, numpy as np, optax
    >>> strategy = fs.Strategy()
    >>> n = strategy.num_replicas_in_sync
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": np.float32(0)}, tx=optax.sgd(1.0),
    ...     wrappers=[fs.CrossShard("sum")], strategy=strategy)
    >>> step = lambda state, x: state.minimize(lambda p: p["w"] * x.mean())[0]
    >>> x = strategy.shard_batch(np.arange(2.0 * n))
    >>> state = strategy.run(step, args=(state, x))
    >>> float(state.params["w"]) == -sum(2 * i + 0.5 for i in range(n))
    True

  References:
    `tf.tpu.CrossShardOptimizer`.
  """

  name: ClassVar[str] = "cross_shard"
  reduces_gradients: ClassVar[bool] = True

  reduction: str = "mean"
  group_assignment: Groups | None = None

  def __post_init__(self) -> None:
    replica_context.check_reduce_op(self.reduction, "CrossShard: reduction")
    if self.group_assignment is not None:
      groups = _normalized(self.group_assignment)
      object.__setattr__(self, "group_assignment", groups)

  @property
  def groups(self) -> Groups | None:
    """The groups, if there are several; None: all replicas are one."""
    groups = self.group_assignment
    return groups if groups and len(groups) > 1 else None

  def check_replicas(self, num_replicas: int) -> None:
    """Raises unless the groups are those of all replicas.

    Args:
      num_replicas: How many replicas there are.

    Raises:
      ValueError: A replica is in no group, or a number is no replica's.
    """
    groups = self.group_assignment
    if groups is None:
      return
    named = {i for group in groups for i in group}
    missing = sorted(set(range(num_replicas)) - named)
    unknown = sorted(named - set(range(num_replicas)))
    problems = []
    if missing:
      problems.append(f"{_listed(missing)} in no group")
    if unknown:
      problems.append(f"{_listed(unknown)} no replica")
    if problems:
      raise ValueError(
        f"CrossShard: group_assignment={groups!r} must have each of the "
        f"{num_replicas} replicas, 0 to {num_replicas - 1}, in one group; "
        f"{', '.join(problems)}."
      )

  def divergence(self) -> str | None:
    """Returns what to tell of replicas that differ, or None."""
    groups = self.groups
    if groups is None:
      return None
    if len(groups) > _MAX_LISTED:
      which = f"{len(groups)} groups of {len(groups[0])}"
    else:
      which = f"groups {', '.join(map(_listed, groups))}"
    first = next(group for group in groups if 0 in group)
    return (
      f"CrossShard: the replicas are reduced in {which}, and each group has "
      "parameters of its own. Evaluated and saved are those of the group of "
      f"replica 0, {_listed(first)}."
    )

  def replica_groups(self) -> Groups | None:
    """Returns the groups, if there are several."""
    return self.groups

  def apply(
    self, state: Any, target: base.Target, grads: Any, next: base.Next
  ) -> tuple[base.Target, Any]:
    """Calls `next` on the reduced gradients."""
    context = replica_context.get_replica_context()
    if context is None:
      warnings.warn(
        "CrossShard: apply_gradients is called outside of Strategy.run, where "
        "there are no replicas: the gradients are taken for those of one "
        "shard, and not reduced.",
        UserWarning,
        stacklevel=2,
      )
      return next(target, grads), state
    self.check_replicas(context.num_replicas_in_sync)
    if context.aggregation_skipped:
      return next(target, grads), state
    grads = replica_context.reduce_gradients(self.reduction, grads, self.groups)
    if self.groups:
      return next(target, grads), state
    with replica_context.gradients_already_reduced():
      return next(target, grads), state

  def reduce_collection(self, x: jax.Array) -> jax.Array:
    """Returns the mean of an array of a collection, within the groups."""
    self.check_replicas(replica_context.num_replicas())
    return replica_context.mean_collection(x, self.groups)


def _normalized(value: Any) -> Groups:
  """Returns groups as tuples, if they can be groups of any replicas."""
  where = f"CrossShard: group_assignment={value!r}"
  wrong_type = TypeError(
    f"{where} must be a sequence of groups of replica numbers, such as "
    "((0, 2), (1, 3)), or None."
  )
  if not _is_sequence(value) or not all(map(_is_sequence, value)):
    raise wrong_type
  try:
    groups = tuple(tuple(map(_replica_number, group)) for group in value)
  except TypeError as e:
    raise wrong_type from e
  if not groups or not all(groups):
    raise ValueError(f"{where} must have no empty group, and at least one.")
  owner: dict[int, int] = {}
  for i, group in enumerate(groups):
    for number in group:
      if number < 0:
        raise ValueError(f"{where}: {number} is no replica: below 0.")
      if number in owner:
        other = groups[owner[number]]
        both = (
          f"twice in {_listed(group)}"
          if owner[number] == i
          else f"in {_listed(other)} and in {_listed(group)}"
        )
        raise ValueError(
          f"{where} must have each replica once; {number} is {both}."
        )
      owner[number] = i
  sizes = [len(group) for group in groups]
  if len(set(sizes)) > 1:
    raise ValueError(
      f"{where} must have groups of one size; the sizes are {sizes}."
    )
  return groups


def _is_sequence(value: Any) -> bool:
  is_array = getattr(value, "ndim", 0) > 0
  return is_array or (
    isinstance(value, Sequence) and not isinstance(value, (str, bytes))
  )


def _replica_number(value: Any) -> int:
  if isinstance(value, bool):
    raise TypeError("a bool is no replica")
  return operator.index(value)


def _listed(numbers: Sequence[int]) -> str:
  return f"({', '.join(map(str, numbers))})"
