"""Logical devices of a replica, inside of `Strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import jax

from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context

PyTree = Any


def specs_within(params: PyTree) -> PyTree | None:
  """Returns the PartitionSpecs of parameters over logical devices.

  Args:
    params: The parameters of a TrainState that `Strategy.run` received.

  Returns:
    A tree of PartitionSpecs. None if no parameter is sharded, or if two
    TrainStates have parameters of the same shapes but other PartitionSpecs.
  """
  context = replica_context.get_replica_context()
  shapes = [x.shape for x in jax.tree.leaves(params)]
  structure: Any = jax.tree.structure(params)
  found: list[PyTree] = []
  for specs, spec_shapes in () if context is None else context.param_specs:
    if jax.tree.structure(specs) == structure and spec_shapes == shapes:
      found.append(specs)
  if not found or any(specs != found[0] for specs in found):
    return None
  return found[0] if any(jax.tree.leaves(found[0])) else None


def gradient_specs(params: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
  """Returns the PartitionSpecs of parameters and gradients in a replica.

  Args:
    params: As in `specs_within`.
    grads: Gradients like the parameters; None for leaves without.

  Returns:
    Two trees of PartitionSpecs, empty ones for parameters that are not sharded;
    the second one has None where `grads` has.
  """
  specs = specs_within(params)
  if specs is None:
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), params)
  return specs, jax.tree.map(
    lambda spec, g: None if g is None else spec, specs, grads
  )


def part_of(x: Any, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of the part of an array on one logical device."""
  sizes = jax.sharding.get_abstract_mesh().shape
  shape = list(x.shape)
  for i, entry in enumerate(spec):
    shape[i] //= math.prod(sizes[axis] for axis in specs_lib.axes_of(entry))
  return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def on_logical_devices(
  fn: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
  """Returns a function that calls `fn` on each logical device with its part.

  Args:
    fn: A function of arrays.
    in_specs: PartitionSpecs of its arguments over the logical axes.
    out_specs: PartitionSpecs of its results.
  """
  mesh = jax.sharding.get_abstract_mesh()
  types = zip(mesh.axis_names, mesh.axis_types, strict=True)
  manual = jax.sharding.AxisType.Manual
  return jax.shard_map(
    fn,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={name for name, kind in types if kind != manual},
    check_vma=False,
  )
