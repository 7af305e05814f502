"""Iterators over global batches, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import copy
import dataclasses
import functools
import itertools
import logging
from typing import Any
import weakref

import jax

from flaxshard.core import checks
from flaxshard.data import padding
from flaxshard.data import prefetch as prefetch_lib

_log = logging.getLogger(__name__)

PyTree = Any

_CLOSE_TIMEOUT = 5  # seconds


@dataclasses.dataclass(eq=False, repr=False)
class DistributedDataset:
  """An iterable of global batches, created by `distribute_dataset`.

  Every `iter()` starts a new epoch if `iter()` of the source does. Otherwise,
  as with a generator, every `iter()` returns the same iterator, so that no
  batch that was read ahead is lost. A UserWarning tells of an epoch without
  batches that begins after the end of such a source.

  Args:
    mesh: The mesh that batches are put on.
    iterable: The host batches.
    config: How batches are padded.
    prefetch: Number of batches to read ahead; 0 for no thread.
    joined: Number of host batches that are concatenated into one global batch.
  """

  mesh: jax.sharding.Mesh
  iterable: Iterable[PyTree]
  config: padding.Padding
  prefetch: int
  joined: int
  _single_iterator: DistributedIterator | None = dataclasses.field(
    default=None, init=False
  )

  def __iter__(self) -> DistributedIterator:
    """Returns an iterator over one epoch."""
    if self._single_iterator is not None:
      self._single_iterator.note_epoch()
      return self._single_iterator
    source = iter(self.iterable)
    padder = padding.Padder(self.mesh, self.config)
    iterator = DistributedIterator(source, padder, self.prefetch, self.joined)
    # Generators and Grain iterators return themselves: there is one epoch.
    if source is self.iterable:
      self._single_iterator = iterator
    return iterator


class DistributedIterator:
  """An iterator over the global batches of a `DistributedDataset`.

  A thread reads ahead. It starts with the first batch, or with
  `start_prefetch`. It ends after the last batch, with `close` or the `with`
  block, or when the iterator is garbage-collected. Do not use the source while
  the thread runs: the thread advances it. When the thread has ended, the source
  stands after the last batch that was read ahead.

  The position is that after the last batch returned, however far the thread has
  read. `flaxshard.Checkpointer` saves and restores it like the position of a
  Grain iterator. Any number of processes can restore it if the source has an
  attribute `position_is_global` that is True.

  Example:
    >>> import grain, numpy as np
    >>> from flaxshard.data import distribute
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> source = grain.MapDataset.range(8).batch(2).to_iter_dataset()
    >>> with iter(distribute.distribute_dataset(mesh, source)) as iterator:
    ...   print(next(iterator))
    ...   state = iterator.get_state()
    ...   print(next(iterator))
    ...   iterator.set_state(state)
    ...   print(next(iterator))
    [0 1]
    [2 3]
    [2 3]
  """

  def __init__(
    self,
    source: Iterator[PyTree],
    padder: padding.Padder,
    prefetch: int,
    joined: int,
  ):
    self._source = source
    # A partial without `self`: the thread must not keep the iterator alive.
    self._read = functools.partial(_read_batch, source, padder, joined)
    self._prefetch_size = prefetch
    self._state = _copy_state(source)
    self._prefetch: prefetch_lib.Prefetch | None = None
    self._finalizer: weakref.finalize | None = None
    self._ended = False
    self._epoch_after_end = False
    self._closed = False

  def __iter__(self) -> DistributedIterator:
    """Returns itself."""
    return self

  def __next__(self) -> PyTree:
    """Returns the next batch, or raises the error of the source."""
    self._check_open()
    if self._ended:
      if self._epoch_after_end:
        self._epoch_after_end = False
        checks.warn(
          f"the iterable, a {type(self._source).__name__}, can be read only "
          "once and is at its end: this epoch has no batches. Pass an iterable "
          "that starts again, such as a list or a Grain dataset; or distribute "
          "a new one for each epoch.",
        )
      raise StopIteration
    self.start_prefetch()
    item = self._read() if self._prefetch is None else self._prefetch.get()
    if item.error is None:
      self._state = item.state
      return item.batch
    # The thread has ended. After an error, the next call reads on: the source
    # decides whether it can.
    self._stop_prefetch()
    self._ended = isinstance(item.error, StopIteration)
    try:
      raise item.error
    finally:
      # The traceback refers to this frame: without `item` there is no cycle.
      del item

  def note_epoch(self) -> None:
    """Notes that another epoch begins, which the source may not have."""
    # Not a warning yet: `set_state` may set the position back first.
    self._epoch_after_end = self._ended

  def start_prefetch(self) -> None:
    """Starts to read ahead now, instead of with the first batch."""
    self._check_open()
    if self._prefetch_size and self._prefetch is None and not self._ended:
      self._prefetch = prefetch_lib.Prefetch(self._read, self._prefetch_size)
      self._finalizer = weakref.finalize(self, self._prefetch.stop)

  @property
  def position_is_global(self) -> bool:
    """Whether the position of the source does not depend on the process."""
    return getattr(self._source, "position_is_global", False)

  def get_state(self) -> Any:
    """Returns the position of the source after the last batch returned.

    Raises:
      TypeError: The source has no `get_state` and `set_state`.
    """
    self._check_position()
    return copy.deepcopy(self._state)

  def set_state(self, state: Any) -> None:
    """Continues from a state of `get_state`; drops prefetched batches.

    Args:
      state: A state of an iterator over the same source.

    Raises:
      TypeError: The source has no `get_state` and `set_state`.
      ValueError: The iterator was closed.
    """
    self._check_open()
    self._check_position()
    prefetch = self._prefetch
    self._stop_prefetch()
    if prefetch is not None:
      # The thread may be in the middle of a read of the source.
      prefetch.join()
    source: Any = self._source
    source.set_state(state)
    self._state = _copy_state(source)
    self._ended = False

  def skip(self, count: int) -> None:
    """Goes on after the next batches, without returning them.

    `flaxshard.data.train_iterator` does not read those of a source with an
    index: its position is the number of batches.

    Args:
      count: Number of batches.

    Raises:
      StopIteration: There are not so many.

    Example:
      >>> import grain, numpy as np
      >>> from flaxshard.data import distribute
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
      >>> source = grain.MapDataset.range(8).batch(2).to_iter_dataset()
      >>> with iter(distribute.distribute_dataset(mesh, source)) as iterator:
      ...   iterator.skip(2)
      ...   print(next(iterator))
      [4 5]
    """
    match self._state:
      case {"next_index": index, **others} if (
        self.position_is_global and not others
      ):
        self.set_state({"next_index": index + count})
      case _:
        for _ in range(count):
          next(self)

  def close(self) -> None:
    """Stops the thread and waits for its current read, up to 5 seconds."""
    prefetch, self._closed = self._prefetch, True
    self._stop_prefetch()
    if prefetch is not None and not prefetch.join(_CLOSE_TIMEOUT):
      _log.warning(
        "the source has not returned a batch for %d s; its thread ends when "
        "the source returns",
        _CLOSE_TIMEOUT,
      )

  def __enter__(self) -> DistributedIterator:
    """Returns itself."""
    return self

  def __exit__(self, *error: object) -> None:
    """Closes the iterator."""
    self.close()

  def _stop_prefetch(self) -> None:
    if self._finalizer is not None:
      # Runs Prefetch.stop now, and no second time at garbage collection.
      self._finalizer()
    self._prefetch = self._finalizer = None

  def _check_open(self) -> None:
    if self._closed:
      raise ValueError("the iterator was closed.")

  def _check_position(self) -> None:
    if not _has_position(self._source):
      raise TypeError(
        f"the source, a {type(self._source).__name__}, has no get_state and "
        "set_state; the iterator of a Grain dataset has them."
      )


def _read_batch(
  source: Iterator[PyTree], padder: padding.Padder, joined: int
) -> prefetch_lib.Item:
  """Reads the next global batch that is not dropped."""
  try:
    while True:
      batches = [
        # The padder copies only after all are read, but the source may reuse
        # its arrays for the next batch.
        copy.deepcopy(batch) if joined > 1 else batch
        for batch in itertools.islice(source, joined)
      ]
      if not batches:
        raise StopIteration
      batch = padder(batches)
      if batch is not None:
        return prefetch_lib.Item(batch, _copy_state(source))
  except BaseException as error:
    # SystemExit too: it is raised again in the thread that calls `next`.
    return prefetch_lib.Item(error=error)


def _copy_state(source: Any) -> Any:
  """Returns a copy of the position of a source; None if it has none."""
  # Some sources return the object that they count in.
  return copy.deepcopy(source.get_state()) if _has_position(source) else None


def _has_position(source: Any) -> bool:
  """Returns whether a source has a position, as a Grain iterator."""
  return hasattr(source, "get_state") and hasattr(source, "set_state")
