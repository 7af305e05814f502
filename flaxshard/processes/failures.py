"""Ends all processes of a program when one of them fails.

A process that fails writes its error to the key-value store of JAX's
coordination service, which process 0 runs. Failures are numbered: in each
process a thread waits for the next one. A process that is killed while the
others compute shows in their errors, and process 0 names it. One that is lost
otherwise is found by JAX's heartbeats: JAX then ends the others with SIGABRT
and names its number.
"""

from __future__ import annotations

import atexit
from collections.abc import Collection, Iterator
import contextlib
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import jax

from flaxshard.core import multihost

_log = logging.getLogger(__name__)

_PREFIX = "flaxshard/failures"

# Milliseconds of a wait that an event ends. In JAX each wait that ends by its
# timeout leaves about 20 KiB in this process and 14 KiB in process 0.
_FOREVER_MS = 24 * 3600 * 1000

# Characters of a message: compilers and file systems append long texts.
_TEXT_LENGTH = 2000

# Seconds in which the other processes may raise the same error by themselves,
# and in which the failed one may end what it has begun, such as a save.
_SAME_ERROR_SECONDS = 5.0
_CLEANUP_SECONDS = 8.0

# Seconds in which a process answers a failure.
_ANSWER_SECONDS = 3.0

_HOW_TO_RESUME = (
  "The same command on all processes continues from the last checkpoint."
)

# The number of nested `share` blocks.
_depth = 0

_watcher: _Watcher | None = None


class _Watcher:
  """Publishes failures of this process, and ends it after those of others.

  Attributes:
    error: The exception that this process has published, if any.
    is_clean: Set unless a `share` block that has raised is still being left.
  """

  def __init__(self) -> None:
    self.error: BaseException | None = None
    self.is_clean = threading.Event()
    self.is_clean.set()
    self._index = multihost.process_index()
    self._client = multihost.coordination_client()
    here = f"host {socket.gethostname()}, pid {os.getpid()}"
    self._name = f"process {self._index} ({here})"
    # The last failure, the number of those in which this process has raised an
    # exception, and a permit for each that `_listen` has not looked at.
    self._number = 0
    self._raised = 0
    self._has_raised = threading.Semaphore(0)
    self._thread = threading.Thread(target=self._listen, daemon=True)
    self._thread.start()

  @property
  def is_active(self) -> bool:
    """Whether the processes are connected."""
    return self._thread.is_alive() and jax.distributed.is_initialized()

  def stop(self) -> None:
    """Waits for the other processes at the end of the program."""
    if self.is_active:
      if isinstance(self.error, SystemExit):
        self.end(_exit_code(self.error))
      # The thread still learns of a failure of the others meanwhile.
      jax.distributed.shutdown()
    # Python must not end before the thread has returned from JAX.
    self._thread.join(_SAME_ERROR_SECONDS)

  def publish(self, error: BaseException) -> None:
    """Tells the other processes of an exception of this one."""
    if error is self.error or not self.is_active:
      return
    self.error = error
    if _depth:
      self.is_clean.clear()
    message = str(error)[:_TEXT_LENGTH]
    lines = "".join(traceback.format_exception_only(error)).rstrip()
    text = f"{self._name} failed: {lines[:_TEXT_LENGTH]}"
    failure = json.dumps({"error": message, "text": text})
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      try:
        self._client.key_value_set(f"{_PREFIX}/{self._raised}", failure)
      except jax.errors.JaxRuntimeError:
        # The key exists: another process has failed before.
        first = self._receive(self._raised, timeout_ms=1000)
        # `raise_on_all_processes` puts the process before the message.
        if re.sub(r"^process \d+: ", "", message) != first["error"]:
          _log.error("before the error of this process, %s", first["text"])
    # The thread may not come to it before this process ends.
    self._set(f"answered/{self._raised}/{self._index}")
    self._number = self._raised
    self._raised += 1
    self._has_raised.release()

  def end(self, code: int, text: str = "") -> NoReturn:
    """Ends this process at once, after a failure was published.

    The regular exit would wait for the other processes. Process 0 ends last,
    because JAX aborts the others when the coordination service ends.

    Args:
      code: The exit code.
      text: Why the process ends, for the log.
    """
    messages = [text] if text else []
    silent: set[int] = set()
    if self._index == 0:
      silent = self._wait_for_all(f"answered/{self._number}", _ANSWER_SECONDS)
    if silent:
      names = ", ".join(map(str, sorted(silent)))
      messages.append(f"no answer from process {names}: killed, or frozen")
    if messages:
      _log.error("%s", "\n".join([*messages, _HOW_TO_RESUME]))
    for stream in (sys.stdout, sys.stderr, *logging.getLogger().handlers):
      with contextlib.suppress(Exception):
        stream.flush()
    self._set(f"ended/{self._index}")
    if self._index == 0:
      self._wait_for_all("ended", _CLEANUP_SECONDS, silent)
    os._exit(code)

  def _set(self, key: str) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.key_value_set(f"{_PREFIX}/{key}", "")

  def _wait_for_all(
    self, key: str, seconds: float, lost: Collection[int] = ()
  ) -> set[int]:
    """Returns the others that have not set a key within some seconds."""
    deadline = time.monotonic() + seconds
    missing = {*range(multihost.process_count())} - {self._index, *lost}
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      while missing and time.monotonic() < deadline:
        found = self._client.key_value_dir_get(f"{_PREFIX}/{key}/")
        missing -= {int(name.rpartition("/")[2]) for name, _ in found}
        time.sleep(0.05)
    return missing

  def _listen(self) -> None:
    number = 0
    # JAX raises it when the processes disconnect.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      while True:
        failure = self._receive(number, _FOREVER_MS)
        self._number = number
        self._set(f"answered/{number}/{self._index}")
        # One of this process in the same failure?
        if not self._has_raised.acquire(timeout=_SAME_ERROR_SECONDS):
          self.end(1, f"{self._name} ends: {failure['text']}")
        if not self.is_clean.wait(_CLEANUP_SECONDS):
          lines = traceback.format_exception(self.error)
          self.end(1, f"{self._name} still cleans up after\n{''.join(lines)}")
        number += 1

  def _receive(self, number: int, timeout_ms: int) -> dict[str, str]:
    """Returns a failure, as soon as a process has published it."""
    text = self._client.blocking_key_value_get(
      f"{_PREFIX}/{number}", timeout_ms
    )
    return dict(json.loads(text))


def watch() -> None:
  """Ends this process when another process of the program fails.

  With one process, or if it was called before, it does nothing. From then on an
  uncaught exception of this process ends all processes; see `share` for
  exceptions that may be caught.

  Example:
    >>> watch()
  """
  global _watcher
  if not jax.distributed.is_initialized() or multihost.process_count() == 1:
    return
  if _watcher is not None and _watcher.is_active:
    return
  watcher = _watcher = _Watcher()
  # JAX's own handler is older and therefore runs later.
  atexit.register(watcher.stop)
  previous = sys.excepthook

  def end_all(kind: Any, error: Any, trace: Any) -> None:
    previous(kind, error, trace)
    if watcher.is_active:
      watcher.publish(error)
      watcher.end(_exit_code(error))

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
  global _depth
  if _watcher is not None and not _depth:
    _watcher.error = None
  _depth += 1
  try:
    yield
  except BaseException as e:
    # An error of the cleanup after another one is no failure of its own.
    if _watcher is not None and _watcher.error is None:
      _watcher.publish(e)
    raise
  finally:
    _depth -= 1
    if _watcher is not None and not _depth:
      _watcher.is_clean.set()


def has_failed() -> bool:
  """Returns whether the last `share` block of this process raised.

  Example:
    >>> has_failed()
    False
  """
  return _watcher is not None and _watcher.error is not None


def end(code: int) -> NoReturn:
  """Ends this process at once, if `has_failed`.

  Args:
    code: The exit code.
  """
  assert _watcher is not None
  _watcher.end(code)


def _exit_code(error: BaseException) -> int:
  if isinstance(error, KeyboardInterrupt):
    return 130
  code = error.code if isinstance(error, SystemExit) else 1
  return code if isinstance(code, int) and code else 1
