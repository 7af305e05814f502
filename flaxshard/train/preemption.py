"""Ctrl-C and SIGTERM as a question that the loop asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def catch_signals() -> Iterator[Callable[[], int | None]]:
  """Catches SIGINT and SIGTERM; yields a function that tells which came.

  The second one ends the process at once, as without a handler: XLA may
  be compiling, and does not take an exception well. Outside of the main thread,
  where Python cannot catch signals, no signal is caught. Where JAX has all
  processes stop at the same step, SIGTERM is left to it, and it gets one for a
  SIGINT, which may have come to this process alone: see `agreed`.
  """
  received: list[int] = []
  before: dict[int, Any] = {}

  def restore() -> None:
    for signum, handler in before.items():
      signal.signal(signum, handler)

  def on_signal(signum: int, frame: Any) -> None:
    del frame
    if received:
      signal.signal(signum, signal.SIG_DFL)
      os.kill(os.getpid(), signum)
    received.append(signum)
    if _preemption_service():
      os.kill(os.getpid(), signal.SIGTERM)

  if threading.current_thread() is threading.main_thread():
    signums = [signal.SIGINT]
    if not _preemption_service():
      signums.append(signal.SIGTERM)
    for signum in signums:
      before[signum] = signal.signal(signum, on_signal)
  try:
    yield lambda: received[0] if received else None
  finally:
    restore()


def agreed(step: int, signum: int | None) -> int | None:
  """Returns the signal for which to stop after this step, or None.

  With `jax.distributed`, JAX tells all processes of a SIGTERM, or another
  notice of its preemption service, that came to one, and finds a step that none
  has passed: until then it is None. To be asked in every step; without
  `jax.distributed`, it is free.

  Args:
    step: The step that was taken.
    signum: The signal that this process has catch_signals, or None.

  Returns:
    Without JAX's preemption service, `signum`. With it, at the step that is
    agreed on, SIGTERM in the processes that have catch_signals none.

  References:
    https://docs.jax.dev/en/latest/_autosummary/jax.experimental.multihost_utils.reached_preemption_sync_point.html
  """
  if not _preemption_service():
    return signum
  if multihost_utils.reached_preemption_sync_point(step):
    return signum or signal.SIGTERM
  return None


def _preemption_service() -> bool:
  enabled = getattr(jax.config, "jax_enable_preemption_service", False)
  return jax.distributed.is_initialized() and enabled
