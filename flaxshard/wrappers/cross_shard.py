"""CrossShard: sums or averages gradients over replicas or groups of them."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

from flaxshard.core import checks
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class CrossShard(base.Base):
  """Reduces gradients over the replicas, or within equal groups of them.

  Inside `Strategy.run` one collective reduces the gradients of all parameters.
  It transfers as many bytes as the gradients have; float16 is sent as float32,
  so that no sum overflows on the way. On TPU and GPU the gradients of a model
  that computes in bfloat16 are sent and summed in bfloat16, unless they are
  given as `jax.lax.optimization_barrier(grads)`.

  A step with the `"mean"` of N replicas equals the step of one replica on the
  whole batch. `"sum"` gives N times that gradient. The mean is over the
  replicas of a group.

  Clipping in `tx` means "reduce, then clip". Clipping `grads` before
  `apply_gradients`, or in a wrapper around this one, means "clip per replica,
  then reduce".

  With several groups, the parameters, the optimizer state and the collections
  differ between groups, although their sharding says that they are replicated.
  The training loop evaluates the values of replica 0, and checkpoints save
  them. Nothing may be sharded over `"replica"`. Collections are averaged within
  groups, and so are the `value` and the `grad` that an optimizer uses.

  With `apply_gradients(..., skip_gradients_aggregation=True)` nothing is
  reduced. Outside of `Strategy.run` there is one shard; a warning says so.

  Args:
    reduction: `"mean"` or `"sum"`.
    group_assignment: Groups of replica numbers, such as `((0, 2), (1, 3))`.
      Each replica is in one group, all groups have one size, and their order
      does not matter. None, or one group of all, reduces over all replicas.

  Raises:
    ValueError: `reduction` is neither, or groups are empty, overlap or differ
      in size.
    TypeError: `group_assignment` is not a sequence of sequences of integers.

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
  takes_indexed_slices: ClassVar[bool] = True
  reduces: ClassVar[str] = "self"

  reduction: str = "mean"
  group_assignment: Groups | None = None

  def __post_init__(self) -> None:
    checks.fields(self, checks.one_of, "reduction", allowed=("mean", "sum"))
    if self.group_assignment is not None:
      checks.fields(self, _check_groups, "group_assignment")

  @property
  def groups(self) -> Groups | None:  # type: ignore[override]
    """The groups, if there are several; None if all replicas are one group."""
    groups = self.group_assignment
    return groups if groups and len(groups) > 1 else None

  def check_replicas(self, num_replicas: int) -> None:
    """Checks that the groups contain each of the replicas.

    Args:
      num_replicas: The number of replicas.

    Raises:
      ValueError: The groups are those of another number of replicas.
    """
    groups = self.group_assignment
    if groups is not None and sum(map(len, groups)) != num_replicas:
      raise ValueError(
        f"CrossShard: group_assignment={groups!r} must contain each of the "
        f"{num_replicas} replicas, 0 to {num_replicas - 1}, once."
      )

  def apply(
    self, state: Any, target: base.Target, grads: Any, next: base.Next
  ) -> tuple[base.Target, Any]:
    """Calls `next` with the reduced gradients."""
    context = replica_context.current.get()
    if context is None:
      checks.warn(
        "CrossShard: apply_gradients is called outside of Strategy.run, where "
        "there are no replicas: the gradients are not reduced.",
      )
    if context is None or context.aggregation_skipped:
      return next(target, grads), state
    grads = replica_context.reduce_gradients(self.reduction, grads, self.groups)
    # With several groups the gradients are equal within a group only: inner
    # wrappers must still reduce their finite flag over all replicas.
    with replica_context.marked(gradients_reduced=not self.groups):
      return next(target, grads), state


def _check_groups(argument: str, value: Any) -> Groups:
  """Returns groups as tuples of tuples; raises if they cannot be groups."""
  where = f"{argument}={value!r} must be a sequence of groups"
  try:
    # Takes 0-dimensional arrays too, unlike checks.integer.
    groups = tuple(tuple(map(operator.index, group)) for group in value)
  except TypeError as e:
    raise TypeError(
      f"{where} of replica numbers, such as ((0, 2), (1, 3)), or None."
    ) from e
  numbers = sorted(number for group in groups for number in group)
  is_partition = numbers and numbers == list(range(len(numbers)))
  if not is_partition or len(set(map(len, groups))) != 1:
    raise ValueError(
      f"{where} of one size, which together have each replica from 0 on once."
    )
  return groups
