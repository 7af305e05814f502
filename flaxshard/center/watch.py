"""Threads that look at a store again and again."""

from __future__ import annotations

from collections.abc import Callable
import threading
import time

from flaxshard.center import store

# Bounds of the pauses in seconds between two looks for something new.
_PAUSES = (0.005, 0.5)

# Those while the store cannot be reached.
_FAILED_PAUSES = (0.1, 10.0)


class Watch:
  """A thread that looks until it is closed, also while the store fails.

  Args:
    look: A function that looks, and returns the seconds until the next look;
      None ends the thread.

  Attributes:
    wake: An event: look at once.
  """

  def __init__(self, look: Callable[[], float | None]):
    self._look = look
    self.wake = threading.Event()
    self._is_closed = False
    self._error: BaseException | None = None
    # Not one of a pool, whose threads a program waits for at its end.
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def check(self) -> None:
    """Raises what has ended the thread."""
    if self._error is not None:
      raise self._error

  def close(self, seconds: float = 10.0) -> None:
    """Ends the thread.

    Args:
      seconds: How long to wait for a look that is under way.
    """
    self._is_closed = True
    self.wake.set()
    if self._thread.ident is not None:
      self._thread.join(seconds)

  def _run(self) -> None:
    least, most = _FAILED_PAUSES
    pause: float | None = 0.0
    try:
      while pause is not None:
        if self.wake.wait(pause):
          self.wake.clear()
        if self._is_closed:
          return
        failed_pause = min(max(2 * pause, least), most)
        try:
          pause = self._look()
        except store.StoreError:  # it has warned
          pause = failed_pause
    except BaseException as e:
      self._error = e


def pause_after(start: float, looks: float) -> float:
  """Returns the seconds until the next look: a far store is asked less often.

  Args:
    start: When the last look began, by `time.monotonic`.
    looks: The pause as a multiple of what it took.
  """
  least, most = _PAUSES
  return min(max(looks * (time.monotonic() - start), least), most)
