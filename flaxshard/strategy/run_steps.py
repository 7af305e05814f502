"""Several steps as one loop on the device: what `Strategy.run_steps` runs."""

from __future__ import annotations

from collections.abc import Callable
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
    batches: A list of batches, which may be sharded over replicas, or such a
      tree already. In a `PerReplica` the steps come after the replicas.

  Raises:
    TypeError: A leaf is not an array.
    ValueError: No batches, or batches or leaves that do not match.
  """
  trees.check_arrays("run_steps: batches", batches)
  if isinstance(batches, list):
    if not batches:
      raise ValueError("run_steps: batches must be at least one, got [].")
    for i, batch in enumerate(batches[1:], 1):
      difference = trees.first_difference(batch, batches[0])
      if difference:
        raise ValueError(
          f"run_steps: batches[{i}] must be like batches[0], but differs at "
          f"{difference}."
        )
    batches = jax.tree.map(_stack, *batches, is_leaf=values.is_per_replica)
  counts = {}
  for path, x in jax.tree_util.tree_leaves_with_path(
    batches, is_leaf=values.is_per_replica
  ):
    axis = 1 if values.is_per_replica(x) else 0
    for inner, leaf in jax.tree_util.tree_leaves_with_path(x):
      where = trees.path_string((*path, *inner))
      counts[where] = np.shape(leaf)[axis : axis + 1]
  if not counts or () in counts.values() or (0,) in counts.values():
    raise ValueError(
      "run_steps: batches must be arrays with at least one step as their first "
      f"dimension, got {counts}."
    )
  if len(set(counts.values())) > 1:
    raise ValueError(
      "run_steps: all leaves of batches must have the same number of steps, "
      f"got { {path: n for path, (n,) in counts.items()} }."
    )
  return batches


def _stack(*parts: Any) -> Any:
  if values.is_per_replica(parts[0]):
    stack = functools.partial(_stack_arrays, 1)
    return values.PerReplica(jax.tree.map(stack, *(x.value for x in parts)))
  return _stack_arrays(0, *parts)


def _stack_arrays(axis: int, *parts: Any) -> Any:
  if not all(isinstance(x, jax.Array) for x in parts):
    return np.stack(parts, axis)
  sharding = parts[0].sharding
  if isinstance(sharding, jax.sharding.NamedSharding):
    return _stacker(sharding, axis)(*parts)
  return jnp.stack(parts, axis)


@functools.lru_cache
def _stacker(
  sharding: jax.sharding.NamedSharding, axis: int
) -> Callable[..., jax.Array]:
  spec = [*sharding.spec, *(None,) * axis]
  stacked = jax.sharding.NamedSharding(
    sharding.mesh, P(*spec[:axis], None, *spec[axis:])
  )
  return jax.jit(lambda *xs: jnp.stack(xs, axis), out_shardings=stacked)


def create(step_fn: Callable[..., PyTree], reduce: PyTree) -> Any:
  """Returns `loop(state, batches)` over a step; see `Strategy.run_steps`."""
  ops, treedef = jax.tree.flatten(reduce, is_leaf=lambda x: x is None)
  for op in ops:
    if op is not None:
      replica_context.check_reduce_op(op, "run_steps: reduce")
  return _create(step_fn, treedef, tuple(ops))


@functools.lru_cache(maxsize=128)
def _create(step_fn: Any, treedef: Any, ops: tuple[str | None, ...]) -> Any:
  def step(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
    out = step_fn(state, batch)
    return out if type(out) is tuple and len(out) == 2 else (out, None)

  def loop(state: PyTree, batches: PyTree) -> tuple[PyTree, PyTree]:
    first = jax.tree.map(lambda x: x[0], batches)
    new, outputs = jax.eval_shape(step, state, first)
    difference = trees.first_difference(new, state)
    if difference:
      raise ValueError(
        "run_steps: step_fn must return a state like the one it is given, but "
        f"it differs at {difference}."
      )
    blank = jax.tree.map(lambda x: jax.lax.full(x.shape, 0, x.dtype), outputs)
    (state, outputs), _ = jax.lax.scan(
      lambda carry, batch: (step(carry[0], batch), None),
      (state, blank),
      batches,
    )
    return state, _reduced(jax.tree.unflatten(treedef, ops), outputs)

  return loop


def _reduced(reduce: PyTree, outputs: PyTree) -> PyTree:
  context = replica_context.get_replica_context()
  assert context is not None

  def one(op: str | None, part: PyTree) -> PyTree:
    if op is None:
      return part
    return values.Replicated(context.all_reduce(op, part))

  try:
    return jax.tree.map(one, reduce, outputs, is_leaf=lambda x: x is None)
  except ValueError as e:
    raise ValueError(
      f"run_steps: reduce={reduce!r} must be None, 'sum', 'mean', or a tree of "
      f"these that matches the outputs, {jax.tree.structure(outputs)}."
    ) from e
