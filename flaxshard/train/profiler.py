"""Traces of some steps of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import logging
import os

import jax

from flaxshard.state.train_state import TrainState

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def profile_steps(
  profile_steps: tuple[int, ...], workdir: str
) -> Iterator[Callable[[int, TrainState], None]]:
  """Yields what is called before each step, to trace those asked for.

  Args:
    profile_steps: The first and the last step to trace, or ().
    workdir: Where the trace goes, in `profile/`.
  """
  first, last = profile_steps or (0, 0)
  where = os.path.join(workdir, "profile")
  running = False

  def before_step(step: int, state: TrainState) -> None:
    nonlocal running
    if running != (first <= step <= last):
      jax.block_until_ready(state)
      if running:
        stop()
      else:
        jax.profiler.start_trace(where)
        running = True

  def stop() -> None:
    nonlocal running
    jax.profiler.stop_trace()
    running = False
    _log.info("profiled from step %d: %s", first, where)

  try:
    yield before_step
  finally:
    if running:
      stop()
