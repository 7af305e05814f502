"""Threads that send commits while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import functools
import queue
import threading
from typing import Any


class Background:
  """Runs functions in threads of its own, in the order in which they come.

  The threads are daemons: unlike those of an executor of the standard library,
  they do not keep the interpreter from exiting while they wait for others.

  Args:
    name: The name of the threads.
    num_threads: The number of threads.
  """

  def __init__(self, name: str, num_threads: int = 1):
    self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
    self._num_threads = num_threads
    for _ in range(num_threads):
      threading.Thread(target=self._run, name=name, daemon=True).start()

  def submit(
    self, function: Callable[..., Any], *args: Any
  ) -> futures.Future[Any]:
    """Runs a function after those before it; returns its future result.

    It does not run if the future is cancelled before.

    Args:
      function: The function.
      *args: Its arguments.
    """
    future: futures.Future[Any] = futures.Future()
    self._jobs.put((functools.partial(function, *args), future))
    return future

  def close(self) -> None:
    """Ends the threads after the functions that wait."""
    for _ in range(self._num_threads):
      self._jobs.put(None)

  def _run(self) -> None:
    while (job := self._jobs.get()) is not None:
      function, future = job
      if not future.set_running_or_notify_cancel():
        continue
      try:
        future.set_result(function())
      except BaseException as e:
        # Raised by the thread that asks for the result.
        future.set_exception(e)
