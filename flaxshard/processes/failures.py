"""Ends all processes of a program when one of them fails, dies or freezes."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
import contextlib
import os
import sys
import types
from typing import NoReturn

import jax

from flaxshard.core import multihost
from flaxshard.processes import watcher as watcher_lib

_watcher: watcher_lib.Watcher | None = None


def watch(
  heartbeat_timeout: float = 60.0, coordinator_address: str | None = None
) -> None:
  """Ends this process when another process of the program fails.

  With one process, or if it was called before, it does nothing. From then on an
  uncaught exception of this process ends all processes; see `share` for
  exceptions that may be caught.

  Args:
    heartbeat_timeout: Seconds without a sign of life after which a process
      counts as lost.
    coordinator_address: `"host:port"` of the coordination service, if known.
      The end of process 0 is then noticed before JAX aborts this process.

  Example:
    >>> watch(heartbeat_timeout=30.0)
  """
  global _watcher
  if _watcher is not None or not jax.distributed.is_initialized():
    return
  if multihost.process_count() == 1:
    return
  watcher = _watcher = watcher_lib.Watcher(heartbeat_timeout)
  watcher.start(coordinator_address)
  # JAX's own handler is older and therefore runs later.
  atexit.register(watcher.stop)
  previous = sys.excepthook

  def end_all(
    kind: type[BaseException],
    error: BaseException,
    traceback: types.TracebackType | None,
  ) -> None:
    previous(kind, error, traceback)
    if watcher.is_active:
      watcher.publish(error)
      # The regular exit would wait for the other processes.
      end_process(130 if issubclass(kind, KeyboardInterrupt) else 1)

  sys.excepthook = end_all


@contextlib.contextmanager
def share() -> Iterator[None]:
  """Publishes an exception of the block, which ends the other processes.

  A process that raises an exception of its own meanwhile is not ended, so an
  error that all processes raise can be caught. `SystemExit` and
  `KeyboardInterrupt` are exceptions too. Blocks can be nested: the exception is
  published by the inner one. Without `watch` it does nothing.

  Example:
    >>> with share():
    ...   pass
  """
  watcher = _watcher
  if watcher is None:
    yield
    return
  watcher.enter()
  try:
    yield
  except BaseException as e:
    watcher.publish(e)
    raise
  finally:
    watcher.leave()


def has_failed() -> bool:
  """Returns whether the last `share` block of this process raised.

  Example:
    >>> has_failed()
    False
  """
  return _watcher is not None and _watcher.has_failed


def end_process(code: int) -> NoReturn:
  """Ends this process at once, after a failure was published.

  The regular exit would wait for the other processes. Process 0 ends last,
  because JAX aborts the others when the coordination service ends.

  Args:
    code: The exit code.
  """
  if _watcher is not None:
    _watcher.acknowledge()
  watcher_lib.flush()
  os._exit(code)
