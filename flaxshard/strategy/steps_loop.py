"""Runs several steps as one loop on the device, for `Strategy.run_steps`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values
from flaxshard.strategy.arguments import Leaf
from flaxshard.strategy.arguments import SPLIT

PyTree = Any


def check_stacked(arrays: Sequence[Any], leaves: Sequence[Leaf]) -> None:
  """Raises if one batch is given in place of several.

  Its examples, split over the replicas, would be taken for steps.

  Args:
    arrays: The leaves of the arguments on the mesh, if the batches are one tree
      of arrays `[steps, ...]`.
    leaves: What they are.

  Raises:
    ValueError: The first dimension of a batch is split over the replicas.
  """
  for x, leaf in zip(arrays, leaves, strict=True):
    _, argument, *path = leaf.path
    if (
      argument.idx == 1
      and leaf.kind == SPLIT
      and values.has_replica_axis(x.sharding.spec)
    ):
      raise ValueError(
        f"run_steps: batches[{trees.path_string(tuple(path))}] of shape "
        f"{x.shape} is split over the replicas along its first dimension, "
        "which is that of the steps. Pass a list of batches, [batch], or "
        "arrays [steps, batch, ...] with the sharding PartitionSpec(None, "
        "'replica')."
      )


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
      if isinstance(batches, list) and batches:
        batches = jax.tree.map(lambda *x: jnp.stack(x), *batches)
      steps = {np.shape(x)[:1] for x in jax.tree.leaves(batches)}
      if len(steps) != 1 or steps & {(), (0,)}:
        raise ValueError(
          "run_steps: all leaves of batches must have the same number of "
          "steps, at least one, as their first dimension, got "
          f"{sorted(steps)}."
        )
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
