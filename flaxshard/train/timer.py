"""Time that the loop spends on steps, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import time


class Timer:
  """Counts steps a second, leaving out what happens under `paused`.

  Create it when the first step can start: what came before does not count.

  Args:
    step: The step that has just been finished.
  """

  def __init__(self, step: int):
    self._step = step
    self._since = time.monotonic()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Leaves out a stretch: wait for the device before it."""
    start = time.monotonic()
    try:
      yield
    finally:
      self._since += time.monotonic() - start

  def lap(self, step: int) -> float | None:
    """Returns the steps a second since the last lap; None if there were none.

    Args:
      step: The step that the device has just finished.
    """
    now = time.monotonic()
    steps, seconds = step - self._step, now - self._since
    self._step, self._since = step, now
    return steps / seconds if steps and seconds > 0 else None
