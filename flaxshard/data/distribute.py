"""Feeds a mesh: host batches in, global arrays out, read ahead and padded.

`Strategy.distribute_dataset` and `Strategy.distribute_datasets_from_function`
are these functions on the strategy's mesh. The names are TensorFlow's
(`tf.distribute.Strategy`, `DistributedDataset`, `InputContext`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import dataclasses
from typing import Any

import jax

from flaxshard.data import padding
from flaxshard.data import sharding
from flaxshard.data.iterators import DistributedDataset
from flaxshard.data.iterators import DistributedIterator
from flaxshard.data.sharding import shard_batch

__all__ = [
  "DistributedDataset",
  "DistributedIterator",
  "InputContext",
  "distribute_dataset",
  "distribute_datasets_from_function",
  "shard_batch",
]

PyTree = Any


@dataclasses.dataclass(frozen=True)
class InputContext:
  """What an input function knows of the run: `tf.distribute.InputContext`.

  Attributes:
    num_input_pipelines: How many pipelines feed the replicas: one for each
      process, or for the processes together that share replicas.
    input_pipeline_id: Which of them this is, from 0.
    num_replicas_in_sync: The replicas, of all pipelines.

  Example:
    >>> context = InputContext(2, 0, num_replicas_in_sync=8)
    >>> context.get_per_replica_batch_size(32)
    4
  """

  num_input_pipelines: int = 1
  input_pipeline_id: int = 0
  num_replicas_in_sync: int = 1

  def get_per_replica_batch_size(self, global_batch_size: int) -> int:
    """Returns a replica's part of a global batch size.

    Raises:
      ValueError: `global_batch_size` cannot be divided by the replicas.
    """
    if global_batch_size < 1 or global_batch_size % self.num_replicas_in_sync:
      raise ValueError(
        f"global_batch_size={global_batch_size!r} must be a multiple of the "
        f"{self.num_replicas_in_sync} replicas in sync."
      )
    return global_batch_size // self.num_replicas_in_sync


def distribute_dataset(
  mesh: jax.sharding.Mesh,
  iterable: Iterable[PyTree],
  *,
  prefetch: int = 2,
  batch_size: int | None = None,
  mask: str | None = "mask",
  drop_remainder: bool = False,
  bucket: str | None = None,
  bucket_dims: Any = None,
  spec: PyTree = sharding.OVER_REPLICAS,
) -> DistributedDataset:
  """Distributes batches over a mesh, while a thread reads ahead.

  A batch is a pytree of arrays `[batch, ...]`. All batches have the structure,
  dtypes and shapes of the first. The number of examples is brought to one
  size, so that nothing is compiled twice: `batch_size`, or that of the first
  batch, rounded up to a multiple of the replicas. Rows that are missing repeat
  the first one of the batch, and `batch[mask]`, bool `[batch]`, is False there.
  It is in every batch, for the same reason. A mask that a batch brings along
  keeps its False entries. What is averaged over a batch must heed the mask: the
  sum over real examples by their number, both over all replicas.

  With `bucket="power_of_two"` dimensions after the first may differ between
  batches: they are padded with zeros to a power of two. The mask then has them
  too: with `bucket_dims=(1,)` it is `[batch, length]`, for tokens and their
  labels. Batches may also have more rows than the first: those are padded to a
  power of two times the replicas.

  In a run of several processes each gives its own part of every batch, the rows
  of its own replicas, and sees the global arrays. No process knows what another
  one reads: all must have as many batches, of as many rows, or say
  `batch_size`; once out of examples, a process may give batches of no rows. In
  a bucket, they must agree on the length.

  Args:
    mesh: A mesh with an axis `"replica"`.
    iterable: Batches: a list, a generator, a Grain dataset or iterator. Each
      `iter()` of the result starts a new epoch if one of `iterable` does.
      NumPy arrays are copied before the next batch is read.
    prefetch: How many batches to read and transfer ahead; 0 for no thread.
    batch_size: Examples in a global batch.
    mask: The key of the mask in batches that are dicts. None, or batches of
      another kind: no mask, and what would need padding is an error.
    drop_remainder: Drop batches with fewer examples than `batch_size`.
    bucket: None, or "power_of_two".
    bucket_dims: The dimensions that vary, in leaves that have them; or a dict
      of such tuples by path, where leaves not named do not vary. Default: (1,).
    spec: A `PartitionSpec` for every leaf, or a dict of them by path, where
      leaves not named get `P("replica")`. `P("replica", "m0")` splits images
      further over a logical axis.

  Returns:
    An iterable of trees of `jax.Array`s. What iterating may raise:
      ValueError: A leaf is ragged or a single number, has other rows than its
        siblings, or dtype, shape or structure differ from the first batch; an
        integer would wrap around on the device. The message has the path.
      TypeError: A leaf is not numeric.
      Anything that `iterable` raises, after the batches before it.

  Raises:
    ValueError: An argument cannot be, or does not fit the mesh.
    TypeError: `iterable` is none, or a single batch.

  Example:
    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> batches = [{"x": np.arange(4)}, {"x": np.arange(4, 7)}]
    >>> for batch in distribute_dataset(mesh, batches):
    ...   print(batch["x"], batch["mask"])
    [0 1 2 3] [ True  True  True  True]
    [4 5 6 4] [ True  True  True False]
  """
  iterates = hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")
  if isinstance(iterable, (Mapping, str, bytes)) or not iterates:
    raise TypeError(
      "iterable must be an iterable of batches, got "
      f"{type(iterable).__name__}; shard_batch takes a single batch."
    )
  if (
    isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0
  ):
    raise ValueError(
      f"prefetch must be a number of batches, from 0, got {prefetch!r}."
    )
  config = padding.Padding(
    batch_size=batch_size,
    mask=mask,
    drop_remainder=drop_remainder,
    bucket=bucket,
    bucket_dims=bucket_dims,
    spec=spec,
  )
  config.check(mesh)
  return DistributedDataset(mesh, iterable, config, prefetch)


def distribute_datasets_from_function(
  mesh: jax.sharding.Mesh,
  dataset_fn: Callable[[InputContext], Iterable[PyTree]],
  **options: Any,
) -> DistributedDataset:
  """Distributes what a function makes for this process's pipeline.

  As in TensorFlow, its batches are those of one replica: each step takes one
  for every replica of this process and joins them, the first one for the first.

  Args:
    mesh: A mesh with an axis `"replica"`.
    dataset_fn: Gets an `InputContext`, returns an iterable of batches of
      `context.get_per_replica_batch_size(global_batch_size)` examples: those of
      pipeline `context.input_pipeline_id` alone.
    **options: As for `distribute_dataset`; `batch_size` is the global one.

  Returns:
    An iterable of trees of `jax.Array`s, as `distribute_dataset` returns.

  Raises:
    ValueError, TypeError: As `distribute_dataset`.

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
  """
  pipelines = sharding.pipelines(mesh)
  context = InputContext(
    num_input_pipelines=len(pipelines),
    input_pipeline_id=sharding.pipeline_id(mesh),
    num_replicas_in_sync=mesh.shape["replica"],
  )
  dataset = distribute_dataset(mesh, dataset_fn(context), **options)
  dataset.joined = len(pipelines[0])
  return dataset
