"""Warnings about a traced step, which JAX would run without a complaint.

Each warning compares two runs of the replication check through the same
program: one as it is, and one under another assumption about its inputs or its
collectives. So a step is only reported if the program proves the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax.extend import core
import jax.numpy as jnp

from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import rows as rows_lib
from flaxshard.strategy import replication
from flaxshard.strategy import replication_check
from flaxshard.strategy.arguments import Layout
from flaxshard.strategy.replication import Replication

_SUMS = frozenset(("psum", "psum_invariant"))
# Their inputs after the first are indices.
_INDEXED = frozenset(("gather", "dynamic_slice"))
# The cause of a difference that only `ReplicaContext.fold_in` makes.
_KEY = "fold_in"


class Gradients(dict[int, Replication]):
  """The `Replication` of the operands of the reductions of `apply_gradients`.

  By equation: one in a loop or in a function that is called twice is met more
  than once, and its entry is the join.
  """

  def observe(self, eqn: Any, given: list[Replication]) -> None:
    """Records an equation; a `replication_check.Rule` that decides nothing."""
    if _is_marked(eqn, replica_context.GRADIENTS):
      found = [given[0], *([self[id(eqn)]] if id(eqn) in self else [])]
      self[id(eqn)] = replication.join(found, len(given[0].classes))


@dataclasses.dataclass(frozen=True)
class TracedStep:
  """A traced program, with what is known of its inputs and outputs.

  Attributes:
    jaxpr: The program.
    layout: The layout of its inputs.
    inputs: The `Replication` of each input.
    in_specs: How each input is split over the replicas.
    leaves: The inputs, with their global shapes.
    unplaced: The indices of the inputs that were not on a mesh when `run` was
      called, so that nobody has said how to split them.
    batch_dim: The dimension of a batch with the examples: 1 in `run_steps`.
    results: The indices of the outputs that are not part of a TrainState.
  """

  jaxpr: Any
  layout: Layout
  inputs: Sequence[Replication]
  in_specs: Sequence[jax.sharding.PartitionSpec]
  leaves: Sequence[Any]
  unplaced: Sequence[int]
  batch_dim: int
  results: Sequence[int]

  @property
  def num_replicas(self) -> int:
    """The number of replicas."""
    return len(self.inputs[0].classes)

  def warnings(self, gradients: Gradients) -> dict[str, str]:
    """Returns the warnings by kind.

    Args:
      gradients: What the replication check met in the program.
    """
    # Other functions may compute the same on all replicas for good reasons.
    if not self.layout.states:
      return {}
    found = {
      "unsplit": self._unsplit_batch(),
      "reduced": self._reduced_by_hand(gradients),
    }
    return {kind: text for kind, text in found.items() if text is not None}

  def _unsplit_batch(self) -> str | None:
    """Returns a warning if all replicas compute the whole batch."""
    batches = [
      i
      for i in self.unplaced
      if not _is_key(self.leaves[i])
      # With fewer examples than replicas it is hardly a batch.
      and self.leaves[i].shape[self.batch_dim :][:1] >= (self.num_replicas,)
    ]
    if not batches or any(map(self._is_split, range(len(self.inputs)))):
      return None
    outputs, gradients = self._propagate(
      [replication.replicated(self.num_replicas)] * len(self.inputs),
      self._name_differences,
    )
    computed = list(gradients.values()) or [outputs[i] for i in self.results]
    # A program that drops other units on each replica still computes the whole
    # batch there. One that uses the number of a replica otherwise may take a
    # part of the batch by itself.
    if not computed or not all(x.causes <= {_KEY} for x in computed):
      return None
    listed = replication_check.abbreviate(
      [
        f"argument {trees.path_string(self.layout.paths[i][1:])} of shape "
        f"{self.leaves[i].shape}"
        for i in batches
      ]
    )
    whole = "strategy.shard_batch(batch, spec=jax.sharding.PartitionSpec())"
    return (
      f"run: no argument is split over the {self.num_replicas} replicas, so "
      f"each of them computes the whole of {listed}. Split a batch with "
      "strategy.shard_batch(batch), or all batches of a dataset with "
      "strategy.distribute_dataset(batches). If every replica is to compute "
      f"all of it, put it on the mesh: {whole}."
    )

  def _reduced_by_hand(self, gradients: Gradients) -> str | None:
    """Returns a warning if gradients are reduced twice."""
    if not gradients or not all(x.is_replicated for x in gradients.values()):
      return None
    # Gradients that a sum over the replicas has made the same, and not only
    # constants or the same data on all replicas.
    _, without_sums = self._propagate(self.inputs, _sums_of_rows_too())
    if all(x.is_replicated for x in without_sums.values()):
      return None
    return (
      "run: the gradients are already reduced over the replicas when "
      "apply_gradients averages them: if they were summed, the step is "
      f"{self.num_replicas} times as long. Leave out the psum, pmean or "
      "all_reduce of the gradients, or call "
      "apply_gradients(..., skip_gradients_aggregation=True)."
    )

  def _name_differences(
    self, eqn: Any, given: list[Replication]
  ) -> list[Replication] | None:
    """The rule that differences have causes, for inputs without any."""
    name = eqn.primitive.name
    if name == "axis_index":
      return [replication.per_replica(self.num_replicas, name)]
    if _is_marked(eqn, replica_context.REPLICA_OF_KEY):
      return [replication.per_replica(self.num_replicas, _KEY)]
    # Random indices take another part of the data on each replica.
    if name in _INDEXED and not all(x.is_replicated for x in given[1:]):
      return [replication.per_replica(self.num_replicas, name)]
    return _sums_keep_differences(eqn, given)

  def _propagate(
    self, inputs: Sequence[Replication], rule: Any
  ) -> tuple[list[Replication], Gradients]:
    gradients = Gradients()

    def observe(eqn: Any, given: list[Replication]) -> Any:
      gradients.observe(eqn, given)
      return rule(eqn, given)

    outputs = replication_check.propagate(
      self.jaxpr, inputs, self.num_replicas, observe
    )
    return outputs, gradients

  def _is_split(self, i: int) -> bool:
    """Returns whether replicas have different data of an input."""
    # What wrappers keep for each replica (AGN's local parameters) is no data,
    # and parameters that are stored split are gathered.
    return mesh_lib.REPLICA in self.in_specs[i] and (
      "wrapper_states" not in trees.path_strings(self.layout.paths[i])
    )


def _is_key(x: Any) -> bool:
  """Returns whether an input is a PRNG key, typed or raw."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return True
  raw = jax.eval_shape(jax.random.PRNGKey, 0)
  return x.dtype == raw.dtype and x.shape[-1:] == raw.shape


def _is_marked(eqn: Any, mark: str) -> bool:
  return eqn.primitive.name == "name" and eqn.params["name"] == mark


def _sums_keep_differences(
  eqn: Any, given: list[Replication]
) -> list[Replication] | None:
  """The rule that a sum over the replicas does not make replicas the same."""
  axes = eqn.params.get("axes")
  if eqn.primitive.name in _SUMS and replication.names_replicas(axes):
    return given
  return None


def _sums_of_rows_too() -> replication_check.Rule:
  """Returns the rule of `_sums_keep_differences`, for sums of rows as well."""
  rows: set[Any] = set()

  def rule(eqn: Any, given: list[Replication]) -> list[Replication] | None:
    if _is_marked(eqn, rows_lib.SUMMED):
      rows.update(eqn.outvars)
    # The rows of a sum are gathered. Other gathers are no sums.
    if eqn.primitive.name == "all_gather" and rows.intersection(
      x for x in eqn.invars if not isinstance(x, core.Literal)
    ):
      return given
    return _sums_keep_differences(eqn, given)

  return rule
