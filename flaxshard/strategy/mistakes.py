"""Mistakes in a step, which JAX would run without a complaint.

A step is only reported if its program proves the mistake: the replication check
marks each value with what it was computed from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.strategy import arguments
from flaxshard.strategy.same_state import abbreviate
from flaxshard.strategy.same_state import NUMBER
from flaxshard.strategy.same_state import Replication
from flaxshard.strategy.same_state import SUMMED


def find(
  gradients: Sequence[Replication],
  outputs: Sequence[Replication],
  batches: list[str],
  num_replicas: int,
) -> dict[str, str]:
  """Returns the warnings about a traced step, by kind.

  Args:
    gradients: The facts of the gradients that `apply_gradients` reduces.
    outputs: The facts of the outputs that are not part of a TrainState.
    batches: What `whole_batches` returns.
    num_replicas: The number of replicas.
  """
  warnings = {}
  computed = gradients or outputs
  # A program that drops other units on each replica still computes the whole
  # batch there. One that uses the number of a replica otherwise may take a part
  # of the batch by itself.
  if batches and computed and not any(NUMBER in x.marks for x in computed):
    whole = "strategy.shard_batch(batch, spec=jax.sharding.PartitionSpec())"
    warnings["unsplit"] = (
      f"run: no argument is split over the {num_replicas} replicas, so each of "
      f"them computes the whole of {abbreviate(batches)}. Split a batch "
      "with strategy.shard_batch(batch), or all batches of a dataset with "
      "strategy.distribute_dataset(batches). If every replica is to compute "
      f"all of it, put it on the mesh: {whole}."
    )
  # A sum over the replicas has made them the same, and not only constants or
  # the same data on all replicas.
  if all(x.is_replicated for x in gradients) and any(
    SUMMED in x.marks for x in gradients
  ):
    warnings["reduced"] = (
      "run: the gradients are already reduced over the replicas when "
      "apply_gradients averages them: if they were summed, the step is "
      f"{num_replicas} times as long. Leave out the psum, pmean or all_reduce "
      "of the gradients, or call apply_gradients(..., "
      "skip_gradients_aggregation=True)."
    )
  return warnings


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
