"""Reads ahead, in a thread."""

from __future__ import annotations

import atexit
from collections.abc import Callable
import queue
import threading
import time
from typing import Any, NamedTuple
import weakref

import jax
import numpy as np


class Item(NamedTuple):
  """What a read gave.

  Attributes:
    batch: The batch.
    state: Where the source stood after it; None if it cannot tell.
    error: What was raised instead, StopIteration at the end.
  """

  batch: Any = None
  state: Any = None
  error: BaseException | None = None


class Prefetch:
  """A thread that reads up to `size` items ahead, until one has an error.

  It holds nothing of whoever reads from it, so that its owner can be collected
  and stop it.

  Args:
    read: Makes the next item; its errors become items.
    size: How many items to have ready, at least 1.
  """

  def __init__(self, read: Callable[[], Item], size: int):
    self._read = read
    # One entry for each item that may be read: a semaphore, but in C.
    self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
    for _ in range(size):
      self._free.put(None)
    self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
    self._stopped = False
    # JAX's settings are the thread's own.
    self._x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64
    self._thread = threading.Thread(
      target=self._run, name="flaxshard-prefetch", daemon=True
    )
    _running.add(self)
    self._thread.start()

  def get(self) -> Item:
    """Returns the next item, once it is there."""
    item = self._items.get()
    self._free.put(None)
    return item

  def stop(self) -> None:
    """Lets the thread end after the read it is in, without waiting for it."""
    self._stopped = True
    self._free.put(None)

  def join(self, timeout: float | None = None) -> bool:
    """Waits for the thread to end, and returns whether it has."""
    if self._thread is not threading.current_thread():
      self._thread.join(timeout)
    return not self._thread.is_alive()

  def _run(self) -> None:
    with jax.enable_x64(self._x64):
      error: BaseException | None = None
      while error is None:
        self._free.get()
        if self._stopped:
          error = ValueError("the iterator was closed.")
          item = Item(error=error)
        else:
          item = self._read()
          error = item.error
        self._items.put(item)
        del item  # or a batch would lie here until the next is read


_running: weakref.WeakSet[Prefetch] = weakref.WeakSet()


@atexit.register
def _stop_all(timeout: float = 2.0) -> None:
  """Ends the threads before JAX, imported earlier, lets go of its devices."""
  deadline = time.monotonic() + timeout
  prefetches = list(_running)
  for prefetch in prefetches:
    prefetch.stop()
  for prefetch in prefetches:
    prefetch.join(max(0.0, deadline - time.monotonic()))
