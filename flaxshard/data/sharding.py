"""Shardings of batches: which process and which devices get which rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import functools
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.data import host_batch
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib

PyTree = Any
P = jax.sharding.PartitionSpec

OVER_REPLICAS = P(mesh_lib.REPLICA)


# Cached: every batch needs it, and a mesh may have thousands of devices.
@functools.cache
def pipelines(mesh: jax.sharding.Mesh) -> tuple[tuple[int, ...], ...]:
  """Returns the replicas that each input pipeline feeds.

  Processes whose devices belong to the same replicas share a pipeline: each
  must read the same rows. Usually every process has a pipeline to itself.

  Args:
    mesh: A mesh with an axis `"replica"`.

  Returns:
    For each pipeline the indices of its replicas, in order.

  Raises:
    ValueError: There is no axis `"replica"`, the processes have different
      numbers of replicas, or two processes share only some of their replicas.
  """
  if mesh_lib.REPLICA not in mesh.axis_names:
    raise ValueError(
      f"mesh must have an axis 'replica', got the axes {mesh.axis_names}."
    )
  if compile_only.is_compile_only(mesh):
    # This process, which has none of the devices, stands for all of theirs.
    return (tuple(range(mesh.shape[mesh_lib.REPLICA])),)
  axis = mesh.axis_names.index(mesh_lib.REPLICA)
  # A replica whose devices belong to several processes is in several sets.
  replicas_of: dict[int, set[int]] = {}
  for index, device in np.ndenumerate(mesh.devices):
    replicas_of.setdefault(device.process_index, set()).add(index[axis])
  groups = sorted({tuple(sorted(group)) for group in replicas_of.values()})
  same_size = len({len(group) for group in groups}) == 1
  # Distinct groups that together have as many replicas as the mesh: disjoint.
  disjoint = sum(map(len, groups)) == mesh.shape[mesh_lib.REPLICA]
  if not same_size or not disjoint:
    by_process = {p: sorted(r) for p, r in sorted(replicas_of.items())}
    raise ValueError(
      "mesh: processes must have equally many replicas, and two processes the "
      f"same replicas or none in common, got {by_process}."
    )
  return tuple(groups)


def pipeline_id(mesh: jax.sharding.Mesh) -> int:
  """Returns the index of this process's input pipeline.

  Raises:
    ValueError: No device of the mesh belongs to this process.
  """
  if compile_only.is_compile_only(mesh):
    return 0
  axis = mesh.axis_names.index(mesh_lib.REPLICA)
  for index, device in np.ndenumerate(mesh.devices):
    if device.process_index == jax.process_index():
      groups = pipelines(mesh)
      return next(i for i, group in enumerate(groups) if index[axis] in group)
  raise ValueError(
    f"mesh has no device of this process, {jax.process_index()}."
  )


def pipeline_rows(mesh: jax.sharding.Mesh, batch_size: int) -> Sequence[int]:
  """Returns the rows of a global batch that this process's pipeline reads.

  They are blocks of rows, one for each of its replicas.

  Args:
    mesh: A mesh with an axis `"replica"`.
    batch_size: Number of rows of the global batch, a multiple of the replicas.

  Raises:
    ValueError: No device of the mesh belongs to this process.

  Example:
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> pipeline_rows(mesh, 4)
    [0, 1, 2, 3]
  """
  size = batch_size // mesh.shape[mesh_lib.REPLICA]
  replicas = pipelines(mesh)[pipeline_id(mesh)]
  return [r * size + row for r in replicas for row in range(size)]


def put(
  mesh: jax.sharding.Mesh,
  arrays: Mapping[str, host_batch.Array],
  shardings: Mapping[str, jax.sharding.NamedSharding],
) -> dict[str, Any]:
  """Assembles global arrays from the rows of each pipeline."""
  # JAX would infer the shapes from the sharding, and multiply every dimension
  # that is split over processes. Only the batch is: a process has full rows.
  count = len(pipelines(mesh))
  shapes = {
    path: (x.shape[0] * count, *x.shape[1:]) for path, x in arrays.items()
  }
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays.values()):
    return {
      path: jax.ShapeDtypeStruct(
        shapes[path], x.dtype, sharding=shardings[path]
      )
      for path, x in arrays.items()
    }
  # Lists: the order of a dict would be lost.
  out = jax.make_array_from_process_local_data(
    [shardings[path] for path in arrays],
    list(arrays.values()),
    list(shapes.values()),
  )
  return dict(zip(arrays, out, strict=True))


def by_path(values: Any) -> dict[str, Any]:
  """Flattens nested dicts into one dict by path.

  Example:
    >>> by_path({"a": {"b": 1}}), by_path(2)
    ({'a/b': 1}, {'<root>': 2})
  """
  flat = jax.tree_util.tree_leaves_with_path(
    values, is_leaf=lambda x: not isinstance(x, Mapping)
  )
  return {trees.path_string(path): value for path, value in flat}


def lookup(table: Mapping[str, Any], path: str, default: Any) -> Any:
  """Returns the entry of a path or of its nearest ancestor in a table."""
  # Of two entries that cover a path, the longer one is nearer to the leaf.
  keys = [key for key in table if _covers(key, path)]
  return table[max(keys, key=len)] if keys else default


def check_paths(
  argument: str, table: Mapping[str, Any], paths: Iterable[str]
) -> None:
  """Raises a ValueError if an entry of a table matches no path."""
  for key in table:
    if not any(_covers(key, path) for path in paths):
      raise ValueError(
        f"{argument} names {key!r}; the batch has {', '.join(paths)}."
      )


def _covers(key: str, path: str) -> bool:
  # The root, the path of an entry that is not in a dict, covers every leaf.
  return key in (trees.path_string(()), path) or path.startswith(f"{key}/")
