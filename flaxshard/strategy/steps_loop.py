"""Runs several steps as one loop on the device, for `Strategy.run_steps`."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values

PyTree = Any


def arguments(
  state: PyTree, batches: PyTree
) -> tuple[tuple[PyTree, PyTree], dict[str, Any]]:
  """Returns the arguments of a loop: `(state, batches)`, and none by name.

  Args:
    state: The train state.
    batches: A list of batches, which the loop stacks, or one tree of arrays
      `[steps, ...]`; a `PerReplica` is `[replicas, steps, ...]`.

  Raises:
    ValueError: There are no batches, the leaves have different numbers of
      steps, or a single batch is given, which has its examples where the steps
      should be.
  """
  if isinstance(batches, list) and batches:
    return (state, batches), {}
  counts = set()
  for path, node in jax.tree_util.tree_leaves_with_path(
    batches, is_leaf=values.is_per_replica
  ):
    # In a PerReplica the steps come after the replicas.
    dim = int(values.is_per_replica(node))
    counts |= {np.shape(x)[dim:][:1] for x in jax.tree.leaves(node)}
    sharding = getattr(node, "sharding", None)
    if isinstance(
      sharding, jax.sharding.NamedSharding
    ) and values.has_replica_axis(sharding.spec):
      raise ValueError(
        f"run_steps: batches[{trees.path_string(path)}] of shape {node.shape} "
        "is split over the replicas along its first dimension, which is that "
        "of the steps. Pass a list of batches, [batch], or arrays [steps, "
        "batch, ...] with the sharding PartitionSpec(None, 'replica')."
      )
  if len(counts) != 1 or counts & {(), (0,)}:
    raise ValueError(
      "run_steps: all leaves of batches must have the same number of steps, "
      f"at least one, as their first dimension, got {sorted(counts)}."
    )
  return (state, batches), {}


@dataclasses.dataclass(frozen=True)
class Loop:
  """Makes a loop over batches from a step, for `Strategy.run_steps`.

  It is hashable, so that the compiled loop is found again.

  Attributes:
    reduce: The structure of the reductions.
    ops: Each of them: None, "sum" or "mean".
  """

  reduce: Any
  ops: tuple[str | None, ...]

  @classmethod
  def create(cls, reduce: PyTree) -> Loop:
    """Returns a loop with a reduction of the last step's outputs.

    Raises:
      ValueError: A leaf of `reduce` is no reduction.
    """
    ops, treedef = jax.tree.flatten(reduce, is_leaf=lambda x: x is None)
    for op in ops:
      if op is not None:
        replica_context.check_reduce_op(op, "run_steps: reduce")
    return cls(treedef, tuple(ops))

  def __call__(self, step_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns `loop(state, batches)` over a step."""

    def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
      out = step_fn(state, batch)
      # By type: a state may be a NamedTuple.
      return out if type(out) is tuple and len(out) == 2 else (out, None)

    def loop(state: PyTree, batches: PyTree) -> tuple[PyTree, PyTree]:
      if isinstance(batches, list):
        batches = jax.tree.map(lambda *x: jnp.stack(x), *batches)
      # jax.lax.scan needs an initial carry of the outputs' shapes.
      _, outputs = jax.eval_shape(
        lambda batches: step(state, jax.tree.map(lambda x: x[0], batches)),
        batches,
      )
      # The outputs are carried, not stacked: only those of the last step are
      # returned.
      zeros = jax.tree.map(lambda x: jax.lax.full(x.shape, 0, x.dtype), outputs)
      (state, outputs), _ = jax.lax.scan(
        lambda carry, batch: (step(carry[0], batch), None),
        (state, zeros),
        batches,
      )
      context = replica_context.get_replica_context()
      assert context is not None

      parts = self.reduce.flatten_up_to(outputs)
      reduced = [
        part if op is None else values.Replicated(context.all_reduce(op, part))
        for op, part in zip(self.ops, parts, strict=True)
      ]
      return state, self.reduce.unflatten(reduced)

    return loop
