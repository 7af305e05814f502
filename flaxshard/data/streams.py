"""Batches of a stream of examples, which has no length."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
import copy
import itertools
from typing import Any

import numpy as np

from flaxshard.data.sources import Example
from flaxshard.data.sources import Splits


class StreamIterator:
  """An endless iterator over some rows of each global batch of a stream.

  Examples are read in the order of the stream, and again from its start after
  its end. Every process reads all examples, and keeps those of its rows: so row
  r of global batch n is the same example for any number of processes.

  The position is the state of the stream's iterator, if it has `get_state` and
  `set_state` as those of Grain. Otherwise it is the number of examples: a
  restored iterator reads that many again.

  Args:
    splits: The data; `train` is the stream.
    batch_size: Number of examples in a global batch.
    rows: The rows of each global batch to return.
    seed: Seed of the augmentation.
    make_batch: Makes a batch of a sequence of examples.
  """

  position_is_global = True

  def __init__(
    self,
    splits: Splits,
    *,
    batch_size: int,
    rows: Sequence[int],
    seed: int,
    make_batch: Callable[[Sequence[Any]], Example],
  ):
    self._splits = splits
    self._batch_size = batch_size
    self._rows = frozenset(rows)
    self._seed = seed
    self._make_batch = make_batch
    self._total = 0  # examples read
    self._in_epoch = 0  # examples read since the start of the stream
    self._source: Iterator[Any] = iter(splits.train)

  def __iter__(self) -> StreamIterator:
    """Returns itself."""
    return self

  def __next__(self) -> Example:
    """Returns the rows of the next global batch."""
    examples = []
    for row in range(self._batch_size):
      example = self._read()
      if row in self._rows:
        examples.append(self._augment(example))
      self._total += 1
    return self._make_batch(examples)

  def get_state(self) -> dict[str, Any]:
    """Returns the position."""
    source: Any = self._source
    has_state = hasattr(source, "get_state") and hasattr(source, "set_state")
    return {
      "examples": self._total,
      "in_epoch": self._in_epoch,
      "source": _encode(source.get_state()) if has_state else None,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues from a position.

    Raises:
      ValueError: The stream is shorter than when the position was saved.
    """
    self._source = iter(self._splits.train)
    self._total, self._in_epoch = state["examples"], state["in_epoch"]
    if state["source"] is not None:
      self._source.set_state(_decode(state["source"]))  # type: ignore[attr-defined]
      return
    skipped = sum(1 for _ in itertools.islice(self._source, self._in_epoch))
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
      if not self._in_epoch:
        break
      self._source, self._in_epoch = iter(self._splits.train), 0
    raise ValueError("config.data: the stream has no training examples.")

  def _augment(self, example: Any) -> Any:
    if self._splits.augment is None:
      return example
    # By the number of the example: the same in every process.
    rng = np.random.default_rng((self._seed, self._total))
    return self._splits.augment(example, rng)


def _encode(state: Any) -> Any:
  """Returns the state of an iterator as a value for JSON."""
  if isinstance(state, bytes):
    return {"base64": base64.b64encode(state).decode()}
  # The iterator may change it while batches are read ahead.
  return {"json": copy.deepcopy(state)}


def _decode(state: Mapping[str, Any]) -> Any:
  if "base64" in state:
    return base64.b64decode(state["base64"])
  return state["json"]
