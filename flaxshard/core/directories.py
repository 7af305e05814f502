"""Checks and locks directories that a program writes in."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import logging
import os
import socket
import threading

import filelock
import jax

from flaxshard.core import bucket_lock
from flaxshard.core import files

_log = logging.getLogger(__name__)

_LOCK_FILE = ".lock"

# Seconds in which a bucket must answer. Its client libraries try again for
# minutes, for example without a network.
_BUCKET_TIMEOUT = 30.0


def check_writable(
  argument: str, directory: str, *, create: bool = True
) -> None:
  """Creates a directory if needed and checks that files can be made in it.

  Args:
    argument: Name of the argument, for the error message.
    directory: Path of the directory, on a file system or in a bucket.
    create: Whether to create it. If not, a missing directory counts as writable
      if its nearest existing parent is.

  Raises:
    ValueError: `directory` cannot be created or written, is a URL of another
      kind than `gs://` and `s3://`, or its bucket does not answer.
    ImportError: A package for buckets is not installed.

  Example:
    >>> import tempfile
    >>> check_writable("workdir", tempfile.mkdtemp())
  """
  if files.is_bucket(directory):
    _check_bucket(argument, directory)
    return
  if "://" in directory:
    raise ValueError(
      f"{argument} must be a directory of a file system, gs://bucket/name or "
      f"s3://bucket/name, got {directory!r}."
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


def _check_bucket(argument: str, directory: str) -> None:
  """Writes and removes an object in a directory of a bucket.

  Raises:
    ValueError: That is not possible, or takes too long.
    ImportError: A package for buckets is not installed.
  """
  files.filesystem(directory)
  errors: list[Exception] = []

  def try_to_write() -> None:
    try:
      files.check_bucket(directory)
      make_and_remove(directory)
    except Exception as e:
      errors.append(e)

  # The clients of buckets have no limit for all of their attempts.
  thread = threading.Thread(target=try_to_write, daemon=True)
  thread.start()
  thread.join(_BUCKET_TIMEOUT)
  if thread.is_alive():
    reason = f"the bucket did not answer within {_BUCKET_TIMEOUT:.0f} s"
  elif errors:
    reason = str(errors[0]) or repr(errors[0])
  else:
    return
  raise ValueError(
    f"{argument}={directory!r} cannot be written: {reason}."
  ) from (errors[0] if errors else None)


def make_and_remove(directory: str) -> None:
  """Creates and removes a subdirectory, to find out whether that is possible.

  In a bucket, creates and removes an object.

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
  if files.is_bucket(directory):
    files.write_bytes(path, b"")
    files.remove(path)
    return
  os.mkdir(path)
  os.rmdir(path)


def lock(
  argument: str, directory: str, *, reentrant: bool = False
) -> Callable[[], None]:
  """Locks a directory, so that no other program writes in it.

  The operating system releases the lock when the process ends, even if it is
  killed, so a file `.lock` left behind locks nothing. Of the processes of one
  multi-process program, process 0 holds the lock for all. On a file system
  without locks, a warning is logged and the directory stays unlocked. In a
  bucket, the lock is an object that is renewed; see `bucket_lock`.

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
  if files.is_bucket(directory):
    return _lock_in_bucket(argument, directory, reentrant)
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


def check_lock(argument: str, directory: str) -> None:
  """Raises if this process has locked a directory, and has lost the lock.

  Only in a bucket can that happen, to a process that could not renew the lock
  for `bucket_lock.LEASE_SECONDS`, such as one on a computer that slept.

  Args:
    argument: Name of the argument, for the error message.
    directory: Path of the directory.

  Raises:
    ValueError: Another program has taken the lock over; the message names it.
    OSError: The lock may be lost, and the bucket does not answer.
  """
  if not files.is_bucket(directory):
    return
  try:
    bucket_lock.check(os.path.join(directory, _LOCK_FILE))
  except bucket_lock.LockedError as e:
    raise ValueError(_locked_message(argument, directory, str(e))) from e


def _lock_in_bucket(
  argument: str, directory: str, reentrant: bool
) -> Callable[[], None]:
  try:
    release = bucket_lock.acquire(
      os.path.join(directory, _LOCK_FILE), reentrant=reentrant
    )
  except bucket_lock.LockedError as e:
    raise ValueError(_locked_message(argument, directory, str(e))) from e
  except OSError as e:
    raise ValueError(f"{argument}={directory!r} cannot be locked: {e}.") from e
  held = contextlib.ExitStack()
  held.callback(release)
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
