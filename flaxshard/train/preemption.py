"""Stops a training run on Ctrl-C, SIGTERM or JAX's notice of preemption.

The training loop asks after each step whether to stop, and saves a checkpoint
before it does.
"""

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
  """Catches SIGINT and SIGTERM within the `with` block.

  A second signal ends the process at once, as without this handler. Outside of
  the main thread no signal is caught, because Python cannot do that.

  With JAX's preemption service (`jax.distributed`), SIGTERM is left to JAX,
  which reports it to all processes. A SIGINT, which may have reached this
  process alone, is passed on to JAX as SIGTERM; see `agree_on_signal`.

  Yields:
    A function that returns the number of the first signal, or None.
  """
  received: list[int] = []
  previous_handlers: dict[int, Any] = {}

  def on_signal(signum: int, frame: Any) -> None:
    del frame
    if received:
      # The default handler ends the process. An exception raised here could
      # hang: XLA may be compiling.
      signal.signal(signum, signal.SIG_DFL)
      os.kill(os.getpid(), signum)
    received.append(signum)
    if _uses_preemption_service():
      os.kill(os.getpid(), signal.SIGTERM)

  if threading.current_thread() is threading.main_thread():
    signums: list[int] = [signal.SIGINT]
    if not _uses_preemption_service():
      signums.append(signal.SIGTERM)
    for signum in signums:
      previous_handlers[signum] = signal.signal(signum, on_signal)
  try:
    yield lambda: received[0] if received else None
  finally:
    for signum, handler in previous_handlers.items():
      signal.signal(signum, handler)


def agree_on_signal(step: int, signum: int | None) -> int | None:
  """Returns the signal to stop for after this step, the same step everywhere.

  Call it after every step. Without JAX's preemption service it costs nothing.

  Args:
    step: The step just taken.
    signum: The signal that this process has received, or None.

  Returns:
    Without the preemption service, `signum`. With it, None until a step that no
    process has passed; at that step `signum`, or SIGTERM in processes that
    received none.

  References:
    https://docs.jax.dev/en/latest/_autosummary/jax.experimental.multihost_utils.reached_preemption_sync_point.html
  """
  if not _uses_preemption_service():
    return signum
  if multihost_utils.reached_preemption_sync_point(step):
    return signum or signal.SIGTERM
  return None


def _uses_preemption_service() -> bool:
  return (
    jax.distributed.is_initialized()
    and jax.config.jax_enable_preemption_service  # type: ignore[attr-defined]
  )
