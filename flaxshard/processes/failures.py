"""Ends all processes of a program when one of them fails.

A process that fails writes its error to the key-value store of JAX's
coordination service, which process 0 runs. Failures are numbered: in each
process a thread waits for the next one. A process that is killed while the
others compute shows in their errors, and does not answer them. One that is lost
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
import types
from typing import NoReturn

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

# Seconds after which a process says that it waits.
_NOTICE_SECONDS = 15.0

_HOW_TO_RESUME = (
  "The same command on all processes continues from the last checkpoint."
)


# The number of nested `share` blocks.
_depth = 0

_watcher: _Watcher | None = None


class Notice:
  """Logs a message if its block takes longer than some seconds.

  Args:
    message: The message.
  """

  def __init__(self, message: str):
    self._message = message
    self._begin = threading.Event()
    self._end = threading.Event()
    # Now: at the end of a program, Python starts no thread any more.
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self) -> None:
    self._begin.wait()
    if not self._end.wait(_NOTICE_SECONDS):
      _log.warning(self._message)

  def __enter__(self) -> None:
    self._begin.set()

  def __exit__(self, *error: object) -> None:
    self._end.set()


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
    self._count = multihost.process_count()
    self._client = multihost.coordination_client()
    here = f"host {socket.gethostname()}, pid {os.getpid()}"
    self._name = f"process {self._index} ({here})"
    # The failures in which this process has raised an exception.
    self._raised = 0
    self._has_raised = threading.Condition()
    self._notice = Notice(
      f"{self._name} has reached the end of the program and waits for the "
      "other processes"
    )
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
      with self._notice:
        # The thread still learns of a failure of the others meanwhile.
        jax.distributed.shutdown()
    # Python must not end before the thread has returned from JAX.
    self._thread.join(_ANSWER_SECONDS)

  def publish(self, error: BaseException) -> None:
    """Tells the other processes of an exception of this one."""
    if error is self.error or not self.is_active:
      return
    self.error = error
    if _depth:
      self.is_clean.clear()
    failure = {
      "error": str(error)[:_TEXT_LENGTH],
      "text": f"{self._name} failed: {_describe(error)}",
    }
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      if not self._set(str(self._raised), json.dumps(failure)):
        first = self._receive(self._raised)
        # `raise_on_all_processes` puts the process before the message.
        message = re.sub(r"^process \d+: ", "", str(error))[:_TEXT_LENGTH]
        if not message or message != first["error"]:
          _log.error("before the error of this process, %s", first["text"])
    with self._has_raised:
      self._raised += 1
      self._has_raised.notify_all()

  def end(
    self, code: int, text: str = "", number: int | None = None
  ) -> NoReturn:
    """Ends this process at once, after a failure was published.

    The regular exit would wait for the other processes. Process 0 ends last,
    because JAX aborts the others when the coordination service ends.

    Args:
      code: The exit code.
      text: Why the process ends, for the log.
      number: The number of the failure; None for that of this process.
    """
    if number is None:
      number = self._raised - 1
    silent: set[int] = set()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._set(f"answered/{number}/{self._index}")
      silent = self._wait_for_all(f"answered/{number}", _ANSWER_SECONDS)
    if silent:
      names = ", ".join(map(str, sorted(silent)))
      text += f"\nno answer from process {names}: killed, or frozen"
    if text:
      _log.error("%s\n%s", text.strip(), _HOW_TO_RESUME)
    for stream in (sys.stdout, sys.stderr, *logging.getLogger().handlers):
      with contextlib.suppress(Exception):
        stream.flush()
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._set(f"ended/{self._index}")
      if self._index == 0:
        self._wait_for_all("ended", _CLEANUP_SECONDS, silent)
    os._exit(code)

  def _listen(self) -> None:
    number = 0
    # JAX raises it when the processes disconnect.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      while True:
        failure = self._receive(number)
        self._set(f"answered/{number}/{self._index}")
        if not self._raises(number):
          self.end(1, f"{self._name} ends: {failure['text']}", number)
        if not self.is_clean.wait(_CLEANUP_SECONDS):
          lines = traceback.format_exception(self.error)
          self.end(1, f"{self._name} still cleans up after\n{''.join(lines)}")
        number += 1

  def _raises(self, number: int) -> bool:
    """Waits for an exception of this process in a failure."""
    with self._has_raised:
      return self._has_raised.wait_for(
        lambda: self._raised > number, _SAME_ERROR_SECONDS
      )

  def _receive(self, number: int) -> dict[str, str]:
    """Returns a failure, as soon as a process has published it."""
    text = self._client.blocking_key_value_get(
      f"{_PREFIX}/{number}", _FOREVER_MS
    )
    return dict(json.loads(text))

  def _set(self, key: str, value: str = "") -> bool:
    """Sets a value, unless the key has one; returns whether it was set."""
    try:
      self._client.key_value_set(f"{_PREFIX}/{key}", value)
    except jax.errors.JaxRuntimeError as e:
      # The error has no code apart from its message.
      if not str(e).startswith("ALREADY_EXISTS"):
        raise
      return False
    return True

  def _wait_for_all(
    self, key: str, seconds: float, lost: Collection[int] = ()
  ) -> set[int]:
    """Returns the processes that have not set a key within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
      found = self._client.key_value_dir_get(f"{_PREFIX}/{key}/")
      present = {int(name.rpartition("/")[2]) for name, _ in found}
      missing = {*range(self._count)} - present - {*lost}
      if not missing or time.monotonic() > deadline:
        return missing
      time.sleep(0.05)


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

  def end_all(
    kind: type[BaseException],
    error: BaseException,
    traceback: types.TracebackType | None,
  ) -> None:
    previous(kind, error, traceback)
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
  """Ends this process at once, after a failure was published.

  Args:
    code: The exit code.
  """
  if _watcher is not None:
    _watcher.end(code)
  os._exit(code)


def _exit_code(error: BaseException) -> int:
  if isinstance(error, KeyboardInterrupt):
    return 130
  code = error.code if isinstance(error, SystemExit) else 1
  return code if isinstance(code, int) and code else 1


def _describe(error: BaseException) -> str:
  lines = [*str(error).splitlines()[1:], *getattr(error, "__notes__", ())]
  details = "\n".join(lines)[:_TEXT_LENGTH]
  return f"{multihost.summarize_error(error)}\n{details}".rstrip()
