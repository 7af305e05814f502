"""Batches on the host: which process has which rows, and which arrays fit.

A batch is a pytree of arrays `[batch, ...]`, which are checked leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib

PyTree = Any
# An abstract batch has only shapes and dtypes.
Array = np.ndarray | jax.Array | jax.ShapeDtypeStruct

OVER_REPLICAS = jax.P(mesh_lib.REPLICA)


class Pipelines(NamedTuple):
  """The input pipelines that feed the replicas of a mesh.

  Processes whose devices belong to the same replicas share a pipeline: each
  must read the same rows. Usually every process has a pipeline to itself.

  Attributes:
    replicas: For each pipeline the indices of its replicas, in order.
    pipeline_id: The index of this process's pipeline.
  """

  replicas: tuple[tuple[int, ...], ...]
  pipeline_id: int


# Cached: every batch needs them, and a mesh may have thousands of devices.
@functools.cache
def pipelines(mesh: jax.sharding.Mesh) -> Pipelines:
  """Returns the input pipelines of a mesh.

  Args:
    mesh: A mesh with an axis `"replica"`.

  Raises:
    ValueError: There is no axis `"replica"`, no device of the mesh belongs to
      this process, the processes have different numbers of replicas, or two
      processes share only some of their replicas.
  """
  if mesh_lib.REPLICA not in mesh.axis_names:
    raise ValueError(
      f"mesh must have an axis 'replica', got the axes {mesh.axis_names}."
    )
  num_replicas = mesh.shape[mesh_lib.REPLICA]
  if mesh_lib.is_compile_only(mesh):
    # This process, which has none of the devices, stands for all of theirs.
    return Pipelines((tuple(range(num_replicas)),), 0)
  axis = mesh.axis_names.index(mesh_lib.REPLICA)
  found: dict[int, set[int]] = {}
  for index, device in np.ndenumerate(mesh.devices):
    found.setdefault(device.process_index, set()).add(index[axis])
  by_process = {p: tuple(sorted(r)) for p, r in sorted(found.items())}
  groups = sorted(set(by_process.values()))
  same_size = len({len(group) for group in groups}) == 1
  # Distinct groups that together have as many replicas as the mesh: disjoint.
  disjoint = sum(map(len, groups)) == num_replicas
  if not same_size or not disjoint:
    raise ValueError(
      "mesh: processes must have equally many replicas, and two processes the "
      f"same replicas or none in common, got {by_process}."
    )
  process = jax.process_index()
  if process not in by_process:
    raise ValueError(f"mesh has no device of this process, {process}.")
  return Pipelines(tuple(groups), groups.index(by_process[process]))


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
  replicas, pipeline_id = pipelines(mesh)
  return [r * size + row for r in replicas[pipeline_id] for row in range(size)]


class HostBatch(NamedTuple):
  """A flattened batch. All arrays have the same number of rows.

  Attributes:
    tree: The tree structure of the batch.
    arrays: The leaves, `[batch, ...]`, by path, such as `"image"`.
    rows: The number of examples.
  """

  tree: Any
  arrays: dict[str, Array]
  rows: int


def flatten(batch: PyTree) -> HostBatch:
  """Flattens a batch and checks its leaves.

  Args:
    batch: A pytree of arrays `[batch, ...]`, of NumPy or JAX, or of
      `jax.ShapeDtypeStruct`s.

  Returns:
    The tree structure and the arrays, not copied.

  Raises:
    ValueError: There is no leaf. A leaf is a scalar, or has another number of
      rows than the first leaf. Its integers do not fit the dtype that JAX gives
      them. The message names the path.
    TypeError: A leaf is not numeric.

  Example:
    >>> batch = flatten({"image": np.ones((2, 3)), "label": np.ones(2)})
    >>> list(batch.arrays), batch.rows
    (['image', 'label'], 2)
  """
  leaves, tree = jax.tree_util.tree_flatten_with_path(batch)
  if not leaves:
    raise ValueError(f"a batch must have arrays, got {batch!r}.")
  arrays: dict[str, Array] = {}
  for key_path, leaf in leaves:
    path = trees.path_string(key_path)
    arrays[path] = _check_leaf(f"batch[{path}]", leaf)
  (first, array), *others = arrays.items()
  for path, other in others:
    if other.shape[0] != array.shape[0]:
      raise ValueError(
        f"batch[{path}] has {other.shape[0]} examples, batch[{first}] has "
        f"{array.shape[0]}; the leading dimension is the batch."
      )
  return HostBatch(tree, arrays, array.shape[0])


def _check_leaf(where: str, x: Any) -> Array:
  """Returns a leaf as an array, or raises if JAX would change its values."""
  if isinstance(x, np.ma.MaskedArray):
    raise TypeError(f"{where} is a masked array, whose mask would be lost.")
  if not isinstance(x, (jax.Array, jax.ShapeDtypeStruct)):
    x = np.asarray(x)
  # jnp knows bfloat16 and float8 as numbers, NumPy does not.
  if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == bool):
    # An array of objects, as of rows of different lengths, has a wrong shape.
    raise checks.ArgumentTypeError(
      f"{where} must be numbers or booleans, got {x.dtype}, shape {x.shape}."
    )
  if not x.ndim:
    raise ValueError(
      f"{where} is a scalar: every leaf must be an array whose leading "
      "dimension is the batch."
    )
  trees.check_integers(where, x)
  return x


def dtype_of(x: Array) -> np.dtype:
  """Returns the dtype that an array gets on the device."""
  return np.dtype(jax.dtypes.canonicalize_dtype(x.dtype.newbyteorder("=")))


def pad(path: str, x: Array, shape: tuple[int, ...]) -> Array:
  """Pads an array to a shape.

  New rows repeat the given ones in turn. New positions within a row are zero.

  Args:
    path: The path of the leaf, for error messages.
    x: The array, within `shape`.
    shape: The shape of the result.

  Returns:
    An array of the dtype that it gets on the device. It shares no memory with
    a NumPy array `x`.

  Raises:
    ValueError: A finite number overflows in that dtype.

  Example:
    >>> pad("x", np.array([1, 2]), (3,)).tolist()
    [1, 2, 1]
  """
  if isinstance(x, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(shape, dtype_of(x))
  # A device array stays there. In several processes it has to be copied to the
  # host: JAX assembles global arrays from the host arrays of the processes.
  is_whole = isinstance(x, jax.Array) and x.shape == shape
  if is_whole and jax.process_count() == 1:
    return trees.drop_weak_type(x)
  # New memory: a source may reuse its array for the next batch, and a JAX array
  # on the CPU may alias the memory of a NumPy array.
  out = np.zeros(shape, dtype_of(x))
  try:
    # float64 to float32 overflows to infinity, silently by default.
    with np.errstate(over="raise"):
      out[tuple(map(slice, x.shape))] = x
  except FloatingPointError as e:
    raise ValueError(
      f"batch[{path}] has finite numbers that overflow in {out.dtype}."
    ) from e
  if 0 < len(x) < len(out):
    # Not zeros: a loss that is finite for every example is then finite for the
    # padding too. log(0), or the gradient of a norm at 0, is not. All rows in
    # turn: means that ignore the mask stay close to those of the batch.
    out[len(x) :] = out[np.arange(len(out) - len(x)) % len(x)]
  return out


def put(
  arrays: Mapping[str, Array], shardings: Mapping[str, Any]
) -> dict[str, Any]:
  """Assembles global arrays from the rows of each pipeline.

  Args:
    arrays: The rows of this process's pipeline, by path.
    shardings: The `NamedSharding` of each global array.
  """
  mesh = next(iter(shardings.values())).mesh
  # JAX would infer the shapes from the sharding, and multiply every dimension
  # that is split over processes. Only the batch is: a process has full rows.
  count = len(pipelines(mesh).replicas)
  shapes = {
    path: (x.shape[0] * count, *x.shape[1:]) for path, x in arrays.items()
  }
  if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays.values()):
    return {
      p: jax.ShapeDtypeStruct(shapes[p], x.dtype, sharding=shardings[p])
      for p, x in arrays.items()
    }
  mesh_lib.check_can_run("sharding a batch of arrays", mesh)
  out: dict[str, jax.Array] = jax.make_array_from_process_local_data(
    dict(shardings), dict(arrays), shapes
  )
  return out


def put_rows(
  batch: Mapping[str, np.ndarray], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
  """Puts the rows of this process's pipeline on a mesh, as global arrays.

  Args:
    batch: Arrays `[rows, ...]` by key; see `pipeline_rows`.
    wanted: The shapes, dtypes and shardings of the global arrays.

  Raises:
    ValueError: The batch has other keys, shapes or dtypes, or numbers that do
      not fit its dtype.
  """
  arrays = {key: pad(key, x, x.shape) for key, x in batch.items()}
  given, expected = (
    {key: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for key, x in tree.items()}
    for tree in (arrays, wanted)
  )
  if difference := trees.first_difference(given, expected):
    raise ValueError(
      "config.data: the examples of a batch differ from the first example in "
      f"{difference}."
    )
  return put(arrays, {key: x.sharding for key, x in wanted.items()})
