"""Batches of a data source, through Grain."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Any, ClassVar, TYPE_CHECKING

import numpy as np

from flaxshard.core import checks
from flaxshard.data import iterators
from flaxshard.data import sources
from flaxshard.data.sources import Example
from flaxshard.data.sources import Splits

if TYPE_CHECKING:
  import grain


def train_iterator(
  splits: Splits,
  *,
  batch_size: int,
  seed: int,
  rows: Sequence[int] | None = None,
  collate: sources.Collate | None = None,
) -> grain.DatasetIterator | StreamIterator:
  """Returns an endless iterator over this process's rows of global batches.

  The order depends on `seed` alone. Each epoch has another order. A stream is
  read in its own order; see `StreamIterator`. Row r of global batch n is the
  same example for any number of processes. A process loads no other examples
  than those of its rows.

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
    >>> import flaxshard as fs
    >>> splits = fs.data.digits()
    >>> iterator = fs.data.train_iterator(splits, batch_size=32, seed=0)
    >>> next(iterator)["inputs"].shape
    (32, 8, 8, 1)
  """
  rows = _check_rows(rows, batch_size)
  checks.integer("seed", seed, minimum=0)
  sources.check_batch_size("batch_size", batch_size, splits)
  if sources.is_stream(splits.train):
    return StreamIterator(splits, batch_size, frozenset(rows), seed, collate)
  import grain  # takes about a second

  examples = grain.MapDataset.source(splits.train).seed(seed).shuffle().repeat()
  if splits.augment is not None:
    examples = examples.random_map(splits.augment)
  count = len(examples) // batch_size
  iterator = iter(_read_batches(examples, count, batch_size, rows, collate))
  # The position is the number of global batches read, for any share of them.
  iterator.position_is_global = True
  return iterator


def eval_batches(
  splits: Splits,
  *,
  batch_size: int,
  rows: Sequence[int] | None = None,
  collate: sources.Collate | None = None,
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
    >>> import flaxshard as fs
    >>> batches = list(fs.data.eval_batches(fs.data.digits(), batch_size=200))
    >>> [int(batch["mask"].sum()) for batch in batches]
    [200, 160]
  """
  rows = _check_rows(rows, batch_size)
  if splits.eval is None:
    raise ValueError("splits.eval is None: there are no evaluation examples.")
  import grain

  # After the last example, Grain begins again with the first one.
  examples = grain.MapDataset.source(splits.eval)
  # All processes evaluate in lockstep: they need equally many batches.
  count = -(-len(examples) // batch_size)
  return _read_batches(
    examples, count, batch_size, rows, collate, has_mask=True
  )


@dataclasses.dataclass(eq=False)
class StreamIterator:
  """An endless iterator over some rows of each global batch of a stream.

  Examples are read in the order of the stream, and again from its start after
  its end. Every process reads all examples, and keeps those of its rows: so row
  r of global batch n is the same example for any number of processes.

  The position is the state of the stream's iterator, if it has `get_state` and
  `set_state` as those of Grain. Otherwise it is the number of examples: a
  restored iterator reads that many again.

  Attributes:
    splits: The data; `train` is the stream.
    batch_size: Number of examples in a global batch.
    rows: The rows of each global batch to return.
    seed: Seed of the augmentation.
    collate: Makes a batch of a sequence of examples; None stacks their arrays.
  """

  splits: Splits
  batch_size: int
  rows: Container[int]
  seed: int
  collate: sources.Collate | None
  position_is_global: ClassVar[bool] = True

  def __post_init__(self) -> None:
    self._total = 0  # examples read
    self._in_epoch = 0  # examples read since the start of the stream
    self._source: Iterator[Any] = iter(self.splits.train)

  def __iter__(self) -> StreamIterator:
    """Returns itself."""
    return self

  def __next__(self) -> Example:
    """Returns the rows of the next global batch."""
    examples = []
    for row in range(self.batch_size):
      example = self._read()
      if row in self.rows:
        if (augment := self.splits.augment) is not None:
          # By the number of the example: the same in every process.
          rng = np.random.default_rng((self.seed, self._total))
          example = augment(example, rng)
        examples.append(example)
      self._total += 1
    return sources.make_batch(examples, self.collate)

  def get_state(self) -> dict[str, Any]:
    """Returns the position."""
    state = iterators.copy_state(self._source)
    return {
      "examples": self._total,
      "in_epoch": self._in_epoch,
      # A value for JSON.
      "source": state.decode("latin-1") if isinstance(state, bytes) else state,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues from a position.

    Raises:
      ValueError: The stream is shorter than when the position was saved.
    """
    source: Any = iter(self.splits.train)
    self._source = source
    self._total, self._in_epoch = state["examples"], state["in_epoch"]
    if (position := state["source"]) is not None:
      is_bytes = isinstance(source.get_state(), bytes)
      source.set_state(position.encode("latin-1") if is_bytes else position)
      return
    skipped = sum(1 for _ in itertools.islice(source, self._in_epoch))
    if skipped < self._in_epoch:
      raise ValueError(
        f"config.data: the stream of training examples has {skipped} examples, "
        f"and the position to continue from is after {self._in_epoch}."
      )

  def _read(self) -> Any:
    for _ in range(2):
      for example in self._source:
        self._in_epoch += 1
        return example
      self._source, self._in_epoch = iter(self.splits.train), 0
    raise ValueError("config.data: the stream has no training examples.")


def _check_rows(rows: Sequence[int] | None, batch_size: int) -> Sequence[int]:
  checks.integer("batch_size", batch_size, minimum=1)
  rows = list(map(int, range(batch_size) if rows is None else rows))
  if not rows or rows != sorted({*rows} & {*range(batch_size)}):
    raise ValueError(
      f"rows must be row numbers of a batch of {batch_size} in ascending "
      f"order, got {rows!r}."
    )
  return rows


def _read_batches(
  examples: grain.MapDataset,
  count: int,
  batch_size: int,
  rows: Sequence[int],
  collate: sources.Collate | None,
  *,
  has_mask: bool = False,
) -> grain.IterDataset:
  """Returns a dataset of some rows of the first batches of examples.

  Args:
    examples: The examples, in their order.
    count: Number of batches.
    batch_size: Number of examples in a global batch.
    rows: The rows of each global batch to read.
    collate: Makes a batch of a sequence of examples.
    has_mask: Whether a batch has a mask, False after the last example.
  """
  import grain

  # Rows are selected after the random transformations: Grain seeds each example
  # by its index, and only before the selection is that the global index. One
  # transformation of batches takes less time than some for each example.
  def read(number: int) -> Example:
    positions = number * batch_size + np.asarray(rows)
    # By a generator: a StopIteration of a source is an error, not the end.
    found = [*(examples[i] for i in positions.tolist())]
    batch = sources.make_batch(found, collate)
    return {**batch, "mask": positions < len(examples)} if has_mask else batch

  # Grain's default would buffer 500 batches.
  options = grain.ReadOptions(num_threads=4, prefetch_buffer_size=16)
  return grain.MapDataset.range(count).map(read).to_iter_dataset(options)
