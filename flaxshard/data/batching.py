"""Batches of a data source, through Grain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
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
  rows: Sequence[int] | None = None,
) -> grain.DatasetIterator:
  """Returns an endless iterator over this process's rows of global batches.

  The order depends on `seed` alone. Each epoch has another order. Row r of
  global batch n is the same example for any number of processes. A process
  loads no other examples than those of its rows.

  The position, of `get_state` and `set_state`, is the number of global batches
  that were read. Any number of processes can continue from it, with the same
  `batch_size`.

  Args:
    splits: The data.
    batch_size: Number of examples in a global batch, a multiple of
      `process_count`.
    seed: Seed of shuffling and augmentation.
    process_index: Index of this process, from 0. Of n processes, process i
      reads the i-th of n equal blocks of rows.
    process_count: Number of processes that share each batch.
    rows: The rows of each global batch to read, in ascending order, instead of
      a block of `process_index`.

  Returns:
    An iterator over dicts of arrays `[number of rows, ...]`.

  Raises:
    TypeError: A number is not an integer.
    ValueError: A number is out of range, `batch_size` is not a multiple of
      `process_count`, `rows` do not ascend, or `rows` and `process_count` are
      both given.

  Example:
    >>> from flaxshard import data
    >>> iterator = train_iterator(data.digits(), batch_size=32, seed=0)
    >>> next(iterator)["inputs"].shape
    (32, 8, 8, 1)
  """
  rows = _rows_of_process(batch_size, process_index, process_count, rows)
  checks.integer("seed", seed, minimum=0)
  dataset = grain.MapDataset.source(splits.train).seed(seed).shuffle().repeat()
  if splits.augment is not None:
    dataset = dataset.random_map(splits.augment)
  # Rows are selected after the random transformations: Grain seeds each example
  # by its index, and only before the selection is that the global index.
  iterator = iter(_batch(dataset, splits, splits.eval[0], batch_size, rows))
  # The position is the number of global batches read, for any share of them.
  iterator.position_is_global = True
  return iterator


def eval_batches(
  splits: Splits,
  *,
  batch_size: int,
  process_index: int = 0,
  process_count: int = 1,
  rows: Sequence[int] | None = None,
) -> grain.IterDataset:
  """Returns this process's rows of the evaluation batches, in order.

  Every example occurs once. The last batch is padded to `batch_size`.

  Args:
    splits: The data.
    batch_size: Number of examples in a global batch, a multiple of
      `process_count`.
    process_index: Index of this process, from 0. Of n processes, process i
      reads the i-th of n equal blocks of rows.
    process_count: Number of processes that share each batch.
    rows: The rows of each global batch to read, in ascending order, instead of
      a block of `process_index`.

  Returns:
    A dataset of dicts of arrays `[number of rows, ...]`. Their entry `mask`,
    bool `[number of rows]`, is False for padding.

  Raises:
    TypeError: A number is not an integer.
    ValueError: A number is out of range, `batch_size` is not a multiple of
      `process_count`, `rows` do not ascend, or `rows` and `process_count` are
      both given.

  Example:
    >>> from flaxshard import data
    >>> batches = list(eval_batches(data.digits(), batch_size=200))
    >>> [int(batch["mask"].sum()) for batch in batches]
    [200, 160]
  """
  rows = _rows_of_process(batch_size, process_index, process_count, rows)
  # All processes evaluate in lockstep: they need equally many batches.
  padded_length = -(-len(splits.eval) // batch_size) * batch_size
  source = _Padded(splits.eval, padded_length)
  dataset = grain.MapDataset.source(source)
  return _batch(dataset, splits, source[0], batch_size, rows)


def _rows_of_process(
  batch_size: int,
  process_index: int,
  process_count: int,
  rows: Sequence[int] | None,
) -> Sequence[int]:
  """Returns the rows of every global batch that a process reads."""
  checks.integer("batch_size", batch_size, minimum=1)
  checks.integer("process_count", process_count, minimum=1)
  checks.integer(
    "process_index", process_index, minimum=0, maximum=process_count - 1
  )
  if rows is not None:
    if process_count > 1:
      raise ValueError(
        f"rows={rows!r} replaces the block of rows of process_index="
        f"{process_index}: give rows or process_count, not both."
      )
    return _check_rows(rows, batch_size)
  if batch_size % process_count:
    raise ValueError(
      f"batch_size={batch_size} must be a multiple of "
      f"process_count={process_count}."
    )
  size = batch_size // process_count
  return range(process_index * size, (process_index + 1) * size)


def _check_rows(rows: Sequence[int], batch_size: int) -> Sequence[int]:
  rows = [
    checks.integer("rows: a row", row, minimum=0, maximum=batch_size - 1)
    for row in rows
  ]
  if not rows or any(a >= b for a, b in itertools.pairwise(rows)):
    raise ValueError(
      f"rows must be row numbers of a batch in ascending order, got {rows!r}."
    )
  return rows


def _batch(
  dataset: grain.MapDataset,
  splits: Splits,
  first: Example,
  batch_size: int,
  rows: Sequence[int],
) -> grain.IterDataset:
  """Returns the batches of some rows of each global batch of a dataset."""
  shapes = {key: np.shape(x) for key, x in first.items()}
  source = _Batches(dataset, batch_size, rows, shapes, splits.num_classes)
  return grain.MapDataset.source(source).to_iter_dataset(_READ_OPTIONS)


@dataclasses.dataclass(frozen=True, eq=False)
class _Batches:
  """A source of some rows of each global batch of a dataset.

  One source of batches costs less time than Grain's transformations, which
  handle each example in each of them.
  """

  dataset: grain.MapDataset
  batch_size: int
  rows: Sequence[int]
  shapes: Mapping[str, tuple[int, ...]]
  num_classes: int

  def __len__(self) -> int:
    # Nothing is dropped: training repeats for ever, evaluation is padded.
    return len(self.dataset) // self.batch_size

  def __getitem__(self, index: SupportsIndex) -> Example:
    start = int(index) * self.batch_size
    examples = [self.dataset[start + row] for row in self.rows]
    for example in examples:
      shapes = {key: np.shape(x) for key, x in example.items()}
      if shapes != self.shapes:
        raise ValueError(
          "config.data: every example must have the shapes "
          f"{dict(self.shapes)}, got {shapes}."
        )
    batch = {key: np.stack([x[key] for x in examples]) for key in self.shapes}
    # On the device, a label out of range gives a NaN or is taken for another
    # class.
    sources.check_labels("config.data", batch["labels"], self.num_classes)
    return batch


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
