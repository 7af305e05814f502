"""Batches of a data source, through Grain."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import SupportsIndex

import grain
import numpy as np

from flaxshard.core import checks
from flaxshard.data import sources
from flaxshard.data.sources import Example
from flaxshard.data.sources import Source
from flaxshard.data.sources import Splits

# Elements are whole batches: Grain's default would buffer 500 of them.
_READ_OPTIONS = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)


def train_iterator(
  splits: Splits,
  *,
  batch_size: int,
  seed: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this process's part of global batches.

  The order depends on `seed` alone. Each epoch has another order. Batch n has
  the same examples for any number of processes. `get_state` and `set_state` of
  the iterator continue at the exact position.

  Args:
    splits: The data.
    batch_size: Number of examples in a global batch, a multiple of
      `process_count`.
    seed: Seed of shuffling and augmentation.
    process_index: Index of this process, from 0.
    process_count: Number of processes that share each batch.

  Returns:
    An iterator over dicts of arrays `[batch_size / process_count, ...]`.

  Raises:
    TypeError: A number is not an integer.
    ValueError: A number is out of range, or `batch_size` is not a multiple of
      `process_count`.

  Example:
    >>> from flaxshard import data
    >>> iterator = train_iterator(data.digits(), batch_size=32, seed=0)
    >>> next(iterator)["inputs"].shape
    (32, 8, 8, 1)
  """
  _check_share(batch_size, process_index, process_count)
  checks.integer("seed", seed, minimum=0)
  dataset = grain.MapDataset.source(splits.train).seed(seed).shuffle().repeat()
  if splits.augment is not None:
    dataset = dataset.random_map(splits.augment)
  # Split after the random transformations: Grain seeds each example by its
  # index, and only before the split is that the index in the global order.
  dataset = dataset[process_index::process_count]
  dataset = dataset.map(_shape_check(splits.eval[0]))
  return iter(_batch(dataset, splits, batch_size // process_count))


def eval_batches(
  splits: Splits,
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
) -> grain.IterDataset:
  """Returns this process's part of the evaluation batches, in order.

  Every example occurs once. The last batch is padded to `batch_size`.

  Args:
    splits: The data.
    batch_size: Number of examples in a global batch, a multiple of
      `process_count`.
    process_index: Index of this process, from 0.
    process_count: Number of processes that share each batch.

  Returns:
    A dataset of dicts of arrays `[batch_size / process_count, ...]`. Their
    entry `mask`, bool `[batch]`, is False for padding.

  Raises:
    TypeError: A number is not an integer.
    ValueError: A number is out of range, or `batch_size` is not a multiple of
      `process_count`.

  Example:
    >>> from flaxshard import data
    >>> batches = list(eval_batches(data.digits(), batch_size=200))
    >>> [int(batch["mask"].sum()) for batch in batches]
    [200, 160]
  """
  _check_share(batch_size, process_index, process_count)
  # All processes evaluate in lockstep: they need equally many batches.
  padded_length = -(-len(splits.eval) // batch_size) * batch_size
  source = _Padded(splits.eval, padded_length)
  dataset = grain.MapDataset.source(source)[process_index::process_count]
  dataset = dataset.map(_shape_check(source[0]))
  return _batch(dataset, splits, batch_size // process_count)


def _check_share(
  batch_size: int, process_index: int, process_count: int
) -> None:
  """Raises unless a process can have its part of every global batch."""
  checks.integer("batch_size", batch_size, minimum=1)
  checks.integer("process_count", process_count, minimum=1)
  checks.integer(
    "process_index", process_index, minimum=0, maximum=process_count - 1
  )
  if batch_size % process_count:
    raise ValueError(
      f"batch_size={batch_size} must be a multiple of "
      f"process_count={process_count}."
    )


def _batch(
  dataset: grain.MapDataset, splits: Splits, size: int
) -> grain.IterDataset:
  # Nothing is dropped: training repeats for ever, evaluation is padded.
  dataset = dataset.batch(size, drop_remainder=True)

  def check_labels(batch: Example) -> Example:
    # On the device, a label out of range gives a NaN or is taken for another
    # class.
    sources.check_labels("config.data", batch["labels"], splits.num_classes)
    return batch

  return dataset.map(check_labels).to_iter_dataset(_READ_OPTIONS)


@dataclasses.dataclass(frozen=True, eq=False)
class _Padded:
  """A source padded to a length with its examples in turn, and a mask."""

  source: Source
  length: int

  def __len__(self) -> int:
    return self.length

  def __getitem__(self, index: SupportsIndex) -> Example:
    index = int(index)
    example = self.source[index % len(self.source)]
    return {**example, "mask": np.bool_(index < len(self.source))}


def _shape_check(first: Example) -> Callable[[Example], Example]:
  """Returns a function that raises at an example of another shape."""
  expected = {key: np.shape(x) for key, x in first.items()}

  # Grain's error, when it stacks a batch, does not name the shapes.
  def check_shapes(example: Example) -> Example:
    shapes = {key: np.shape(x) for key, x in example.items()}
    if shapes != expected:
      raise ValueError(
        f"config.data: every example must have the shapes {expected}, got "
        f"{shapes}."
      )
    return example

  return check_shapes
