"""Distributes host batches over a mesh: prefetched, padded, as global arrays.

`Strategy.distribute_dataset`, `Strategy.distribute_datasets_from_function` and
`Strategy.shard_batch` come here with the mesh of the strategy. The names are
those of `tf.distribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.data import padding
from flaxshard.data import sharding
from flaxshard.data.iterators import DistributedIterator
from flaxshard.partitioning import mesh as mesh_lib

PyTree = Any


def shard_batch(
  mesh: jax.sharding.Mesh, batch: PyTree, spec: PyTree = sharding.OVER_REPLICAS
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
    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> batch = shard_batch(mesh, {"x": np.arange(4)})
    >>> [shard.data.tolist() for shard in batch["x"].addressable_shards]
    [[0, 1], [2, 3]]
  """
  return padding.Padder(mesh, mask=None, spec=spec)(batch)


@dataclasses.dataclass(frozen=True)
class InputContext:
  """Describes the input pipeline for which `dataset_fn` creates a dataset.

  Attributes:
    num_input_pipelines: Number of pipelines that feed the replicas: one for
      each process, or for each group of processes with the same replicas.
    input_pipeline_id: Index of this pipeline, from 0.
    num_replicas_in_sync: Number of replicas of all pipelines.

  Example:
    >>> context = InputContext(2, 0, num_replicas_in_sync=8)
    >>> context.get_per_replica_batch_size(32)
    4

  References:
    `tf.distribute.InputContext`.
  """

  num_input_pipelines: int = 1
  input_pipeline_id: int = 0
  num_replicas_in_sync: int = 1

  def get_per_replica_batch_size(self, global_batch_size: int) -> int:
    """Returns the batch size of one replica.

    Args:
      global_batch_size: Number of examples in a global batch.

    Raises:
      TypeError: `global_batch_size` is not an integer.
      ValueError: `global_batch_size` is not a positive multiple of the number
        of replicas.
    """
    size = checks.integer("global_batch_size", global_batch_size)
    if size < 1 or size % self.num_replicas_in_sync:
      raise ValueError(
        f"global_batch_size={size} must be a multiple of the "
        f"{self.num_replicas_in_sync} replicas in sync."
      )
    return size // self.num_replicas_in_sync


class DistributedDataset:
  """Batches on a mesh, which a thread reads ahead.

  Iterating yields trees of global `jax.Array`s. Every `iter()` starts a new
  epoch if `iter(iterable)` does. Otherwise, as with a generator, every `iter()`
  returns the same iterator, so that no batch that was read ahead is lost.

  A batch is a pytree of arrays `[batch, ...]`. All batches must have the
  structure, dtypes and shapes of the first one. Only the number of rows may
  differ.

  Rows: every batch is padded to the same number of rows, so that a train step
  compiles once. That number is `batch_size`, or the number of rows of the first
  batch, rounded up to a multiple of the replicas. Padding repeats the rows of
  the batch in turn: a mean that ignores the mask is wrong, but not by much.

  Mask: `batch[mask]`, bool `[batch]`, is False for padding. Every batch has it,
  even without padding, so that all have the same structure. If a batch has a
  mask already, its False entries stay False. To average over the real examples
  of a batch, divide their sum by their number, both over all replicas.

  Buckets: with `bucket="power_of_two"` dimensions after the first may differ
  between batches. They are padded with zeros to a power of two. The mask then
  has these dimensions too: with `bucket_dims=(1,)` it is `[batch, length]`.
  Batches may also have more rows than the first one. Their rows are padded to a
  power of two times the replicas.

  Several processes: each process passes the rows of its own replicas, and gets
  the global arrays. Processes do not compare their data, so all must pass
  equally many batches with equally many rows, or set `batch_size`. A process
  without further examples then passes batches of zero rows. With `bucket`, the
  padded lengths must be the same in all processes.

  Args:
    mesh: A mesh with an axis `"replica"`.
    iterable: The batches: a list, a generator, a Grain dataset or iterator.
      NumPy arrays are copied before the next batch is read.
    prefetch: Number of batches to read and transfer ahead; 0 for no thread.
    joined: The number of batches that one batch on the mesh takes, for
      `distribute_datasets_from_function`.
    **options: How batches are padded and split; the following names.
    batch_size: Number of examples in a global batch.
    mask: The key of the mask, for batches that are dicts. With None, and for
      other batches, there is no mask, and a batch that needs padding is an
      error.
    drop_remainder: Drop batches with fewer examples than `batch_size`.
    bucket: None or `"power_of_two"`.
    bucket_dims: The dimensions that vary: a tuple, for all leaves that have
      them, or a nested dict of tuples by path, where leaves that are not named
      do not vary. The default is `(1,)`.
    spec: A `PartitionSpec` for every leaf, or a nested dict of them by path,
      where leaves that are not named get `P("replica")`. `P("replica", "m0")`
      splits images over a logical axis too.

  Raises:
    ValueError: An argument is invalid or does not fit the mesh. Iterating
      raises it, too: a leaf is ragged or a scalar, has another number of rows
      than the others, or differs from the first batch in shape, dtype or
      structure; or its integers do not fit their dtype on the device. The
      message names the path.
    TypeError: `iterable` is a single batch. Iterating: it is not an iterable,
      or a leaf is not numeric.

  Example:
    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> batches = [{"x": np.arange(4)}, {"x": np.arange(4, 7)}]
    >>> for batch in DistributedDataset(mesh, batches):
    ...   print(batch["x"], batch["mask"])
    [0 1 2 3] [ True  True  True  True]
    [4 5 6 4] [ True  True  True False]

  References:
    `tf.distribute.Strategy.experimental_distribute_dataset`.
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    iterable: Iterable[PyTree],
    *,
    prefetch: int = 2,
    joined: int = 1,
    **options: Any,
  ):
    # These are iterables too, but of keys and characters.
    if isinstance(iterable, (Mapping, str, bytes)):
      raise TypeError(
        "iterable must be an iterable of batches, got "
        f"{type(iterable).__name__}; shard_batch takes a single batch."
      )
    known = [field.name for field in dataclasses.fields(padding.Padder)[1:]]
    for name in options:
      checks.one_of("distribute_dataset: option", name, ["prefetch", *known])
    self._iterable = iterable
    self._prefetch = checks.integer("prefetch", prefetch, minimum=0)
    self._joined = joined
    self._create_padder = functools.partial(padding.Padder, mesh, **options)
    self._create_padder()  # checks the options
    self._single_iterator: DistributedIterator | None = None

  def __iter__(self) -> DistributedIterator:
    """Returns an iterator over one epoch."""
    if self._single_iterator is not None:
      # One with a position can be set back, as the iterators of Grain.
      has_position = hasattr(self._iterable, "set_state")
      if self._single_iterator.has_ended and not has_position:
        checks.warn(
          "distribute_dataset: the iterator over this generator has ended, or "
          "was closed, and there is one. Pass a list, or an object whose "
          "__iter__ begins again."
        )
      return self._single_iterator
    source = iter(self._iterable)
    iterator = DistributedIterator(
      source, self._create_padder(), self._prefetch, self._joined
    )
    # Generators and Grain iterators return themselves: there is one epoch.
    if source is self._iterable:
      self._single_iterator = iterator
    return iterator


def distribute_datasets_from_function(
  mesh: jax.sharding.Mesh,
  dataset_fn: Callable[[InputContext], Iterable[PyTree]],
  **options: Any,
) -> DistributedDataset:
  """Distributes the dataset that a function creates for this process.

  Its batches are per replica: each global batch takes one batch for every
  replica of this process, in the order of the replicas.

  Args:
    mesh: A mesh with an axis `"replica"`.
    dataset_fn: Takes an `InputContext` and returns an iterable of the batches
      of pipeline `context.input_pipeline_id`. Each has
      `context.get_per_replica_batch_size(global_batch_size)` examples.
    **options: Those of `DistributedDataset`. `batch_size` is the number of
      examples in a global batch. The batches of a global batch must have the
      same shapes, but for their rows, also with `bucket`.

  Returns:
    An iterable of trees of global arrays.

  Raises:
    ValueError, TypeError: As `DistributedDataset`.

  Example:
    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> def dataset_fn(context):
    ...   size = context.get_per_replica_batch_size(8)
    ...   assert context.input_pipeline_id < context.num_input_pipelines
    ...   return ({"x": np.full(size, i)} for i in range(4))
    >>> for batch in distribute_datasets_from_function(mesh, dataset_fn):
    ...   print(batch["x"])
    [0 0 0 0 1 1 1 1]
    [2 2 2 2 3 3 3 3]

  References:
    `tf.distribute.Strategy.distribute_datasets_from_function`.
  """
  # The function is called once: each iteration starts an epoch of its dataset.
  pipelines = sharding.pipelines(mesh)
  context = InputContext(
    num_input_pipelines=len(pipelines.replicas),
    input_pipeline_id=pipelines.pipeline_id,
    num_replicas_in_sync=mesh.shape[mesh_lib.REPLICA],
  )
  # All pipelines feed equally many replicas.
  return DistributedDataset(
    mesh, dataset_fn(context), joined=len(pipelines.replicas[0]), **options
  )
