"""Where the rows of a batch go: partition specs, processes, devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.data import host_batch
from flaxshard.partitioning import specs as specs_lib

PyTree = Any
P = jax.sharding.PartitionSpec

OVER_REPLICAS = P("replica")


@dataclasses.dataclass(frozen=True)
class Leaf:
  """What a leaf is like in every batch.

  Attributes:
    path: Its path.
    dtype: Its dtype on the device.
    shape: Its shape; dimensions that may differ have a word for a size.
    parts: Into how many parts each dimension is split.
    sharding: Of the global array.
  """

  path: str
  dtype: np.dtype
  shape: tuple[int | str, ...]
  parts: tuple[int, ...]
  sharding: jax.sharding.NamedSharding


def shard_batch(
  mesh: jax.sharding.Mesh, batch: PyTree, spec: PyTree = OVER_REPLICAS
) -> PyTree:
  """Puts one batch on a mesh, as it is.

  Args:
    mesh: A mesh with an axis `"replica"`.
    batch: A pytree of arrays `[batch, ...]`. In a run of several processes,
      each gives the rows of its own replicas. NumPy arrays are copied.
    spec: A `PartitionSpec` for every leaf, or a dict of them by path; leaves
      that it does not name get `P("replica")`.

  Returns:
    The tree as global `jax.Array`s `[batch * input pipelines, ...]`, of the
    dtypes that `jnp.asarray` gives.

  Raises:
    ValueError: A leaf is ragged or a single number, has other rows than the
      first, cannot be divided as `spec` says, or has numbers that its dtype on
      the device cannot hold; `spec` does not fit. The message has the path.
    TypeError: A leaf is not numeric, or `spec` holds no `PartitionSpec`.

  Example:
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> batch = shard_batch(mesh, {"x": np.arange(4)})
    >>> [shard.data.tolist() for shard in batch["x"].addressable_shards]
    [[0, 1], [2, 3]]
  """
  flat = host_batch.flatten(batch)
  leaves = make_leaves(mesh, flat, check_specs(mesh, spec))
  count = len(pipelines(mesh))
  arrays = []
  for leaf, x in zip(leaves, flat.arrays, strict=True):
    check_divisible(leaf, (len(x) * count, *x.shape[1:]))
    arrays.append(host_batch.join(leaf.path, [x], x.shape))
  out = put(mesh, arrays, [leaf.sharding for leaf in leaves])
  return jax.tree.unflatten(flat.tree, out)


@functools.cache
def pipelines(mesh: jax.sharding.Mesh) -> tuple[tuple[int, ...], ...]:
  """Returns which replicas each input pipeline feeds.

  A process has a pipeline of its own, or shares that of the processes that
  hold other devices of the same replicas, and must read what they read.

  Raises:
    ValueError: There is no axis `"replica"`, or the processes do not hold
      equally many of its replicas.
  """
  if "replica" not in mesh.axis_names:
    raise ValueError(
      f"mesh must have an axis 'replica', got the axes {mesh.axis_names}."
    )
  axis = mesh.axis_names.index("replica")
  held: dict[int, set[int]] = {}
  for index, device in np.ndenumerate(mesh.devices):
    held.setdefault(device.process_index, set()).add(index[axis])
  groups = sorted({tuple(sorted(replicas)) for replicas in held.values()})
  uniform = len({len(group) for group in groups}) == 1
  if not uniform or sum(map(len, groups)) != mesh.shape["replica"]:
    raise ValueError(
      "mesh: its processes must hold equally many replicas, or the same ones, "
      f"got { ({p: sorted(r) for p, r in sorted(held.items())}) }."
    )
  return tuple(groups)


def pipeline_id(mesh: jax.sharding.Mesh) -> int:
  """Returns which of the pipelines this process has.

  Raises:
    ValueError: None of the mesh's devices is its own.
  """
  axis = mesh.axis_names.index("replica")
  for index, device in np.ndenumerate(mesh.devices):
    if device.process_index == jax.process_index():
      groups = pipelines(mesh)
      return next(i for i, group in enumerate(groups) if index[axis] in group)
  raise ValueError(
    f"mesh has no device of this process, {jax.process_index()}."
  )


def check_specs(mesh: jax.sharding.Mesh, spec: PyTree) -> dict[str, P]:
  """Returns partition specs by path, once they fit the mesh."""
  table = by_path(spec)
  for path, given in table.items():
    if not isinstance(given, P):
      raise TypeError(
        "spec must be a PartitionSpec, or a dict of them by path, got "
        f"{given!r} for {path}."
      )
    names = [name for entry in given for name in specs_lib.axes_of(entry)]
    for name in names:
      if name not in mesh.axis_names or names.count(name) > 1:
        raise ValueError(
          f"spec {given} for {path} must name axes of the mesh, "
          f"{mesh.axis_names}, each once, got {name!r}."
        )
  return table


def make_leaves(
  mesh: jax.sharding.Mesh, batch: host_batch.HostBatch, specs: Mapping[str, P]
) -> list[Leaf]:
  """Returns what the leaves of a batch are like, in every batch."""
  check_paths("spec", specs, batch.paths)
  leaves = []
  for path, x in zip(batch.paths, batch.arrays, strict=True):
    spec = lookup(specs, path, OVER_REPLICAS)
    if len(spec) > x.ndim:
      raise ValueError(
        f"spec {spec} has {len(spec)} entries, batch[{path}] has {x.ndim} "
        "dimensions; in a dict by path, a leaf gets its own."
      )
    axes = [
      specs_lib.axes_of(entry)
      for entry in (*spec, *[None] * (x.ndim - len(spec)))
    ]
    if len(pipelines(mesh)) > 1 and "replica" not in axes[0]:
      raise ValueError(
        f"spec {spec} for batch[{path}] must split its leading dimension over "
        "'replica': each process has some of the rows."
      )
    parts = tuple(math.prod(mesh.shape[a] for a in names) for names in axes)
    leaves.append(
      Leaf(
        path=path,
        dtype=host_batch.dtype_of(x),
        shape=("batch", *x.shape[1:]),
        parts=parts,
        sharding=jax.sharding.NamedSharding(mesh, spec),
      )
    )
  return leaves


def check_divisible(leaf: Leaf, shape: Iterable[int | str]) -> None:
  """Raises unless dimensions can be split as a leaf's are."""
  for dim, (size, parts) in enumerate(zip(shape, leaf.parts, strict=True)):
    if isinstance(size, int) and size % parts:
      raise ValueError(
        f"batch[{leaf.path}] has {size} in dimension {dim}, which "
        f"{leaf.sharding.spec} splits in {parts}; it must be a multiple."
      )


def put(
  mesh: jax.sharding.Mesh,
  arrays: Sequence[host_batch.Array],
  shardings: Sequence[jax.sharding.NamedSharding],
) -> list[jax.Array]:
  """Puts this process's rows on its devices, as parts of global arrays."""
  count = len(pipelines(mesh))
  shapes = [(len(x) * count, *x.shape[1:]) for x in arrays]
  return jax.make_array_from_process_local_data(
    list(shardings), list(arrays), shapes
  )


def by_path(given: Any) -> dict[str, Any]:
  """Returns what stands in nested dicts by path; what is no dict, for all."""
  flat = jax.tree_util.tree_leaves_with_path(
    given, is_leaf=lambda x: not isinstance(x, Mapping)
  )
  return {trees.path_string(path): value for path, value in flat}


def lookup(table: Mapping[str, Any], path: str, default: Any) -> Any:
  """Returns the entry of a path, or of the nearest node above it."""
  keys = [key for key in table if _covers(key, path)]
  return table[max(keys, key=len)] if keys else default


def check_paths(
  argument: str, table: Mapping[str, Any], paths: Sequence[str]
) -> None:
  """Raises if an entry of a table is nobody's."""
  for key in table:
    if not any(_covers(key, path) for path in paths):
      raise ValueError(
        f"{argument} names {key!r}; the batch has {', '.join(paths)}."
      )


def _covers(key: str, path: str) -> bool:
  return key in (trees.path_string(()), path) or path.startswith(f"{key}/")
