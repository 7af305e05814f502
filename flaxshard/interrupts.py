"""Ctrl-C and SIGTERM as a question that the loop asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import threading
from typing import Any


@contextlib.contextmanager
def caught() -> Iterator[Callable[[], int | None]]:
  """Catches SIGINT and SIGTERM; yields a function that tells which came.

  The second one ends the process at once, as if nothing had caught it: XLA may
  be compiling, and does not take an exception well. Outside of the main thread,
  where Python cannot catch signals, nothing is caught.
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

  if threading.current_thread() is threading.main_thread():
    for signum in (signal.SIGINT, signal.SIGTERM):
      before[signum] = signal.signal(signum, on_signal)
  try:
    yield lambda: received[0] if received else None
  finally:
    restore()
