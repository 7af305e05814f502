"""Measures a run: steps per second, and profiler traces of some steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import logging
import os
import tempfile
import time

import jax

from flaxshard.core import files
from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)


class Timer:
  """Measures steps per second, without the time spent in `paused` blocks.

  Create it right before the first step.

  Args:
    step: The last step before the measurement, 0 for a new run.

  Example:
    >>> timer = Timer(step=100)
    >>> with timer.paused():
    ...   pass  # evaluate
    >>> steps_per_second = timer.lap(102)
  """

  def __init__(self, step: int):
    self._step = step
    self._start = time.monotonic()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Does not count the time within the `with` block.

    Wait for the device before the block: steps still running count as pause.
    """
    start = time.monotonic()
    try:
      yield
    finally:
      self._start += time.monotonic() - start

  def lap(self, step: int) -> float | None:
    """Returns the steps per second since the last lap, None without any step.

    Args:
      step: The step that the device has just finished.
    """
    now = time.monotonic()
    steps, seconds = step - self._step, now - self._start
    self._step, self._start = step, now
    # A clock of low resolution may not have advanced.
    return steps / seconds if steps and seconds > 0 else None


@contextlib.contextmanager
def profile_steps(
  steps: tuple[int, ...], workdir: str
) -> Iterator[Callable[[int, TrainState], None]]:
  """Traces a range of steps with JAX's profiler, in process 0.

  Args:
    steps: The first and the last step to trace, or () for none.
    workdir: The trace is written to its subdirectory `profile/`, that of a
      workdir in a bucket to a new folder on this machine.

  Yields:
    A function `before_step(step, state)`, to be called before each step with
    the state that the step starts from.
  """
  # Traces of processes on one host would overwrite each other.
  first, last = (0, 0) if jax.process_index() else steps or (0, 0)
  path = os.path.join(workdir, "profile")
  if first and files.is_bucket(workdir):
    # The profiler writes to file systems only.
    path = tempfile.mkdtemp(prefix="profile_")
  is_tracing = False
  with contextlib.ExitStack() as trace:

    def before_step(step: int, state: TrainState) -> None:
      nonlocal is_tracing
      # A run may resume within the range, and a worker may jump over its ends.
      wanted = first <= step <= last
      if wanted == is_tracing:
        return
      is_tracing = wanted
      # Steps are dispatched ahead: let those outside of the range finish.
      jax.block_until_ready(state)
      trace.close()
      if wanted:
        trace.callback(_log.info, "profiled from step %d: %s", step, path)
        trace.enter_context(jax.profiler.trace(path))

    # Training may end within the range.
    yield before_step
