"""Stops a training run on Ctrl-C, SIGTERM or JAX's notice of preemption.

The training loop asks after each step whether to stop, and saves a checkpoint
before it does. No signal interrupts a save.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import logging
import math
import os
import signal
import threading
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

_log = logging.getLogger(__name__)


# Signals in quick succession are one request: a key that is held down, or a
# signal that reaches the process both directly and through its parent.
_SAME_REQUEST_SECONDS = 1.0


class StopRequest:
  """The signals that a run has received.

  Attributes:
    signum: Number of the first signal, or None.
  """

  def __init__(self) -> None:
    self.signum: int | None = None
    self._count = 0
    self._last_time = -math.inf
    self._is_saving = False

  @contextlib.contextmanager
  def saving(self) -> Iterator[None]:
    """Lets no signal interrupt the `with` block."""
    self._is_saving = True
    try:
      yield
    finally:
      self._is_saving = False

  def is_repeated(self) -> bool:
    """Returns whether a signal of now belongs to the last one; notes it."""
    now = time.monotonic()
    before, self._last_time = self._last_time, now
    return now - before < _SAME_REQUEST_SECONDS

  def receive(self, signum: int) -> None:
    """Handles a signal; the third one raises, except while saving."""
    if self.is_repeated():
      return
    self._count += 1
    name = signal.Signals(signum).name
    if self._count == 1:
      self.signum = signum
      _log.warning("%s: stopping after this step, with a checkpoint", name)
    elif self._count == 2 or self._is_saving:
      _log.warning(
        "%s again: stopping with a checkpoint; a third signal ends the run "
        "without one, but none interrupts a save",
        name,
      )
    elif signum == signal.SIGINT:
      raise KeyboardInterrupt
    else:
      raise SystemExit(128 + signum)


@contextlib.contextmanager
def catch_signals() -> Iterator[StopRequest]:
  """Catches SIGINT and SIGTERM within the `with` block.

  The first signal is noted, the second one answered with a log line. The third
  one raises KeyboardInterrupt, or SystemExit for SIGTERM, but never while a
  checkpoint is being written. Python handles a signal between two of its own
  instructions, so none of them ends a compilation; SIGQUIT does. Outside of
  the main thread no signal is caught, because Python cannot do that.

  With JAX's preemption service (`jax.distributed`), SIGTERM is left to JAX,
  which reports it to all processes. A SIGINT, which may have reached this
  process alone, is passed on to JAX as SIGTERM; see `agree_on_signal`.

  A key that is still held down after the block is no new request.

  Yields:
    The request to stop, with the number of the first signal.
  """
  request = StopRequest()
  before: dict[int, Any] = {}
  has_ended = False

  def on_signal(signum: int, frame: Any) -> None:
    del frame
    if has_ended:
      if not request.is_repeated():
        signal.signal(signum, before[signum])
        os.kill(os.getpid(), signum)
      return
    is_first = request.signum is None
    request.receive(signum)
    if is_first and _uses_preemption_service():
      os.kill(os.getpid(), signal.SIGTERM)

  if threading.current_thread() is threading.main_thread():
    before[signal.SIGINT] = signal.signal(signal.SIGINT, on_signal)
    if not _uses_preemption_service():
      before[signal.SIGTERM] = signal.signal(signal.SIGTERM, on_signal)
  try:
    yield request
  finally:
    has_ended = True
    if request.signum is None:
      for signum, handler in before.items():
        signal.signal(signum, handler)


def agree_on_signal(step: int, request: StopRequest) -> int | None:
  """Returns the signal to stop for after this step, the same step everywhere.

  Call it after every step. Without JAX's preemption service it costs nothing.

  Args:
    step: The step just taken.
    request: The signals that this process has received.

  Returns:
    Without the preemption service, the first signal of this process, or None.
    With it, None until a step that no process has passed; at that step the
    first signal, or SIGTERM in processes that received none.

  References:
    https://docs.jax.dev/en/latest/_autosummary/jax.experimental.multihost_utils.reached_preemption_sync_point.html
  """
  if not _uses_preemption_service():
    return request.signum
  if multihost_utils.reached_preemption_sync_point(step):
    # Read only now: the signal may have come since the call.
    return request.signum or signal.SIGTERM
  return None


def _uses_preemption_service() -> bool:
  return (
    jax.distributed.is_initialized()
    and jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
  )
