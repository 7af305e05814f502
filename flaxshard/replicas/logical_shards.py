"""Logical devices of a replica, inside of `Strategy.run`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context

PyTree = Any
P = jax.sharding.PartitionSpec


def specs_within(params: PyTree) -> PyTree:
  """Returns the PartitionSpecs of parameters over logical devices.

  Args:
    params: The parameters of a TrainState that `Strategy.run` received.

  Returns:
    A tree of PartitionSpecs. They are empty if two TrainStates have parameters
    of the same shapes but other PartitionSpecs.
  """
  context = replica_context.get_replica_context()
  structure: Any = jax.tree.structure(params)
  shapes = [x.shape for x in jax.tree.leaves(params)]
  found = set()
  for arrived in () if context is None else context.params:
    leaves: list[Any] = jax.tree.leaves(arrived)
    if jax.tree.structure(arrived) == structure and shapes == [
      x.shape for x in leaves
    ]:
      found.add(
        tuple(
          specs_lib.only(
            x.sharding.spec, mesh_lib.logical_axes(x.sharding.mesh)
          )
          for x in leaves
        )
      )
  specs = found.pop() if len(found) == 1 else [P()] * len(shapes)
  return structure.unflatten(specs)


def part_of(x: Any, spec: P) -> jax.ShapeDtypeStruct:
  """Returns shape and dtype of the part of an array on one logical device."""
  sizes = jax.sharding.get_abstract_mesh().shape
  parts = specs_lib.parts(spec, x.ndim, sizes)
  shape = tuple(n // count for n, count in zip(x.shape, parts, strict=True))
  return jax.ShapeDtypeStruct(shape, x.dtype)


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
