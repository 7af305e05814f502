"""One program at a time writes in a directory."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import errno
import logging
import os
import socket

try:
  import fcntl
except ImportError:  # not on Windows
  fcntl = None  # type: ignore[assignment]

import jax

_log = logging.getLogger(__name__)

_NAME = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)

# What this process holds: the file, and how many hold it.
_held: dict[str, list[int]] = {}


def acquire(
  argument: str, directory: str, *, again: bool = False
) -> Callable[[], None]:
  """Locks a directory until the process ends, however it ends.

  The lock is an advisory one on a file `.lock`, which says who holds it. Of the
  processes of one program, the first has it for all. Where a file system or the
  operating system has no such locks, the log says so, and that is all.

  Args:
    argument: What the directory is called in the error.
    directory: The directory; it exists.
    again: Whether this process may hold it more than once.

  Returns:
    A function that gives it back.

  Raises:
    ValueError: Another program writes there, or this one does and `again` is
      False.

  References:
    https://man7.org/linux/man-pages/man2/flock.2.html

  Example:
    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> release = acquire("workdir", directory)
    >>> release()
    >>> os.listdir(directory)
    []
  """
  if jax.process_index() != 0:
    return lambda: None
  if fcntl is None:
    _log.warning(
      "%s=%r: no locks here; two runs would mix", argument, directory
    )
    return lambda: None
  path = os.path.join(os.path.realpath(directory), _NAME)
  if path in _held:
    if not again:
      raise ValueError(_taken(argument, directory, "this process"))
    _held[path][1] += 1
    return _once(path)
  try:
    file = _lock(path)
  except OSError as e:
    if e.errno in _TAKEN:
      raise ValueError(_taken(argument, directory, _holder(path))) from e
    _log.warning(
      "%s=%r cannot be locked (%s); two runs in it would mix",
      argument,
      directory,
      e.strerror or e,
    )
    return lambda: None
  _held[path] = [file, 1]
  return _once(path)


def _lock(path: str) -> int:
  """Returns the locked file; it is the one that has that name."""
  assert fcntl is not None
  while True:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # Who had it may have removed the file since it was opened.
      if _is_named(file, path):
        break
    except BaseException:
      os.close(file)
      raise
    os.close(file)
  with contextlib.suppress(OSError):  # a full disk can be locked
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
  return file


def _is_named(file: int, path: str) -> bool:
  try:
    return os.path.samestat(os.fstat(file), os.stat(path))
  except FileNotFoundError:
    return False


def _once(path: str) -> Callable[[], None]:
  """Returns a function that releases the lock when it is first called."""
  left = [path]
  return lambda: _release(left.pop()) if left else None


def _release(path: str) -> None:
  held = _held.get(path)
  if held is None:
    return
  held[1] -= 1
  if held[1] == 0:
    del _held[path]
    with contextlib.suppress(OSError):
      os.remove(path)
    os.close(held[0])


def _holder(path: str) -> str:
  try:
    with open(path) as f:
      return f.read() or "another process"
  except OSError:
    return "another process"


def _taken(argument: str, directory: str, holder: str) -> str:
  return (
    f"{argument}={directory!r} is being written by {holder}: wait for it, stop "
    "it, or take another directory."
  )


def _forget() -> None:
  """Closes the files in a forked child, which would hold the locks."""
  for file, _ in _held.values():
    os.close(file)
  _held.clear()


if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_forget)
