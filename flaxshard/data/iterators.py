"""An iterator over global batches: read ahead, with a position to save."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
import copy
import functools
import itertools
import queue
import threading
import time
from typing import Any, NamedTuple
import weakref

import jax
import numpy as np

from flaxshard.data import sharding

PyTree = Any


class DistributedIterator:
  """An iterator over global batches, which it puts on the devices.

  A thread reads ahead. It starts with the first batch. It ends after the last
  batch, with `close` or the `with` block, or when the iterator is
  garbage-collected. Do not use the source while the thread runs: the thread
  advances it. When the thread has ended, the source stands after the last batch
  that was read ahead.

  The position is that after the last batch returned, however far the thread has
  read. `flaxshard.Checkpointer` saves and restores it like the position of a
  Grain iterator. Any number of processes can restore it if the source has an
  attribute `position_is_global` that is True.

  Args:
    source: The iterator over the batches of this process.
    put: Puts a batch on the devices; None leaves it out.
    prefetch: Number of batches to read and transfer ahead; 0 for no thread.
    joined: The number of batches that one batch on the devices takes.

  Attributes:
    position_is_global: Whether the position of the source does not depend on
      the process.
    has_ended: Whether the last batch was returned and asked after, or the
      iterator was closed.

  Example:
    >>> import grain, numpy as np
    >>> from flaxshard.data import distribute
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
    >>> source = grain.MapDataset.range(8).batch(2).to_iter_dataset()
    >>> with iter(distribute.DistributedDataset(mesh, source)) as iterator:
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
    put: Callable[[PyTree], PyTree | None],
    prefetch: int = 2,
    joined: int = 1,
  ):
    self._source = source
    self.position_is_global = getattr(source, "position_is_global", False)
    # A partial without `self`: the thread must not keep the iterator alive.
    self._read = functools.partial(_read_batch, source, put, joined)
    self._prefetch_size = prefetch
    self._state = copy_state(source)
    self._prefetch: _Prefetch | None = None
    self.has_ended = False

  def __iter__(self) -> DistributedIterator:
    """Returns itself."""
    return self

  def __next__(self) -> PyTree:
    """Returns the next batch, or raises the error of the source."""
    if self.has_ended:
      raise StopIteration
    if self._prefetch_size and self._prefetch is None:
      self._prefetch = _Prefetch(self, self._read, self._prefetch_size)
    item = self._read() if self._prefetch is None else self._prefetch.get()
    if item.error is None:
      self._state = item.state
      return item.batch
    # The thread has ended. After an error, the next call reads on: the source
    # decides whether it can.
    self._stop_prefetch(timeout=0)
    self.has_ended = isinstance(item.error, StopIteration)
    try:
      raise item.error
    finally:
      # The traceback refers to this frame: without `item` there is no cycle.
      del item

  def get_state(self) -> Any:
    """Returns the position of the source after the last batch returned.

    Raises:
      TypeError: The source has no `get_state` and `set_state`.
    """
    if self._state is None:
      raise TypeError(
        f"the source, a {type(self._source).__name__}, has no get_state and "
        "set_state; the iterator of a Grain dataset has them."
      )
    return self._state

  def set_state(self, state: Any) -> None:
    """Continues from a state of `get_state`; drops prefetched batches.

    Args:
      state: A state of an iterator over the same source.
    """
    # The thread may be in the middle of a read of the source.
    self._stop_prefetch(timeout=None)
    source: Any = self._source
    source.set_state(state)
    self._state = copy_state(source)
    self.has_ended = False

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
      >>> with iter(distribute.DistributedDataset(mesh, source)) as iterator:
      ...   iterator.skip(2)
      ...   print(next(iterator))
      [4 5]
    """
    state: Any = self._state
    is_index = isinstance(state, dict) and state.keys() == {"next_index"}
    if is_index and self.position_is_global:
      self.set_state({"next_index": state["next_index"] + count})
      return
    for _ in range(count):
      next(self)

  def close(self) -> None:
    """Ends the iterator; waits up to 5 seconds for the thread's read."""
    self._stop_prefetch(timeout=5.0)
    self.has_ended = True

  def __enter__(self) -> DistributedIterator:
    """Returns itself."""
    return self

  def __exit__(self, *error: object) -> None:
    """Closes the iterator."""
    self.close()

  def _stop_prefetch(self, timeout: float | None) -> None:
    if self._prefetch is not None:
      self._prefetch.stop(timeout)
    self._prefetch = None


def _read_batch(
  source: Iterator[PyTree], put: Callable[[PyTree], Any], joined: int
) -> _Item:
  """Reads the next global batch that is not dropped."""
  try:
    while True:
      batches = [
        # The source may reuse its arrays for the next batch.
        copy.deepcopy(batch) if joined > 1 else batch
        for batch in itertools.islice(source, joined)
      ]
      if not batches:
        raise StopIteration
      batch = batches[0]
      if len(batches) > 1:
        for part in batches:
          sharding.flatten(part)  # checks that its leaves have the same rows
        # NumPy's error says how they differ: `bucket` does not pad the batch of
        # each replica, and only their rows may differ.
        join = lambda *arrays: np.concatenate(arrays)
        batch = jax.tree.map(join, *batches)
      batch = put(batch)
      if batch is not None:
        return _Item(batch, copy_state(source))
  except BaseException as error:
    # SystemExit too: it is raised again in the thread that calls `next`.
    return _Item(error=error)


def copy_state(source: Any) -> Any:
  """Returns a copy of the position of a source; None if it has none."""
  if hasattr(source, "get_state") and hasattr(source, "set_state"):
    # Some sources return the object that they count in.
    return copy.deepcopy(source.get_state())
  return None


class _Item(NamedTuple):
  """The result of one read.

  Attributes:
    batch: The batch.
    state: The position of the source after the batch; None if the source has
      no state.
    error: The error that was raised instead; `StopIteration` at the end.
  """

  batch: Any = None
  state: Any = None
  error: BaseException | None = None


class _Prefetch:
  """Reads up to `size` items ahead in a thread, until a read fails.

  Grain's ThreadPrefetchIterDataset does not fit every iterable: it waits for
  ever, in `close` and at the end of the process, for a source that is stuck or
  that raises SystemExit.

  The thread holds no reference to its owner. So that can be garbage-collected,
  which stops the thread.

  Args:
    owner: The object that reads the items.
    read: Returns the next item. It reports errors as items.
    size: Number of items to read ahead, at least 1.
  """

  def __init__(self, owner: Any, read: Callable[[], _Item], size: int):
    self._read = read
    # SimpleQueues are written in C. The first one has an entry for each item
    # that may be read: it is a semaphore.
    self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
    self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
    for _ in range(size):
      self._places.put(None)
    self._stopped = False
    # jax.enable_x64 is thread-local: pass its value on to the thread.
    self._x64 = jax.dtypes.canonicalize_dtype("int64") == "int64"
    self._thread = threading.Thread(
      target=self._run, name="flaxshard-prefetch", daemon=True
    )
    self._finalizer = weakref.finalize(owner, self.stop, 0)
    _running.add(self)
    self._thread.start()

  def get(self) -> _Item:
    """Returns the next item; waits until it is read."""
    item = self._items.get()
    self._places.put(None)
    return item

  def stop(self, timeout: float | None) -> None:
    """Ends the thread after its current read.

    Args:
      timeout: Seconds to wait for it; None waits without a limit.
    """
    self._finalizer.detach()
    self._stopped = True
    # Wakes the thread if it waits for a place.
    self._places.put(None)
    # At garbage collection this may be the thread: it cannot wait for itself.
    if self._thread is not threading.current_thread():
      self._thread.join(timeout)

  def _run(self) -> None:
    failed = False
    with jax.enable_x64(self._x64):
      while not failed:
        self._places.get()
        # The error wakes a reader that waits in `get`.
        closed = _Item(error=ValueError("the iterator was closed."))
        item = closed if self._stopped else self._read()
        failed = item.error is not None
        self._items.put(item)
        # Else this variable would keep a batch alive during the next read.
        del item


_running: weakref.WeakSet[_Prefetch] = weakref.WeakSet()


# Exit handlers run in reverse order: this one runs before that of JAX, which
# was imported earlier, and which releases the devices that threads still use.
@atexit.register
def _stop_all(timeout: float = 2.0) -> None:
  deadline = time.monotonic() + timeout
  prefetches = list(_running)
  # Stop all before waiting for the first: they share the timeout.
  for prefetch in prefetches:
    prefetch.stop(0)
  for prefetch in prefetches:
    prefetch.stop(max(0.0, deadline - time.monotonic()))
