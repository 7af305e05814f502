"""Iterators over global batches, and where they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import copy
import functools
import itertools
import logging
import types
from typing import Any
import weakref

import jax

from flaxshard.data import padding
from flaxshard.data import prefetch as prefetch_lib

_log = logging.getLogger(__name__)

PyTree = Any


class DistributedDataset:
  """An iterable of global batches: what `distribute_dataset` returns.

  If `iterable` can be iterated over only once, as a generator can, so can this:
  every `iter()` gives the one iterator, and nothing read ahead is lost.
  """

  def __init__(
    self,
    mesh: jax.sharding.Mesh,
    iterable: Iterable[PyTree],
    config: padding.Padding,
    prefetch: int,
  ):
    self.joined = 1  # batches of the iterable in one of these
    self._mesh = mesh
    self._iterable = iterable
    self._config = config
    self._prefetch = prefetch
    self._only: DistributedIterator | None = None

  def __iter__(self) -> DistributedIterator:
    """Returns an iterator over an epoch."""
    if self._only is not None:
      return self._only
    source = iter(self._iterable)
    padder = padding.Padder(self._mesh, self._config)
    iterator = DistributedIterator(source, padder, self._prefetch, self.joined)
    if source is self._iterable:
      self._only = iterator
    return iterator


class DistributedIterator:
  """Yields global batches: what iterating over a `DistributedDataset` gives.

  The thread that reads ahead starts with the first batch, or `start_prefetch`,
  and ends with the last one, with `close` or a `with` block, or when nobody
  holds the iterator any more. Until then the source is the thread's; then it
  stands where the thread has read to.

  The position is that of the batch handed out last, however far the thread has
  read; `flaxshard.Checkpointer` saves and restores it as it does Grain's.

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
    # Without self, so that the thread does not keep it.
    self._read = functools.partial(_read, source, padder, joined)
    self._size = prefetch
    self._state = _state_of(source)
    self._prefetch: prefetch_lib.Prefetch | None = None
    self._finalizer: weakref.finalize | None = None
    self._ended = False
    self._closed = False

  def __iter__(self) -> DistributedIterator:
    """Returns itself."""
    return self

  def __next__(self) -> PyTree:
    """Returns the next batch, or raises what the source raised."""
    self._check_open()
    if self._ended:
      raise StopIteration
    self.start_prefetch()
    item = self._read() if self._prefetch is None else self._prefetch.get()
    if item.error is None:
      self._state = item.state
      return item.batch
    # The thread has ended. What comes next is for the source to say.
    self._stop()
    self._ended = isinstance(item.error, StopIteration)
    try:
      raise item.error
    finally:
      del item  # the traceback has this frame: no cycle with the error

  def start_prefetch(self) -> None:
    """Starts reading ahead now, and not only with the first batch."""
    self._check_open()
    if self._size and self._prefetch is None and not self._ended:
      self._prefetch = prefetch_lib.Prefetch(self._read, self._size)
      self._finalizer = weakref.finalize(self, self._prefetch.stop)

  def get_state(self) -> Any:
    """Returns where the source stood after the batch handed out last.

    Raises:
      TypeError: The source's iterator has no `get_state` and `set_state`.
    """
    self._check_state()
    return copy.deepcopy(self._state)

  def set_state(self, state: Any) -> None:
    """Goes on from a state of `get_state`; what was read ahead is let go.

    Raises:
      TypeError: The source's iterator has no `get_state` and `set_state`.
    """
    self._check_open()
    self._check_state()
    prefetch = self._prefetch
    self._stop()
    if prefetch is not None:
      prefetch.join()  # the source is not ours before
    self._source.set_state(state)  # type: ignore[attr-defined]
    self._state = _state_of(self._source)
    self._ended = False

  def close(self) -> None:
    """Ends the thread, waiting for the read that it is in."""
    prefetch, self._closed = self._prefetch, True
    self._stop()
    if prefetch is not None and not prefetch.join(_CLOSE_TIMEOUT):
      _log.warning(
        "the source has not returned a batch for %d s: its thread ends when it "
        "does",
        _CLOSE_TIMEOUT,
      )

  def __enter__(self) -> DistributedIterator:
    """Returns itself."""
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> None:
    """Closes the iterator."""
    self.close()

  def _stop(self) -> None:
    if self._finalizer is not None:
      self._finalizer()
    self._prefetch = self._finalizer = None

  def _check_open(self) -> None:
    if self._closed:
      raise ValueError("the iterator was closed.")

  def _check_state(self) -> None:
    if not _has_state(self._source):
      raise TypeError(
        f"the iterator's source, a {type(self._source).__name__}, has no "
        "get_state and set_state: a Grain dataset's iterator has."
      )


_CLOSE_TIMEOUT = 5  # seconds


def _read(
  source: Iterator[PyTree], padder: padding.Padder, joined: int
) -> prefetch_lib.Item:
  """Reads the next batch that is not dropped."""
  try:
    while True:
      batches = [
        # The padder copies, but the source may reuse its arrays before.
        copy.deepcopy(batch) if joined > 1 else batch
        for batch in itertools.islice(source, joined)
      ]
      if not batches:
        raise StopIteration
      batch = padder(batches)
      if batch is not None:
        return prefetch_lib.Item(batch, _state_of(source))
  except BaseException as error:
    return prefetch_lib.Item(error=error)


def _has_state(source: Any) -> bool:
  return hasattr(source, "get_state") and hasattr(source, "set_state")


def _state_of(source: Any) -> Any:
  # A copy: some sources go on counting in the state that they return.
  return copy.deepcopy(source.get_state()) if _has_state(source) else None
