"""Shardings of batches: which process and which devices get which rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.data import host_batch
from flaxshard.partitioning import compile_only
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib

PyTree = Any
P = jax.sharding.PartitionSpec

OVER_REPLICAS = P(mesh_lib.REPLICA)

# Stands for the size of the leading dimension, in the shape of a `Leaf`.
BATCH = "batch"


@dataclasses.dataclass(frozen=True)
class Leaf:
  """The properties of a leaf that all batches share.

  Attributes:
    path: The path of the leaf, such as `"image"`.
    dtype: Its dtype on the device.
    shape: Its shape. Dimensions that vary have a name instead of a size.
    parts: Number of parts that the mesh splits each dimension into.
    sharding: The sharding of the global array.
  """

  path: str
  dtype: np.dtype
  shape: tuple[int | str, ...]
  parts: tuple[int, ...]
  sharding: jax.sharding.NamedSharding


def shard_batch(
  mesh: jax.sharding.Mesh, batch: PyTree, spec: PyTree = OVER_REPLICAS
) -> PyTree:
  """Puts one batch on a mesh, without padding.

  Args:
    mesh: A mesh with an axis `"replica"`.
    batch: A pytree of arrays `[batch, ...]`, with the rows of this process's
      replicas. NumPy arrays are copied. Of `jax.ShapeDtypeStruct`s, the result
      is an abstract batch; on devices for compiling alone its rows are those of
      the global batch.
    spec: A `PartitionSpec` for every leaf, or a dict of them by path. Leaves
      that the dict does not name get `P("replica")`.

  Returns:
    A tree like `batch` of global arrays `[batch * input pipelines, ...]`, with
    the dtypes of `jnp.asarray`.

  Raises:
    ValueError: A leaf is ragged or a scalar, has another number of rows than
      the first leaf, cannot be divided by `spec`, or has values that do not fit
      its dtype on the device; or `spec` does not fit the mesh or the batch. The
      message names the path.
    TypeError: A leaf is not numeric, or `spec` is not a `PartitionSpec`.

  Example:
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> batch = shard_batch(mesh, {"x": np.arange(4)})
    >>> [shard.data.tolist() for shard in batch["x"].addressable_shards]
    [[0, 1], [2, 3]]
  """
  flat = host_batch.flatten(batch)
  if not flat.rows:
    raise ValueError(
      f"batch[{flat.paths[0]}] has the shape {flat.arrays[0].shape}: a batch "
      "needs at least one example for each replica."
    )
  leaves = make_leaves(mesh, flat, check_specs(mesh, spec))
  count = len(pipelines(mesh))
  arrays = []
  for leaf, x in zip(leaves, flat.arrays, strict=True):
    check_divisible(leaf, (len(x) * count, *x.shape[1:]))
    arrays.append(host_batch.join(leaf.path, [x], x.shape))
  global_arrays = put(mesh, arrays, [leaf.sharding for leaf in leaves])
  return jax.tree.unflatten(flat.tree, global_arrays)


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


def check_specs(mesh: jax.sharding.Mesh, spec: PyTree) -> dict[str, P]:
  """Returns partition specs by path, checked against the mesh.

  Args:
    mesh: The mesh.
    spec: A `PartitionSpec`, or a nested dict of them.

  Raises:
    TypeError: An entry is not a `PartitionSpec`.
    ValueError: An axis is not of the mesh, or is named twice.
  """
  table = by_path(spec)
  for path, entry in table.items():
    # The batch is not known yet: check for an array of matching rank.
    shape = ("any",) * len(entry) if isinstance(entry, P) else ()
    specs_lib.check(f"spec for {path}", entry, shape, mesh)
  return table


def make_leaves(
  mesh: jax.sharding.Mesh, batch: host_batch.HostBatch, specs: Mapping[str, P]
) -> list[Leaf]:
  """Returns the properties of each leaf of a batch.

  Args:
    mesh: The mesh.
    batch: The first batch, on the host.
    specs: Partition specs by path, checked against the mesh.

  Raises:
    ValueError: A spec does not fit the batch.
  """
  check_paths("spec", specs, batch.paths)
  leaves = []
  for path, x in zip(batch.paths, batch.arrays, strict=True):
    spec = lookup(specs, path, OVER_REPLICAS)
    # Sizes are checked later: a batch may be padded first.
    unknown = ("any",) * x.ndim
    axes = specs_lib.check(f"spec for batch[{path}]", spec, unknown, mesh)
    if len(pipelines(mesh)) > 1 and mesh_lib.REPLICA not in axes[0]:
      raise ValueError(
        f"spec {spec} for batch[{path}] must split its leading dimension over "
        "'replica': each process has some of the rows."
      )
    leaves.append(
      Leaf(
        path=path,
        dtype=host_batch.dtype_of(x),
        shape=(BATCH, *x.shape[1:]),
        parts=specs_lib.parts(axes, mesh.shape),
        sharding=jax.sharding.NamedSharding(mesh, spec),
      )
    )
  return leaves


def check_divisible(leaf: Leaf, shape: Iterable[int | str]) -> None:
  """Raises a ValueError unless the sharding of a leaf divides a shape.

  Args:
    leaf: The leaf.
    shape: Sizes of its dimensions. Names of dimensions that vary are ignored.
  """
  for dim, (size, parts) in enumerate(zip(shape, leaf.parts, strict=True)):
    if isinstance(size, int) and size % parts:
      raise ValueError(
        f"batch[{leaf.path}] has size {size} in dimension {dim}, which must be "
        f"a multiple of {parts}: {leaf.sharding.spec} splits it in {parts}."
      )


def put(
  mesh: jax.sharding.Mesh,
  arrays: Sequence[host_batch.Array],
  shardings: Sequence[jax.sharding.NamedSharding],
) -> list[Any]:
  """Assembles global arrays from the rows of each pipeline."""
  count = len(pipelines(mesh))
  # JAX would infer the shapes from the sharding, and multiply every dimension
  # that is split over processes. Only the batch is: a process has full rows.
  shapes = [(x.shape[0] * count, *x.shape[1:]) for x in arrays]
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
    return [
      jax.ShapeDtypeStruct(shape, x.dtype, sharding=s)
      for shape, x, s in zip(shapes, arrays, shardings, strict=True)
    ]
  compile_only.check_can_run("sharding a batch of arrays", mesh)
  return jax.make_array_from_process_local_data(
    list(shardings), list(arrays), shapes
  )


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
  argument: str, table: Mapping[str, Any], paths: Sequence[str]
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
