"""A thread that reads items ahead.

Grain's ThreadPrefetchIterDataset does not fit every iterable: it waits for
ever, in `close` and at the end of the process, for a source that is stuck or
that raises SystemExit.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
import queue
import threading
import time
from typing import Any, NamedTuple
import weakref

import jax


class Item(NamedTuple):
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


class Prefetch:
  """Reads up to `size` items ahead in a thread, until a read fails.

  The thread holds no reference to the object that created it. So that object
  can be garbage-collected, and stop the thread in its finalizer.

  Args:
    read: Returns the next item. It reports errors as items.
    size: Number of items to read ahead, at least 1.
  """

  def __init__(self, read: Callable[[], Item], size: int):
    self._read = read
    # SimpleQueues are written in C. The first one has an entry for each item
    # that may be read: it is a semaphore.
    self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
    self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for _ in range(size):
      self._places.put(None)
    self._stopped = False
    # jax.enable_x64 is thread-local: pass its value on to the thread.
    self._x64 = jax.dtypes.canonicalize_dtype("int64") == "int64"
    self._thread = threading.Thread(
      target=self._run, name="flaxshard-prefetch", daemon=True
    )
    _running.add(self)
    self._thread.start()

  def get(self) -> Item:
    """Returns the next item; waits until it is read."""
    item = self._items.get()
    self._places.put(None)
    return item

  def stop(self) -> None:
    """Asks the thread to end after its current read; does not wait."""
    self._stopped = True
    # Wakes the thread if it waits for a place.
    self._places.put(None)

  def join(self, timeout: float | None = None) -> bool:
    """Waits for the thread to end.

    Args:
      timeout: Seconds to wait at most; None waits without a limit.

    Returns:
      Whether the thread has ended.
    """
    # A finalizer may run in this very thread, which cannot wait for itself.
    if self._thread is not threading.current_thread():
      self._thread.join(timeout)
    return not self._thread.is_alive()

  def _run(self) -> None:
    failed = False
    with jax.enable_x64(self._x64):
      while not failed:
        self._places.get()
        # The error wakes a reader that waits in `get`.
        closed = Item(error=ValueError("the iterator was closed."))
        item = closed if self._stopped else self._read()
        failed = item.error is not None
        self._items.put(item)
        # Else this variable would keep a batch alive during the next read.
        del item


_running: weakref.WeakSet[Prefetch] = weakref.WeakSet()


# Exit handlers run in reverse order: this one runs before that of JAX, which
# was imported earlier, and which releases the devices that threads still use.
@atexit.register
def _stop_all(timeout: float = 2.0) -> None:
  deadline = time.monotonic() + timeout
  prefetches = list(_running)
  # Stop all before waiting for the first: they share the timeout.
  for prefetch in prefetches:
    prefetch.stop()
  for prefetch in prefetches:
    prefetch.join(max(0.0, deadline - time.monotonic()))
