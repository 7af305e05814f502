"""Counts the parts into which a mesh splits the rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import logical_shards

PyTree = Any
Parts = Mapping[trees.Path, int]


def from_shardings(params: PyTree) -> Parts:
  """Returns the number of parts of each parameter that is split by rows.

  Args:
    params: The parameters of a train state: arrays or `jax.ShapeDtypeStruct`s
      with their shardings.

  Returns:
    Numbers above 1, by the path that the optimizer knows.
  """
  optimized = opt_state_lib.trained_params(
    opt_state_lib.optimized_params(params)
  )
  return _by_path(
    {
      path: (x.sharding.spec, x.sharding.mesh.shape)
      for path, x in jax.tree_util.tree_leaves_with_path(optimized)
      if isinstance(x.sharding, jax.sharding.NamedSharding)
    }
  )


def split(updates: PyTree, params: PyTree, created: Parts) -> PyTree:
  """Sorts the rows of split tables into blocks, see `IndexedSlices.split`.

  Args:
    updates: Gradients, some of which are `IndexedSlices`.
    params: The parameters.
    created: The parts of the parameters when the state was created.
  """
  parts = _current(params, created)
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x.split(parts.get(path, 1)) if is_indexed_slices(x) else x,
    gradients.deduplicate(updates),
    is_leaf=is_indexed_slices,
  )


def _current(params: PyTree, created: Parts) -> Parts:
  """Returns the parts of the parameters that are being updated."""
  # In a trace of the whole batch JAX knows the mesh, but not how its axes of
  # type Auto split an array.
  if replica_context.get_replica_context() is None:
    return created
  # Inside of `run` parameters that are split over replicas are whole.
  specs = logical_shards.specs_within(params)
  sizes = jax.sharding.get_abstract_mesh().shape
  return _by_path(
    {
      path: (spec, sizes)
      for path, spec in jax.tree_util.tree_leaves_with_path(specs)
    }
  )


def _by_path(
  found: Mapping[trees.Path, tuple[Any, Mapping[str, int]]],
) -> Parts:
  """Returns the product of the axes that split the rows, if it is above 1."""
  parts = {
    path: specs_lib.parts(specs_lib.dims_of(spec, 1), sizes)[0]
    for path, (spec, sizes) in found.items()
  }
  return {path: count for path, count in parts.items() if count > 1}
