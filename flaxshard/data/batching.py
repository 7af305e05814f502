"""Batches of a data source, through Grain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
from typing import SupportsIndex

import grain
import numpy as np

from flaxshard.core import checks
from flaxshard.data import collate as collate_lib
from flaxshard.data import sources
from flaxshard.data import streams
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
  rows: Sequence[int] | None = None,
  collate: collate_lib.Collate | None = None,
) -> grain.DatasetIterator | streams.StreamIterator:
  """Returns an endless iterator over this process's rows of global batches.

  The order depends on `seed` alone. Each epoch has another order. A stream is
  read in its own order; see `flaxshard.data.streams.StreamIterator`. Row r of
  global batch n is the same example for any number of processes. A process
  loads no other examples than those of its rows.

  The position, of `get_state` and `set_state`, is the number of global batches
  that were read. Any number of processes can continue from it, with the same
  `batch_size`.

  Args:
    splits: The data.
    batch_size: Number of examples in a global batch.
    seed: Seed of shuffling and augmentation.
    rows: The rows of each global batch to read, in ascending order: those of
      this process. None reads all.
    collate: Makes a batch of a sequence of examples; None stacks their arrays.

  Returns:
    An iterator over dicts of arrays `[number of rows, ...]`.

  Raises:
    TypeError: A number is not an integer.
    ValueError: A number is out of range, `batch_size` is larger than the number
      of examples, or `rows` do not ascend.

  Example:
    >>> from flaxshard import data
    >>> iterator = train_iterator(data.digits(), batch_size=32, seed=0)
    >>> next(iterator)["inputs"].shape
    (32, 8, 8, 1)
  """
  rows = _check_rows(rows, batch_size)
  checks.integer("seed", seed, minimum=0)
  sources.check_batch_size("batch_size", batch_size, splits)
  if sources.is_stream(splits.train):
    return streams.StreamIterator(
      splits,
      batch_size=batch_size,
      rows=rows,
      seed=seed,
      shapes=_shapes(splits, collate),
      collate=collate or collate_lib.stack,
    )
  dataset = grain.MapDataset.source(splits.train).seed(seed).shuffle().repeat()
  if splits.augment is not None:
    dataset = dataset.random_map(splits.augment)
  # Rows are selected after the random transformations: Grain seeds each example
  # by its index, and only before the selection is that the global index.
  iterator = iter(_batch(dataset, splits, batch_size, rows, collate))
  # The position is the number of global batches read, for any share of them.
  iterator.position_is_global = True
  return iterator


def eval_batches(
  splits: Splits,
  *,
  batch_size: int,
  rows: Sequence[int] | None = None,
  collate: collate_lib.Collate | None = None,
) -> grain.IterDataset:
  """Returns this process's rows of the evaluation batches, in order.

  Every example occurs once. The last batch is padded to `batch_size`.

  Args:
    splits: The data.
    batch_size: Number of examples in a global batch.
    rows: The rows of each global batch to read, in ascending order: those of
      this process. None reads all.
    collate: Makes a batch of a sequence of examples; None stacks their arrays.

  Returns:
    A dataset of dicts of arrays `[number of rows, ...]`. Their entry `mask`,
    bool `[number of rows]`, is False for padding.

  Raises:
    TypeError: A number is not an integer.
    ValueError: A number is out of range, or `rows` do not ascend.

  Example:
    >>> from flaxshard import data
    >>> batches = list(eval_batches(data.digits(), batch_size=200))
    >>> [int(batch["mask"].sum()) for batch in batches]
    [200, 160]
  """
  rows = _check_rows(rows, batch_size)
  if splits.eval is None:
    raise ValueError("splits.eval is None: there are no evaluation examples.")
  # All processes evaluate in lockstep: they need equally many batches.
  num_examples = len(splits.eval)
  padded_length = -(-num_examples // batch_size) * batch_size
  source = _Repeated(splits.eval, padded_length)
  dataset = grain.MapDataset.source(source)
  return _batch(dataset, splits, batch_size, rows, collate, num_examples)


def _check_rows(rows: Sequence[int] | None, batch_size: int) -> Sequence[int]:
  checks.integer("batch_size", batch_size, minimum=1)
  if rows is None:
    return range(batch_size)
  rows = [int(row) for row in rows]
  in_range = rows and 0 <= rows[0] and rows[-1] < batch_size
  if not in_range or any(a >= b for a, b in itertools.pairwise(rows)):
    raise ValueError(
      f"rows must be row numbers of a batch of {batch_size} in ascending "
      f"order, got {rows!r}."
    )
  return rows


def _batch(
  dataset: grain.MapDataset,
  splits: Splits,
  batch_size: int,
  rows: Sequence[int],
  collate: collate_lib.Collate | None,
  num_examples: int | None = None,
) -> grain.IterDataset:
  """Returns the batches of some rows of each global batch of a dataset."""
  shapes = _shapes(splits, collate)
  collate = collate or collate_lib.stack
  source = _Batches(dataset, batch_size, rows, shapes, collate, num_examples)
  return grain.MapDataset.source(source).to_iter_dataset(_READ_OPTIONS)


def _shapes(
  splits: Splits, collate: collate_lib.Collate | None
) -> dict[str, tuple[int, ...]]:
  """Returns the shapes of an example after `collate`, by key.

  All batches must have them: the train step is compiled for them.
  """
  first = sources.first_batch("config.data", splits, collate)
  return {key: x.shape[1:] for key, x in first.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Batches:
  """A source of some rows of each global batch of a dataset.

  One source of batches costs less time than Grain's transformations, which
  handle each example in each of them.

  Attributes:
    dataset: The examples.
    batch_size: Number of examples in a global batch.
    rows: The rows of each global batch to read.
    shapes: Shapes of an example after `collate`, by key.
    collate: Makes a batch of a sequence of examples.
    num_examples: Number of examples that are no padding. Batches then have a
      mask; None: they have none.
  """

  dataset: grain.MapDataset
  batch_size: int
  rows: Sequence[int]
  shapes: Mapping[str, tuple[int, ...]]
  collate: collate_lib.Collate
  num_examples: int | None

  def __len__(self) -> int:
    # Nothing is dropped: training repeats for ever, evaluation is padded.
    return len(self.dataset) // self.batch_size

  def __getitem__(self, index: SupportsIndex) -> Example:
    start = int(index) * self.batch_size
    examples = [self.dataset[start + row] for row in self.rows]
    batch = collate_lib.collate_rows(examples, self.shapes, self.collate)
    if self.num_examples is not None:
      positions = start + np.asarray(self.rows)
      batch["mask"] = positions < self.num_examples
    return batch


@dataclasses.dataclass(frozen=True, eq=False)
class _Repeated:
  """A source repeated, with its examples in turn, up to a length."""

  source: Source
  length: int

  def __len__(self) -> int:
    return self.length

  def __getitem__(self, index: SupportsIndex) -> Example:
    return self.source[int(index) % len(self.source)]
