"""Locks directories in buckets, which have no locks of an operating system.

The lock is an object `.lock` that its holder renews. Every write of it has a
precondition (a generation in Google Cloud Storage, an ETag in S3), so of two
programs only one can create it, renew it or take it over. It is stale once it
has not changed for `LEASE_SECONDS`, as measured by the program that waits for
it: the clocks of machines are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
from typing import Any, NamedTuple
import uuid

from flaxshard.core import files

_log = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
LEASE_SECONDS = 40.0

# The locks that this process holds, by path.
_held: dict[str, _Lease] = {}
# The tokens of processes that are known to have ended.
_ended: set[str] = set()


class LockedError(Exception):
  """Another program holds the lock; the message names the holder."""


class _Stored(NamedTuple):
  """The content of an object, and what names this version of it."""

  content: bytes
  version: Any


def acquire(path: str, *, reentrant: bool = False) -> Callable[[], None]:
  """Acquires a lock, and keeps it until it is released or the process ends.

  If another program holds the lock, waits until it renews it, or the lock is
  stale. The lock of a process that has ended on this machine is stale at once.

  Args:
    path: Path of the object in a bucket.
    reentrant: Whether this process may hold the lock already.

  Returns:
    A function that releases the lock.

  Raises:
    LockedError: Another program holds the lock, or this process does and
      `reentrant` is False.
    OSError: The object cannot be read or written.
  """
  lease = _held.get(path)
  if lease is None:
    lease = _held[path] = _create_or_take_over(path)
  elif not reentrant:
    raise LockedError("this process")
  lease.count += 1
  return lease.release


def check(path: str) -> None:
  """Raises if this process held a lock and has lost it.

  Args:
    path: Path of the object in a bucket.

  Raises:
    LockedError: Another program has taken the lock over.
  """
  lease = _held.get(path)
  if lease is not None and lease.lost:
    raise LockedError(lease.lost)


def _create_or_take_over(path: str) -> _Lease:
  content = _describe_self(0)
  found = _read(path)
  if found is None:
    version = _write(path, content, None)
    if version is not None:
      return _Lease(path, version)
    found = _read(path)
  if found is not None and not _has_ended(found.content):
    _log.info(
      "%s is held by %s: waiting up to %.0f s for a sign of life",
      path,
      _holder(found.content),
      LEASE_SECONDS,
    )
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
      time.sleep(1.0)
      now = _read(path)
      if now is None:
        found = None
        break
      if now.version != found.version:
        raise LockedError(_holder(now.content))
  version = _write(path, content, found and found.version)
  if version is None:
    winner = _read(path)
    raise LockedError(_holder(winner.content) if winner else "another process")
  if found is not None:
    _ended.add(_parse(found.content).get("token", ""))
    _log.warning("%s: took over from %s", path, _holder(found.content))
  return _Lease(path, version)


class _Lease:
  """A lock that this process holds and renews from a thread.

  Attributes:
    count: How often this process has acquired the lock.
    lost: Who has taken the lock over; empty while this process holds it.
  """

  def __init__(self, path: str, version: Any):
    self.count = 0
    self.lost = ""
    self._path = path
    self._version = version
    self._released = threading.Event()
    self._thread = threading.Thread(
      target=self._renew, name="flaxshard_lock", daemon=True
    )
    self._thread.start()

  def _renew(self) -> None:
    renewals = 0
    while not self._released.wait(RENEW_SECONDS):
      renewals += 1
      try:
        version = _write(self._path, _describe_self(renewals), self._version)
        winner = _read(self._path) if version is None else None
      except OSError as e:
        _log.warning("%s cannot be renewed: %s", self._path, e)
        continue
      if version is None:
        self.lost = _holder(winner.content) if winner else "another process"
        _log.error("%s was taken over by %s", self._path, self.lost)
        return
      self._version = version

  def release(self) -> None:
    """Releases the lock once for each time that it was acquired."""
    self.count -= 1
    if self.count:
      return
    self._released.set()
    self._thread.join()
    _held.pop(self._path, None)
    if not self.lost:
      # Otherwise it becomes stale.
      with contextlib.suppress(OSError):
        _delete(self._path, self._version)


@functools.cache
def _token() -> str:
  return uuid.uuid4().hex


@functools.cache
def _process_space() -> str:
  """Returns what names the set of processes that `os.kill` can reach.

  Containers on one machine have process numbers of their own.
  """
  try:
    with open("/proc/sys/kernel/random/boot_id") as f:
      return f"{f.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
  except OSError:
    return ""  # not Linux


def _describe_self(renewals: int) -> bytes:
  return json.dumps(
    {
      "holder": f"process {os.getpid()} on {socket.gethostname()}",
      "pid": os.getpid(),
      "process_space": _process_space(),
      "token": _token(),
      "renewals": renewals,
    }
  ).encode()


def _parse(content: bytes) -> dict[str, Any]:
  try:
    return dict(json.loads(content))
  except (ValueError, TypeError):
    return {}


def _holder(content: bytes) -> str:
  return str(_parse(content).get("holder", "another process"))


def _has_ended(content: bytes) -> bool:
  """Returns whether the holder is a process of this machine that has ended."""
  holder = _parse(content)
  if holder.get("token") in _ended:
    return True
  space, pid = holder.get("process_space"), holder.get("pid")
  if not space or space != _process_space() or not isinstance(pid, int):
    return False
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return True
  except OSError:
    return False  # it exists, but belongs to another user
  return pid == os.getpid() and holder.get("token") != _token()


def _write(path: str, content: bytes, version: Any) -> Any:
  """Writes the object if it has the given version.

  Args:
    path: Path of the object.
    content: The new content, different from any other.
    version: The version to replace; None if there must be no object.

  Returns:
    The new version, or None if the object has another version.
  """
  write = _write_gcs if path.startswith("gs://") else _write_s3
  try:
    return write(path, content, version)
  except Exception as e:
    # After a lost answer the client writes again, and then its own first
    # attempt violates the precondition.
    now = _read(path)
    if now is not None and now.content == content:
      return now.version
    if (now and now.version) != version:
      return None
    raise OSError(f"{path}: {e}") from e


def _read(path: str) -> _Stored | None:
  """Returns the object, or None if there is none."""
  read = _read_gcs if path.startswith("gs://") else _read_s3
  try:
    return read(path)
  except FileNotFoundError:
    return None
  except Exception as e:
    raise OSError(f"{path}: {e}") from e


def _delete(path: str, version: Any) -> None:
  """Deletes the object if it has the given version."""
  if path.startswith("gs://"):
    from google.api_core import exceptions

    try:
      _blob(path).delete(if_generation_match=version, **_gcs_options())
    except exceptions.GoogleAPIError as e:
      raise OSError(f"{path}: {e}") from e
  else:
    now = _read(path)
    if now is not None and now.version == version:
      files.remove(path)


def _blob(path: str) -> Any:
  bucket, _, name = path.partition("://")[2].partition("/")
  return _gcs_client().bucket(bucket).blob(name)


@functools.cache
def _gcs_client() -> Any:
  from google.cloud import storage

  return storage.Client()


def _gcs_options() -> dict[str, Any]:
  """Returns options that limit the time of a request: a lease is short."""
  from google.cloud.storage import retry

  return {"timeout": 5.0, "retry": retry.DEFAULT_RETRY.with_timeout(10.0)}


def _write_gcs(path: str, content: bytes, version: Any) -> Any:
  blob = _blob(path)
  blob.upload_from_string(
    content, if_generation_match=version or 0, **_gcs_options()
  )
  return blob.generation


def _read_gcs(path: str) -> _Stored:
  from google.api_core import exceptions

  blob = _blob(path)
  options = _gcs_options()
  while True:
    try:
      blob.reload(**options)
      content = blob.download_as_bytes(
        if_generation_match=blob.generation, **options
      )
    except exceptions.NotFound as e:
      raise FileNotFoundError(path) from e
    except exceptions.PreconditionFailed:
      continue  # renewed between the two requests
    return _Stored(content, blob.generation)


def _write_s3(path: str, content: bytes, version: Any) -> Any:
  bucket, _, name = path.partition("://")[2].partition("/")
  condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
  answer = files.filesystem(path).call_s3(
    "put_object", Bucket=bucket, Key=name, Body=content, **condition
  )
  return answer["ETag"]


def _read_s3(path: str) -> _Stored:
  fs = files.filesystem(path)
  name = path.partition("://")[2]
  while True:
    version = fs.info(name)["ETag"]
    content = fs.cat_file(name)
    # Otherwise renewed between the two requests.
    if fs.info(name)["ETag"] == version:
      return _Stored(content, version)
