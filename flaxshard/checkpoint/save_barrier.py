"""A barrier for Orbax's saves that passes in all processes when one fails."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import jax
import orbax.checkpoint as ocp

from flaxshard.core import multihost

# Every process creates its barriers in the same order.
_barrier_numbers = itertools.count()

# Seconds to wait for the other writers of a failed save. Threads of the program
# itself may be among them, and never end.
_WRITERS_TIMEOUT = 2.0


class OtherProcessError(RuntimeError):
  """A save has failed in another process; the message has its error."""


class SaveBarrier:
  """A barrier for Orbax's background threads that passes when a save fails.

  Orbax calls it several times in each save, through
  `AsyncOptions.barrier_sync_fn`. A process whose part of a save fails skips
  the next of those barriers, at which the other processes would wait for
  `AsyncOptions.timeout_secs`, and goes on to the last ones, with its error in
  flight. Therefore the calls are numbered in each process, and all processes
  wait at barriers of the same number, whatever Orbax names them. An error is
  published before the process waits, so after the barrier all processes see it
  and raise it: the save fails in all of them.

  Orbax also leaves the other writing threads of a failed save alone. They would
  write into the directory when it is removed, or when the step is saved again,
  so the barrier waits for them first.
  """

  def __init__(self) -> None:
    self._name = f"flaxshard/save_barrier/{next(_barrier_numbers)}"
    self._save = 0  # number of the save, equal in all processes
    self._lock = threading.Lock()
    self.start_save()

  def start_save(self) -> None:
    """Prepares for the next save; called in all processes before it starts."""
    self._save += 1
    self._calls = itertools.count()
    self._caller = threading.get_ident()  # the thread that calls `save`
    self._earlier_threads = set(threading.enumerate())
    self._errors = ""  # of all processes, once the save has failed

  def __call__(self, *, key: str, timeout_ms: int) -> None:
    """Waits until all processes have called it equally often in this save.

    Args:
      key: Orbax's name of the barrier; not used.
      timeout_ms: Milliseconds to wait at most.

    Raises:
      OtherProcessError: The save has failed in another process; the message
        has its number and its error.
    """
    del key
    # A program may call `save` while it handles an error of its own.
    in_caller = threading.get_ident() == self._caller
    error = None if in_caller else sys.exc_info()[1]
    if error is not None and not self._errors:
      self._wait_for_writers()
    if jax.process_count() == 1:
      return
    # Two threads of one process would mix up the numbers.
    with self._lock:
      if not self._errors:
        barrier = f"{self._name}/{self._save}/{next(self._calls)}"
        client = multihost.coordination_client()
        if error is not None:
          process = jax.process_index()
          text = f"process {process}: {multihost.summarize_error(error)}"
          client.key_value_set(f"{barrier}/{process}", text)
        ocp.multihost.get_barrier_sync_fn()(key=barrier, timeout_ms=timeout_ms)
        published = client.key_value_dir_get(f"{barrier}/")
        self._errors = "; ".join(sorted(text for _, text in published))
    if self._errors and error is None:
      raise OtherProcessError(self._errors)

  def _wait_for_writers(self) -> None:
    """Waits for the threads that were started since the save started."""
    deadline = time.monotonic() + _WRITERS_TIMEOUT
    for thread in threading.enumerate():
      started = thread not in self._earlier_threads
      if started and thread is not threading.current_thread():
        # Orbax's own `join` would raise the error of the thread.
        threading.Thread.join(thread, max(0.0, deadline - time.monotonic()))
