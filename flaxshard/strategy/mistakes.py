"""Mistakes in a step, which JAX would run without a complaint.

A step is only reported if its program proves the mistake: the check of the
traced program says of each value which replicas hold the same one, and marks it
with what it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.strategy import arguments
from flaxshard.strategy import same_state
from flaxshard.wrappers import stack

# The cause of a difference after which no primitive is to blame.
_OWN = "a replica's own data"


def check(
  program: Any,
  num_replicas: int,
  leaves: Sequence[arguments.Leaf],
  is_split: Sequence[bool],
  results: Sequence[arguments.Leaf],
  batches: list[str],
) -> None:
  """Raises if replicas may differ in a result; warns of other mistakes.

  Args:
    program: The traced function of a replica.
    num_replicas: The number of replicas.
    leaves: What its inputs are.
    is_split: Whether each of them is split over the replicas.
    results: What its outputs are.
    batches: The arguments that look like batches, if none is split.

  Raises:
    ValueError: A leaf of a TrainState may differ between replicas that must
      share it; the message names its path, the primitives that make it differ,
      and the remedy.
  """
  if num_replicas == 1:
    return
  checker = same_state.SameStateCheck(num_replicas)
  # All replicas are one group, unless wrappers keep groups of them apart.
  same = {
    wrappers: checker.within(
      stack.groups_of(wrappers or ()) or [range(num_replicas)]
    )
    for wrappers in {leaf.wrappers for leaf in (*leaves, *results)}
  }
  inputs = [
    checker.own if split else same[leaf.wrappers]
    for leaf, split in zip(leaves, is_split, strict=True)
  ]
  found = list(zip(results, checker.run(program, inputs), strict=True))
  differing = [
    f"{trees.path_string(leaf.path)} ({', '.join(sorted(x.causes)) or _OWN})"
    for leaf, x in found
    if leaf.kind == arguments.SHARED
    and not x.is_same_within(same[leaf.wrappers])
  ]
  if differing:
    raise ValueError(
      "run: a TrainState must come back the same from every replica, but these "
      "leaves may differ, because of what is named: "
      f"{checks.listed(differing)}. state.apply_gradients averages gradients "
      "and the collections it is handed; otherwise use "
      "get_replica_context().all_reduce('mean', ...). If "
      "you know that a value is the same on all replicas, bit for bit, mark it "
      "with get_replica_context().assume_replicated(...)."
    )
  # Other functions may compute the same on all replicas for good reasons.
  if any(leaf.wrappers is not None for leaf in leaves):
    outputs = [x for leaf, x in found if leaf.wrappers is None]
    _warn(checker.gradients, outputs, batches, num_replicas)


def _warn(
  gradients: Sequence[same_state.Replication],
  outputs: Sequence[same_state.Replication],
  batches: list[str],
  num_replicas: int,
) -> None:
  """Warns of a traced step that does too much, or reduces twice.

  Args:
    gradients: The facts of the gradients that `apply_gradients` reduces.
    outputs: The facts of the outputs that are not part of a TrainState.
    batches: See `check`.
    num_replicas: The number of replicas.
  """
  computed = gradients or outputs
  # A program that drops other units on each replica still computes the whole
  # batch there. One that uses the number of a replica otherwise may take a part
  # of the batch by itself.
  if (
    batches
    and computed
    and not any(same_state.NUMBER in x.marks for x in computed)
  ):
    whole = "strategy.shard_batch(batch, spec=jax.sharding.PartitionSpec())"
    checks.warn(
      f"run: no argument is split over the {num_replicas} replicas, so each of "
      f"them computes the whole of {checks.listed(batches)}. Split a batch "
      "with strategy.shard_batch(batch), or all batches of a dataset with "
      "strategy.distribute_dataset(batches). If every replica is to compute "
      f"all of it, put it on the mesh: {whole}."
    )
  # A sum over the replicas has made them the same, and not only constants or
  # the same data on all replicas.
  if all(x.is_replicated for x in gradients) and any(
    same_state.SUMMED in x.marks for x in gradients
  ):
    checks.warn(
      "run: the gradients are already reduced over the replicas when "
      "apply_gradients averages them: if they were summed, the step is "
      f"{num_replicas} times as long. Leave out the psum, pmean or all_reduce "
      "of the gradients, or call apply_gradients(..., "
      "skip_gradients_aggregation=True)."
    )
