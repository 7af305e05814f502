"""Mistakes in a step, which JAX would run without a complaint.

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

_WRAPPER_STATES = jax.tree_util.GetAttrKey("wrapper_states")
# The cause of a difference after which no primitive is to blame.
_OWN = "a replica's own data"


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
  num_replicas: int,
  is_stacked: bool,
) -> None:
  """Raises if replicas may differ in a result; warns of other mistakes.

  Args:
    program: The traced function of a replica.
    leaves: What its inputs are.
    results: What its outputs are.
    num_replicas: The number of replicas.
    is_stacked: Whether the second argument has batches of several steps,
      `[steps, ...]`.

  Raises:
    ValueError: A leaf of a TrainState may differ between replicas that must
      share it; the message names its path, the primitives that make it differ,
      and the remedy.
  """
  if num_replicas == 1:
    return
  checker = same_state.SameStateCheck(num_replicas)
  inputs = list(map(checker.fact_of, leaves))
  outputs: list[same_state.Fact] = []
  differing: list[str] = []
  for leaf, x in zip(results, checker.run(program, inputs), strict=True):
    wanted = checker.fact_of(leaf)
    if same_state.join(wanted, x).classes != wanted.classes:
      causes = ", ".join(x.causes) or _OWN
      differing.append(f"{trees.path_string(leaf.path)} ({causes})")
    if leaf.wrappers is None:
      outputs.append(x)
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
  if all(leaf.wrappers is None for leaf in leaves):
    return
  gradients = same_state.join(checker.constant, *checker.gradients)
  computed = checker.gradients or outputs
  # What wrappers keep for each replica (AGN's local parameters) is no data.
  is_split = any(
    leaf.spec != jax.P() and _WRAPPER_STATES not in leaf.path for leaf in leaves
  )
  if computed and not is_split:
    # A program that drops other units on each replica still computes the whole
    # batch there. One that uses the number of a replica otherwise may take a
    # part of the batch by itself.
    if same_state.NUMBER not in same_state.join(*computed).history:
      _warn_of_whole_batch(program, leaves, gradients, num_replicas, is_stacked)
  # A sum over the replicas has made them the same, and not only constants or
  # the same data on all replicas.
  if gradients.is_replicated and same_state.SUMMED in gradients.history:
    checks.warn(
      "run: the gradients are already reduced over the replicas when "
      "apply_gradients averages them: if they were summed, the step is "
      f"{num_replicas} times as long. Leave out the psum, pmean or all_reduce "
      "of the gradients, or call apply_gradients(..., "
      "skip_gradients_aggregation=True)."
    )


def _warn_of_whole_batch(
  program: Any,
  leaves: Sequence[arguments.Leaf],
  gradients: same_state.Fact,
  num_replicas: int,
  is_stacked: bool,
) -> None:
  """Warns if a program, of which nothing is split, seems to have a batch."""
  batches = [
    (leaf, aval)
    for leaf, aval in zip(leaves, program.in_avals, strict=True)
    if leaf.kind == arguments.SPLIT
    and _may_be_batch(aval, num_replicas, int(is_stacked))
  ]
  # Nobody has said how to split what is not on a mesh.
  whole = [
    f"{leaf.argument} of shape {aval.shape}"
    for leaf, aval in batches
    if not leaf.is_placed
  ]
  # Gradients that differ though nothing is split come from random inputs.
  has_inputs = bool(batches) or not gradients.is_replicated
  whole += [
    f"a captured array of shape {x.shape} (pass it as an argument)"
    for x in program.consts
    if _is_captured_batch(x, num_replicas, has_inputs)
  ]
  if whole:
    put = "strategy.shard_batch(batch, spec=jax.sharding.PartitionSpec())"
    checks.warn(
      f"run: no argument is split over the {num_replicas} replicas, so each of "
      f"them computes the whole of {checks.listed(whole)}. Split a batch "
      "with strategy.shard_batch(batch), or all batches of a dataset with "
      "strategy.distribute_dataset(batches). If every replica is to compute "
      f"all of it, put it on the mesh: {put}."
    )


def _is_captured_batch(x: Any, num_replicas: int, has_inputs: bool) -> bool:
  """Returns whether an array that a function captures looks like a batch."""
  sharding = getattr(x, "sharding", None)
  if isinstance(sharding, jax.sharding.NamedSharding):
    # It is gathered, so that each replica has all of it.
    return values.has_replica_axis(sharding.spec)
  # Beside other inputs it may be a table.
  return not has_inputs and x.ndim > 1 and _may_be_batch(x, num_replicas)
