"""Mistakes in arguments and in a step, which JAX would run without a complaint.

A step is only reported if its program proves the mistake: the check of the
traced program says of each value which replicas hold the same one, and marks it
with what it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.replicas import values
from flaxshard.strategy import arguments
from flaxshard.strategy import same_state
from flaxshard.wrappers import stack

_WRAPPER_STATES = jax.tree_util.GetAttrKey("wrapper_states")
# The cause of a difference after which no primitive is to blame.
_OWN = "a replica's own data"


def check_arguments(
  arrays: Sequence[jax.Array],
  leaves: Sequence[arguments.Leaf],
  num_replicas: int,
  is_stacked: bool,
) -> list[str]:
  """Checks the arguments of a program that is about to be traced.

  Args:
    arrays: The leaves of the arguments.
    leaves: What they are.
    num_replicas: The number of replicas.
    is_stacked: Whether the second argument has batches of several steps,
      `[steps, ...]`.

  Returns:
    The arguments that look like batches and are not split over the replicas.

  Raises:
    ValueError: A wrapper does not fit the number of replicas; a leaf is split
      over replicas though the wrappers let replicas differ in it; or one batch
      is given in place of several.
  """
  for wrappers in dict.fromkeys(x.wrappers for x in leaves if x.wrappers):
    stack.check_replicas(wrappers, num_replicas)
  whole = []
  for x, leaf in zip(arrays, leaves, strict=True):
    if leaf.spec != leaf.stored_spec:
      w = leaf.wrappers or ()
      if stack.groups_of(w) or stack.reduces(w) == "local":
        raise ValueError(
          f"run: {leaf.argument} is split over 'replica', "
          f"{leaf.sharding.spec}, though its wrappers let replicas step alone: "
          f"split it over logical axes. {stack.divergence(w) or ''}"
        )
    elif leaf.kind == arguments.SPLIT:
      is_steps = is_stacked and leaf.path[1].idx == 1
      if is_steps and values.has_replica_axis(leaf.spec):
        # Its examples, split over the replicas, would be taken for steps.
        raise ValueError(
          f"run_steps: batches[{trees.path_string(leaf.path[2:])}] of shape "
          f"{x.shape} is split over the replicas along its first dimension, "
          "which is that of the steps. Pass a list of batches, [batch], or "
          "arrays [steps, batch, ...] with the sharding PartitionSpec(None, "
          "'replica')."
        )
      # Nobody has said how to split what is not on a mesh.
      axis = int(is_stacked)
      if not leaf.is_placed and _may_be_batch(x, num_replicas, axis):
        whole.append(f"{leaf.argument} of shape {x.shape}")
  return whole


def _may_be_batch(x: Any, num_replicas: int, axis: int = 0) -> bool:
  """Returns whether an array may be a batch, of examples along an axis."""
  # With fewer examples than replicas it is hardly a batch.
  return x.shape[axis:][:1] >= (num_replicas,) and not _is_key(x)


def _is_key(x: Any) -> bool:
  """Returns whether an input is a PRNG key, typed or raw."""
  if trees.is_prng_key(x):
    return True
  raw = jax.eval_shape(jax.random.PRNGKey, 0)
  return bool(x.dtype == raw.dtype and x.shape[-1:] == raw.shape)


def check_program(
  program: Any,
  leaves: Sequence[arguments.Leaf],
  results: Sequence[arguments.Leaf],
  batches: list[str],
  num_replicas: int,
) -> None:
  """Raises if replicas may differ in a result; warns of other mistakes.

  Args:
    program: The traced function of a replica.
    leaves: What its inputs are.
    results: What its outputs are.
    batches: The arguments that look like batches and are not split.
    num_replicas: The number of replicas.

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
    wrappers: checker.within(stack.groups_of(wrappers or ()))
    for wrappers in {leaf.wrappers for leaf in (*leaves, *results)}
  }
  inputs = [
    same[leaf.wrappers] if leaf.spec == jax.P() else checker.own
    for leaf in leaves
  ]
  found = list(zip(results, checker.run(program, inputs), strict=True))
  differing = [
    f"{trees.path_string(leaf.path)} ({', '.join(x.causes) or _OWN})"
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
    # What wrappers keep for each replica (AGN's local parameters) is no data.
    is_split = any(
      leaf.spec != jax.P() and _WRAPPER_STATES not in leaf.path
      for leaf in leaves
    )
    # A batch, or random inputs of each replica.
    has_inputs = not all(x.is_replicated for x in checker.gradients) or any(
      leaf.kind == arguments.SPLIT and _may_be_batch(aval, num_replicas)
      for leaf, aval in zip(leaves, program.in_avals, strict=True)
    )
    captured = [
      f"a captured array of shape {x.shape} (pass it as an argument)"
      for x in program.consts
      if _is_captured_batch(x, num_replicas, has_inputs)
    ]
    whole = [] if is_split else batches + captured
    _warn(checker.gradients, outputs, whole, num_replicas)


def _is_captured_batch(x: Any, num_replicas: int, has_inputs: bool) -> bool:
  """Returns whether an array that a function captures looks like a batch."""
  sharding = getattr(x, "sharding", None)
  if isinstance(sharding, jax.sharding.NamedSharding):
    # It is gathered, so that each replica has all of it.
    return values.has_replica_axis(sharding.spec)
  # Beside other inputs it may be a table.
  return not has_inputs and x.ndim > 1 and _may_be_batch(x, num_replicas)


def _warn(
  gradients: Sequence[same_state.Fact],
  outputs: Sequence[same_state.Fact],
  whole: list[str],
  num_replicas: int,
) -> None:
  """Warns of a traced step that does too much, or reduces twice.

  Args:
    gradients: The facts of the gradients that `apply_gradients` reduces.
    outputs: The facts of the outputs that are not part of a TrainState.
    whole: The arrays that look like batches, if none is split.
    num_replicas: The number of replicas.
  """
  computed = gradients or outputs
  # A program that drops other units on each replica still computes the whole
  # batch there. One that uses the number of a replica otherwise may take a part
  # of the batch by itself.
  if (
    whole
    and computed
    and not any(same_state.NUMBER in x.history for x in computed)
  ):
    put = "strategy.shard_batch(batch, spec=jax.sharding.PartitionSpec())"
    checks.warn(
      f"run: no argument is split over the {num_replicas} replicas, so each of "
      f"them computes the whole of {checks.listed(whole)}. Split a batch "
      "with strategy.shard_batch(batch), or all batches of a dataset with "
      "strategy.distribute_dataset(batches). If every replica is to compute "
      f"all of it, put it on the mesh: {put}."
    )
  # A sum over the replicas has made them the same, and not only constants or
  # the same data on all replicas.
  if all(x.is_replicated for x in gradients) and any(
    same_state.SUMMED in x.history for x in gradients
  ):
    checks.warn(
      "run: the gradients are already reduced over the replicas when "
      "apply_gradients averages them: if they were summed, the step is "
      f"{num_replicas} times as long. Leave out the psum, pmean or all_reduce "
      "of the gradients, or call apply_gradients(..., "
      "skip_gradients_aggregation=True)."
    )
