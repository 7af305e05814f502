"""Finds what devices hold, compute or exchange because a sharding is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
import dataclasses
import math
import re
from typing import Any

import jax

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.partitioning import rules as rules_lib
from flaxshard.plans import findings
from flaxshard.plans.findings import Finding
from flaxshard.plans.step import Leaf
from flaxshard.plans.step import Step

_MOVING = ("all-gather", "all-to-all", "collective-permute")
_REDUCING = ("all-reduce", "reduce-scatter")


def find(step: Step, rules: rules_lib.Rules) -> Iterator[Finding]:
  """Yields the findings of a step's shardings; see `fs.check`."""
  yield from _replicated_parameters(step, rules)
  yield from _replicated_slots(step)
  yield from _batch_on_every_device(step)
  yield from _moved_examples(step)
  yield from _float32_gradients(step)


def _parameters(step: Step) -> list[Leaf]:
  """Returns the leaves of the state that are those of `step.params`."""
  if step.params is step.state:
    return step.state_leaves
  return [x for x in step.state_leaves if x.path.startswith("params/")]


def _replicated_parameters(
  step: Step, rules: rules_lib.Rules
) -> Iterator[Finding]:
  """Finds parameters that are whole against their rule, or unlike others."""
  mesh, params = step.mesh, _parameters(step)
  if mesh is None:
    return
  if rules is not None:
    specs = jax.tree.leaves(
      rules_lib.resolve(rules, mesh, step.params),
      is_leaf=lambda x: isinstance(x, jax.P),
    )
    sharded = lambda spec: jax.sharding.NamedSharding(mesh, spec)
    found = [
      x
      for x, spec in zip(params, specs, strict=True)
      if x.nbytes > dataclasses.replace(x, sharding=sharded(spec)).nbytes
    ]
    message = (
      "not split as the rules say. Create the state with these rules: "
      "create_train_state(..., strategy=, rules=)."
    )
  else:
    # Layers are numbered. If most of them are split, all should be.
    alike = lambda x: (re.sub(r"\d+", "#", x.path), x.shape)
    is_whole = lambda x: x.local_shape == x.shape
    layers: Counter[Any] = Counter()
    for x in params:
      layers[alike(x)] += -1 if is_whole(x) else 1
    found = [x for x in params if is_whole(x) and layers[alike(x)] > 0]
    message = (
      "whole, although other layers are split. Add a rule that splits it, or "
      "pass rules= if it is meant so."
    )
  yield from findings.of_arrays("replicated state", found, message)


def _replicated_slots(step: Step) -> Iterator[Finding]:
  """Finds slots, and averages, that are split less than their parameter."""
  if step.params is step.state:
    return
  paths = [path for path, _ in jax.tree.leaves_with_path(step.params)]
  params = dict(zip(paths, _parameters(step), strict=True))
  owners = opt_state_lib.parameters_of(step.state, step.params)
  yield from findings.of_arrays(
    "replicated state",
    [
      leaf
      for leaf, path in zip(step.state_leaves, owners, strict=True)
      if path is not None
      and leaf.shape == params[path].shape
      and leaf.local_size > params[path].local_size
    ],
    "not split as the parameter is. Initialize it with the sharding of the "
    "parameter: create_train_state(..., strategy=) does.",
  )


def _batch_on_every_device(step: Step) -> Iterator[Finding]:
  if step.mesh is None or step.compiled is None or not step.batch_leaves:
    return
  used = {
    axis for leaf in step.leaves for axes in leaf.axes_by_dim for axis in axes
  }
  # A step may split its batch inside.
  used.update(axis for one in step.collectives for axis in one.along)
  idle = [n for n, k in step.mesh.shape.items() if k > 1 and n not in used]
  if idle:
    number = math.prod(step.mesh.shape[name] for name in idle)
    yield Finding(
      "batch",
      f"nothing is split over the mesh axis {', '.join(map(repr, idle))}: "
      f"{number} devices compute the same. Split the batch over it, as "
      "strategy.shard_batch(batch) does.",
      nbytes=max(leaf.nbytes for leaf in step.batch_leaves),
    )


def _batch_axes(step: Step) -> frozenset[str]:
  """Returns the mesh axes that split the examples of the batch."""
  # Dimension 1 if the batches of several steps are stacked. An axis of one
  # device along dimension 0 says that the examples are there.
  for dim in range(2):
    axes = {
      axis
      for leaf in step.batch_leaves
      if dim < len(leaf.shape)
      for axis in leaf.axes_by_dim[dim]
    }
    if axes and step.mesh is not None:
      return frozenset(name for name in axes if step.mesh.shape[name] > 1)
  return frozenset()


def _lengths(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the lengths of an array, however its dimensions are ordered."""
  return tuple(sorted(n for n in shape if n != 1))


def _moved_examples(step: Step) -> Iterator[Finding]:
  """Finds examples, and activations of them, that devices exchange."""
  axes = _batch_axes(step)
  # What is as large as an array of the state is none of them: split parameters
  # are gathered where the model uses them, also of layers that nn.scan stacks
  # along the first dimension.
  sizes = {
    size // length
    for leaf in step.state_leaves
    for size in (math.prod(leaf.shape), leaf.local_size)
    for length in (1, *leaf.shape[:1])
    if length
  }
  moved = [
    one
    for one in step.collectives
    if one.kind in _MOVING and one.along and axes.issuperset(one.along)
    # In jax.shard_map the user writes the collectives. What stands in a
    # conditional is rare, such as a commit of AGN.
    if not one.in_conditional and "shard_map" not in one.op_name
    if not any(array.size in sizes for array in one.results)
  ]
  # As the batch, perhaps transposed: a program does not say what it moves.
  batch = {_lengths(leaf.local_shape) for leaf in step.batch_leaves}
  yield from findings.of_lines(
    "batch",
    [x for x in moved if any(_lengths(y.dims) in batch for y in x.operands)],
    "devices exchange examples of the batch. Split it along its first "
    "dimension alone, and do not mix this dimension with others in a reshape "
    "or an index.",
  )
  yield from findings.of_lines(
    "activations",
    [x for x in moved if x.kind == "all-gather" and "jvp(" in x.op_name],
    "devices exchange activations of the examples. Constrain them to the "
    "sharding of the batch with jax.lax.with_sharding_constraint.",
  )


def _float32_gradients(step: Step) -> Iterator[Finding]:
  if step.device.platform == "cpu":
    return
  yield from findings.of_lines(
    "float32 gradients",
    [
      dataclasses.replace(one, results=one.widened)
      for one in step.collectives
      if one.kind in _REDUCING and one.group_size > 1 and one.widened
    ],
    "float32 that was cast from bfloat16. Cast after the sum: half of the "
    "bytes are sent.",
  )
