"""Workdirs on a file system or in a bucket: their paths, and their locks.

`etils.epath` reads and writes both kinds, as in Orbax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import functools
import logging
import os
import socket
import tempfile

from etils import epath
import filelock
import jax

from flaxshard.core import checks

_log = logging.getLogger(__name__)

_LOCK_FILE = ".lock"

Path = str | os.PathLike[str]


def is_bucket(path: Path) -> bool:
  """Returns whether a path is in a bucket: `gs://...`."""
  return os.fspath(path).startswith("gs://")


def absolute(path: Path) -> str:
  """Returns an absolute path without a slash at its end.

  Args:
    path: A path; `~` is the home directory.

  Raises:
    ValueError: The path is empty, or a URL of another kind than `gs://`.
    ImportError: A package for buckets is not installed.

  Example:
    >>> absolute("/tmp/run/")
    '/tmp/run'
  """
  name = os.fspath(path)
  if not name:
    raise ValueError("the path is empty; '.' is the current directory.")
  if is_bucket(name):
    _prepare_buckets(name)
    return f"gs://{os.path.normpath(name.removeprefix('gs://'))}"
  # `pathlib` makes gs:/bucket of gs://bucket: a folder here of that name.
  if name.partition("/")[0].endswith(":"):
    raise ValueError(
      f"{name!r} must be a path of a file system, or a str gs://bucket/name."
    )
  return os.path.abspath(os.path.expanduser(name))


def _prepare_buckets(path: str) -> None:
  with checks.extra(repr(path), "gcs"):
    import fsspec
    import gcsfs  # noqa: F401
    import google.cloud.storage  # noqa: F401
  # Other processes and TensorStore write in the bucket, so a list of objects
  # that was kept in memory would be outdated.
  settings = fsspec.config.conf.setdefault("gcs", {})
  settings.setdefault("use_listings_cache", False)


def files_in(directory: Path) -> Iterator[epath.Path]:
  """Returns the paths of all files below a directory."""
  for path in epath.Path(directory).iterdir():
    if path.is_dir():
      yield from files_in(path)
    else:
      yield path


def write_text(path: Path, text: str) -> None:
  """Writes a file; after an error or a kill, it has its old content."""
  target = epath.Path(path)
  if is_bucket(path):
    target.write_text(text)  # a reader sees the old or the new object
    return
  temporary = target.with_name(f"{target.name}.tmp")
  temporary.write_text(text)
  temporary.replace(target)


def check_writable(
  argument: str, directory: str, *, create: bool = True
) -> None:
  """Creates a directory if needed and checks that files can be made in it.

  A bucket is not tried: the first write says what is wrong.

  Args:
    argument: Name of the argument, for the error message.
    directory: Absolute path of the directory.
    create: Whether to create it. If not, a missing directory counts as writable
      if its nearest existing parent is.

  Raises:
    ValueError: `directory` cannot be created or written.

  Example:
    >>> check_writable("workdir", tempfile.mkdtemp())
  """
  if is_bucket(directory):
    return
  existing = directory
  try:
    if create:
      os.makedirs(directory, exist_ok=True)
    while not os.path.lexists(existing):
      existing = os.path.dirname(existing)
    # The permission bits do not tell: root may ignore them.
    with tempfile.TemporaryDirectory(prefix=".write_test_", dir=existing):
      pass
  except OSError as e:
    raise ValueError(
      f"{argument}={directory!r} cannot be written: {e.strerror}."
    ) from e


def lock(
  argument: str, directory: str, *, reentrant: bool = False
) -> Callable[[], None]:
  """Locks a directory, so that no other program writes in it.

  The operating system releases the lock when the process ends, even if it is
  killed, so a file `.lock` left behind locks nothing. Of the processes of one
  multi-process program, process 0 holds the lock for all. A bucket, and a file
  system without locks, stays unlocked.

  Args:
    argument: Name of the argument, for the error message.
    directory: Path of an existing directory.
    reentrant: Whether this process may lock the directory more than once.

  Returns:
    A function that releases the lock, to be called once.

  Raises:
    ValueError: Another program holds the lock, or this process holds it and
      `reentrant` is False; the message names the holder.
  """
  if jax.process_index() != 0 or is_bucket(directory):
    return lambda: None
  # The resolved path: two paths to one directory share one lock.
  path = os.path.join(os.path.realpath(directory), _LOCK_FILE)
  # A singleton counts how often this process holds the lock; flock would
  # refuse a second one. Threads share it: one may save, another close.
  file_lock = filelock.FileLock(path, is_singleton=True, thread_local=False)
  holder = "this process" if file_lock.is_locked and not reentrant else ""
  try:
    if not holder:
      file_lock.acquire(blocking=False)
  except filelock.Timeout:
    with contextlib.suppress(OSError), open(path) as f:
      holder = f.read()
    holder = holder or "another process"
  except (OSError, NotImplementedError) as e:
    _log.warning(
      "%s=%r cannot be locked (%s): do not let two programs write in it",
      argument,
      directory,
      e,
    )
    return lambda: None
  if holder:
    raise ValueError(
      f"{argument}={directory!r} is being written by {holder}: wait for it, "
      "stop it, or use another directory."
    )
  with contextlib.suppress(OSError), open(path, "w") as f:  # a full disk
    f.write(f"process {os.getpid()} on {socket.gethostname()}")
  return functools.partial(_release, file_lock)


def _release(file_lock: filelock.BaseFileLock) -> None:
  if file_lock.lock_counter == 1:
    # Removed while locked, when no other process can have locked the file.
    with contextlib.suppress(OSError):
      os.remove(file_lock.lock_file)
  file_lock.release()
