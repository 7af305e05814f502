"""Mistakes in a step, which JAX would run without a complaint.

A step is only reported if its program proves the mistake: the check of the
traced program says of each value which replicas hold the same one, and marks it
with what it was computed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.strategy import arguments
from flaxshard.strategy.same_state import NUMBER
from flaxshard.strategy.same_state import Replication
from flaxshard.strategy.same_state import SUMMED

# The cause of a difference after which no primitive is to blame.
_OWN = "a replica's own data"


def check_results(
  results: Iterable[tuple[Any, Replication, Replication]],
) -> None:
  """Raises if replicas may differ in a result that they must share.

  Args:
    results: For each result its path in what `fn` returned, what was found, and
      which replicas must hold the same value.

  Raises:
    ValueError: A result may differ; the message names its path, the primitives
      that make it differ, and the remedy.
  """
  differing = [
    f"{trees.path_string(path)} ({', '.join(sorted(found.causes)) or _OWN})"
    for path, found, wanted in results
    if not found.is_same_within(wanted)
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


def warn(
  gradients: Sequence[Replication],
  outputs: Sequence[Replication],
  batches: list[str],
  num_replicas: int,
) -> None:
  """Warns of a traced step that does too much, or reduces twice.

  Args:
    gradients: The facts of the gradients that `apply_gradients` reduces.
    outputs: The facts of the outputs that are not part of a TrainState.
    batches: What `whole_batches` returns.
    num_replicas: The number of replicas.
  """
  computed = gradients or outputs
  # A program that drops other units on each replica still computes the whole
  # batch there. One that uses the number of a replica otherwise may take a part
  # of the batch by itself.
  if batches and computed and not any(NUMBER in x.marks for x in computed):
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
    SUMMED in x.marks for x in gradients
  ):
    checks.warn(
      "run: the gradients are already reduced over the replicas when "
      "apply_gradients averages them: if they were summed, the step is "
      f"{num_replicas} times as long. Leave out the psum, pmean or all_reduce "
      "of the gradients, or call apply_gradients(..., "
      "skip_gradients_aggregation=True)."
    )


def whole_batches(
  values: Sequence[Any],
  leaves: Sequence[arguments.Leaf],
  shardings: Sequence[jax.sharding.NamedSharding],
  batch_dim: int,
) -> list[str]:
  """Returns the arguments that look like batches, if no argument is split.

  Args:
    values: The leaves of the arguments, as they are passed to `run`.
    leaves: What they are.
    shardings: Their shardings on the mesh.
    batch_dim: The dimension of a batch with the examples: 1 behind the steps.
  """
  found = []
  for x, leaf, sharding in zip(values, leaves, shardings, strict=True):
    path = trees.path_string(leaf.path[1:])
    # What wrappers keep for each replica (AGN's local parameters) is no data,
    # and parameters that are stored split are gathered.
    if (
      leaf.kind != arguments.SHARED
      and mesh_lib.REPLICA in specs_lib.axes_in(sharding.spec)
      and "wrapper_states" not in path
    ):
      return []
    # Nobody has said how to split what is not on a mesh. jax.jit(...).lower
    # takes shapes without a sharding, which says nothing.
    if (
      leaf.kind == arguments.SPLIT
      and isinstance(x, (np.ndarray, jax.Array))
      and not isinstance(
        getattr(x, "sharding", None), jax.sharding.NamedSharding
      )
      and not _is_key(x)
      # With fewer examples than replicas it is hardly a batch.
      and x.shape[batch_dim:][:1] >= (sharding.mesh.shape[mesh_lib.REPLICA],)
    ):
      found.append(f"argument {path} of shape {x.shape}")
  return found


def _is_key(x: Any) -> bool:
  """Returns whether an input is a PRNG key, typed or raw."""
  if trees.is_prng_key(x):
    return True
  raw = jax.eval_shape(jax.random.PRNGKey, 0)
  return bool(x.dtype == raw.dtype and x.shape[-1:] == raw.shape)
