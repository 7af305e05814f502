"""Checks and locks directories that a program writes in."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import logging
import os
import socket

import filelock
import jax

_log = logging.getLogger(__name__)

_LOCK_FILE = ".lock"


def check_writable(
  argument: str, directory: str, *, create: bool = True
) -> None:
  """Creates a directory if needed and checks that files can be made in it.

  Args:
    argument: Name of the argument, for the error message.
    directory: Path of the directory, on a local or mounted file system.
    create: Whether to create it. If not, a missing directory counts as writable
      if its nearest existing parent is.

  Raises:
    ValueError: `directory` is a URL, or cannot be created or written.

  Example:
    >>> import tempfile
    >>> check_writable("workdir", tempfile.mkdtemp())
  """
  if "://" in directory:
    raise ValueError(
      f"{argument} must be a directory of a file system, got {directory!r}. "
      "Mount the bucket, or use Orbax's CheckpointManager with flaxshard."
      "checkpoint.save_args and flaxshard.checkpoint.restore."
    )
  try:
    existing = directory
    if create:
      os.makedirs(directory, exist_ok=True)
    else:
      existing = os.path.abspath(directory)
      while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    make_and_remove(existing)
  except OSError as e:
    is_file = isinstance(e, FileExistsError) and os.path.isfile(directory)
    reason = "it is a file" if is_file else e.strerror or str(e)
    raise ValueError(
      f"{argument}={directory!r} cannot be written: {reason}."
    ) from e


def make_and_remove(directory: str) -> None:
  """Creates and removes a subdirectory, to find out whether that is possible.

  The permission bits of a directory do not answer that: root may ignore them,
  and a file system that is mounted read-only does not change them.

  Args:
    directory: Path of an existing directory.

  Raises:
    OSError: The subdirectory cannot be created.
  """
  # The name is unique, as other processes may test the same directory now.
  name = f".write_test_{socket.gethostname()}_{os.getpid()}"
  path = os.path.join(directory, name)
  os.mkdir(path)
  os.rmdir(path)


def lock(
  argument: str, directory: str, *, reentrant: bool = False
) -> Callable[[], None]:
  """Locks a directory, so that no other program writes in it.

  The operating system releases the lock when the process ends, even if it is
  killed, so a file `.lock` left behind locks nothing. Of the processes of one
  multi-process program, process 0 holds the lock for all. On a file system
  without locks, a warning is logged and the directory stays unlocked.

  Args:
    argument: Name of the argument, for the error message.
    directory: Path of an existing directory.
    reentrant: Whether this process may lock the directory more than once.

  Returns:
    A function that releases the lock; calling it again does nothing.

  Raises:
    ValueError: Another program holds the lock, or this process holds it and
      `reentrant` is False; the message names the holder.

  Example:
    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> release = lock("workdir", directory)
    >>> release()
    >>> os.listdir(directory)
    []
  """
  if jax.process_index() != 0:
    return lambda: None
  # The resolved path: two paths to one directory share one lock.
  path = os.path.join(os.path.realpath(directory), _LOCK_FILE)
  # A singleton counts how often this process holds the lock; flock would
  # refuse a second one. Threads share it: one may save, another close.
  file_lock = filelock.FileLock(path, is_singleton=True, thread_local=False)
  if file_lock.is_locked and not reentrant:
    raise ValueError(_locked_message(argument, directory, "this process"))
  try:
    file_lock.acquire(blocking=False)
  except filelock.Timeout as e:
    holder = _read_holder(path)
    raise ValueError(_locked_message(argument, directory, holder)) from e
  except (OSError, NotImplementedError) as e:
    _log.warning(
      "%s=%r cannot be locked (%s): do not let two programs write in it",
      argument,
      directory,
      e,
    )
    return lambda: None
  with contextlib.suppress(OSError):  # the disk may be full
    with open(path, "w") as f:
      f.write(f"process {os.getpid()} on {socket.gethostname()}")
  # `close` calls `_release` the first time, and does nothing after that.
  held = contextlib.ExitStack()
  held.callback(_release, file_lock)
  return held.close


def _release(file_lock: filelock.BaseFileLock) -> None:
  if file_lock.lock_counter == 1:
    # Removed while locked, when no other process can have locked the file.
    with contextlib.suppress(OSError):
      os.remove(file_lock.lock_file)
  file_lock.release()


def _read_holder(path: str) -> str:
  try:
    with open(path) as f:
      return f.read() or "another process"
  except OSError:
    return "another process"


def _locked_message(argument: str, directory: str, holder: str) -> str:
  return (
    f"{argument}={directory!r} is being written by {holder}: wait for it, stop "
    "it, or use another directory."
  )
