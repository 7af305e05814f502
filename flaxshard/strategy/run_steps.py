"""Runs several steps as one loop on the device, for `Strategy.run_steps`."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import values

PyTree = Any

P = jax.sharding.PartitionSpec


def stack(batches: PyTree) -> PyTree:
  """Returns batches as one tree of arrays `[steps, ...]`.

  Args:
    batches: A list of batches, which may be sharded over replicas, or one tree
      of stacked batches already.

  Returns:
    The stacked batches; a `PerReplica` is `[replicas, steps, ...]`.

  Raises:
    TypeError: A leaf is not an array.
    ValueError: There are no batches, the batches differ in structure, shape or
      dtype, the leaves have different numbers of steps, or a single batch is
      given, which has its examples where the steps should be.
  """
  trees.check_arrays("run_steps: batches", batches)
  if isinstance(batches, list):
    for i, batch in enumerate(batches[1:], 1):
      difference = trees.first_difference(batch, batches[0])
      if difference:
        raise ValueError(
          f"run_steps: batches[{i}] must be like batches[0], but differs at "
          f"{difference}."
        )
    if batches:
      batches = jax.tree.map(_stack, *batches, is_leaf=values.is_per_replica)
  else:
    _refuse_one_batch(batches)
  # In a PerReplica the steps come after the replicas.
  counts = {
    np.shape(leaf)[values.is_per_replica(x) :][:1]
    for x in jax.tree.leaves(batches, is_leaf=values.is_per_replica)
    for leaf in jax.tree.leaves(x)
  }
  if len(counts) != 1 or counts & {(), (0,)}:
    raise ValueError(
      "run_steps: all leaves of batches must have the same number of steps, "
      f"at least one, as their first dimension, got {sorted(counts)}."
    )
  return batches


def _refuse_one_batch(batches: PyTree) -> None:
  """Raises if the first dimension is split over replicas, as of a batch."""
  for path, x in jax.tree_util.tree_leaves_with_path(
    batches, is_leaf=values.is_per_replica
  ):
    sharding = getattr(x, "sharding", None)
    if isinstance(
      sharding, jax.sharding.NamedSharding
    ) and values.has_replica_axis(sharding.spec):
      raise ValueError(
        f"run_steps: batches[{trees.path_string(path)}] of shape {x.shape} is "
        "split over the replicas along its first dimension, which is that of "
        "the steps. Pass a list of batches, [batch], or arrays [steps, batch, "
        "...] with the sharding PartitionSpec(None, 'replica')."
      )


def _stack(*parts: Any) -> Any:
  if values.is_per_replica(parts[0]):
    stack = functools.partial(_stack_arrays, 1)
    return values.PerReplica(jax.tree.map(stack, *(x.value for x in parts)))
  return _stack_arrays(0, *parts)


def _stack_arrays(axis: int, *parts: Any) -> Any:
  first = parts[0]
  if isinstance(first, jax.ShapeDtypeStruct):
    shape = (*first.shape[:axis], len(parts), *first.shape[axis:])
    sharding = first.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
      sharding = _stacked_sharding(sharding, axis)
    return jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding)
  # NumPy batches stay on the host: `run` moves the whole stack at once.
  if not all(isinstance(x, jax.Array) for x in parts):
    return np.stack(parts, axis)
  if isinstance(first.sharding, jax.sharding.NamedSharding):
    return _stacker(first.sharding, axis)(*parts)
  return jnp.stack(parts, axis)


@functools.lru_cache
def _stacker(
  sharding: jax.sharding.NamedSharding, axis: int
) -> Callable[..., jax.Array]:
  stacked = _stacked_sharding(sharding, axis)
  return jax.jit(lambda *xs: jnp.stack(xs, axis), out_shardings=stacked)


def _stacked_sharding(
  sharding: jax.sharding.NamedSharding, axis: int
) -> jax.sharding.NamedSharding:
  # Each device stacks its parts: the new dimension is not split.
  spec = [*sharding.spec, *(None,) * axis]
  return jax.sharding.NamedSharding(
    sharding.mesh, P(*spec[:axis], None, *spec[axis:])
  )


@dataclasses.dataclass(frozen=True)
class Loop:
  """Makes a loop over batches from a step, for `Strategy.run_steps`.

  It is hashable, so that the compiled loop is found again.

  Attributes:
    treedef: The structure of `reduce`.
    ops: The leaves of `reduce`: None, "sum" or "mean".
  """

  treedef: Any
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
      # jax.lax.scan needs an initial carry of the outputs' shapes, and its
      # errors about a changed state would not name the path.
      new, outputs = jax.eval_shape(
        lambda state, batches: step(
          state, jax.tree.map(lambda x: x[0], batches)
        ),
        state,
        batches,
      )
      difference = trees.first_difference(new, state)
      if difference:
        raise ValueError(
          "run_steps: step_fn must return a state like the one it is given, "
          f"but it differs at {difference}."
        )
      # The outputs are carried, not stacked: only those of the last step are
      # returned.
      zeros = jax.tree.map(lambda x: jax.lax.full(x.shape, 0, x.dtype), outputs)
      (state, outputs), _ = jax.lax.scan(
        lambda carry, batch: (step(carry[0], batch), None),
        (state, zeros),
        batches,
      )
      return state, self._reduce(outputs)

    return loop

  def _reduce(self, outputs: PyTree) -> PyTree:
    context = replica_context.get_replica_context()
    assert context is not None
    reduce = jax.tree.unflatten(self.treedef, self.ops)

    def reduce_part(op: str | None, part: PyTree) -> PyTree:
      if op is None:
        return part
      return values.Replicated(context.all_reduce(op, part))

    try:
      return jax.tree.map(
        reduce_part, reduce, outputs, is_leaf=lambda x: x is None
      )
    except ValueError as e:
      raise ValueError(
        f"run_steps: reduce={reduce!r} must be None, 'sum', 'mean', or a tree "
        "of these that matches the outputs, "
        f"{jax.tree.structure(outputs)}."
      ) from e
