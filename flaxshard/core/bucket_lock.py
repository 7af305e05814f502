"""Locks directories in buckets, which have no locks of an operating system.

The lock is an object `.lock` that its holder renews. TensorStore writes it on a
condition (a generation in Google Cloud Storage, an ETag in S3), so of two
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
from typing import Any
import uuid

import tensorstore as ts

from flaxshard.core import conditional_objects
from flaxshard.core import local_processes

_log = logging.getLogger(__name__)

# Three renewals in a row may fail before the lock is stale. A shorter lease
# would be lost in a short failure of the network, and a longer one would delay
# a run that resumes on another machine.
RENEW_SECONDS = 10.0
LEASE_SECONDS = 40.0

# The locks that this process holds, by path.
_held: dict[str, _Lease] = {}
# The tokens of processes that are known to have ended.
_ended: set[str] = set()


class LockedError(Exception):
  """Another program holds the lock; the message names the holder."""


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

  Renews the lock first if it was not renewed lately, as after a pause of the
  process: another program may have taken it over meanwhile.

  Args:
    path: Path of the object in a bucket.

  Raises:
    LockedError: Another program has taken the lock over.
    OSError: The lock may be lost, and the bucket does not answer.
  """
  lease = _held.get(path)
  if lease is not None:
    lease.check()


def _create_or_take_over(path: str) -> _Lease:
  store = conditional_objects.open_object(path)
  found = conditional_objects.read(store)
  if found.state == "value" and not _has_ended(found.value):
    found = _wait_until_stale(path, store, found)
  version = _write(store, _describe_self(0), found.stamp.generation)
  if version is None:
    raise LockedError(_holder(conditional_objects.read(store).value))
  if found.state == "value":
    _ended.add(_parse(found.value).get("token", ""))
    _log.warning("%s: took over from %s", path, _holder(found.value))
  return _Lease(path, store, version)


def _wait_until_stale(path: str, store: ts.KvStore, found: Any) -> Any:
  """Returns the object once it is stale or missing.

  Raises:
    LockedError: Its holder has renewed it.
  """
  _log.info(
    "%s is held by %s: waiting up to %.0f s for a sign of life",
    path,
    _holder(found.value),
    LEASE_SECONDS,
  )
  deadline = time.monotonic() + LEASE_SECONDS
  while time.monotonic() < deadline:
    time.sleep(1.0)
    now = conditional_objects.read(store)
    if now.state == "missing":
      return now
    if now.stamp.generation != found.stamp.generation:
      raise LockedError(_holder(now.value))
  return found


class _Lease:
  """A lock that this process holds and renews from a thread.

  Attributes:
    count: How often this process has acquired the lock.
  """

  def __init__(self, path: str, store: ts.KvStore, version: bytes):
    self.count = 0
    self._path = path
    self._store = store
    self._version = version
    self._lost = ""  # who has taken the lock over
    self._renewals = 0
    self._renewed = _read_clocks()
    self._mutex = threading.Lock()  # one renewal at a time
    self._released = threading.Event()
    self._thread = threading.Thread(
      target=self._keep_renewing, name="flaxshard_lock", daemon=True
    )
    self._thread.start()

  def check(self) -> None:
    """Raises a LockedError if another program has taken the lock over."""
    with self._mutex:
      ages = [b - a for a, b in zip(self._renewed, _read_clocks(), strict=True)]
      if not self._lost and max(ages) > LEASE_SECONDS / 2:
        self._renew()
    if self._lost:
      raise LockedError(self._lost)

  def _keep_renewing(self) -> None:
    while not self._released.wait(RENEW_SECONDS) and not self._lost:
      try:
        with self._mutex:
          self._renew()
      except OSError as e:
        _log.warning("%s cannot be renewed: %s", self._path, e)

  def _renew(self) -> None:
    clocks = _read_clocks()
    self._renewals += 1
    content = _describe_self(self._renewals)
    version = _write(self._store, content, self._version)
    if version is None:
      self._lost = _holder(conditional_objects.read(self._store).value)
      _log.error("%s was taken over by %s", self._path, self._lost)
    else:
      self._version, self._renewed = version, clocks

  def release(self) -> None:
    """Releases the lock once for each time that it was acquired."""
    self.count -= 1
    if self.count:
      return
    self._released.set()
    self._thread.join()
    _held.pop(self._path, None)
    if not self._lost:
      # Otherwise it becomes stale.
      with contextlib.suppress(OSError):
        _write(self._store, None, self._version)


def _read_clocks() -> tuple[float, float]:
  # The first one stops while a computer sleeps; the second one can be set.
  return time.monotonic(), time.time()


@functools.cache
def _token() -> str:
  return uuid.uuid4().hex


def _describe_self(renewals: int) -> bytes:
  return json.dumps(
    {
      "holder": f"process {os.getpid()} on {socket.gethostname()}",
      "pid": os.getpid(),
      "process_space": local_processes.space(),
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
  """Returns whether the holder is a process of this machine that has ended.

  This process counts as well: it calls this for locks that it does not hold.
  """
  holder = _parse(content)
  if holder.get("token") in {_token(), *_ended}:
    return True
  space, pid = holder.get("process_space"), holder.get("pid")
  if not space or not isinstance(space, str) or not isinstance(pid, int):
    return False
  is_this = (space, pid) == (local_processes.space(), os.getpid())
  return is_this or local_processes.has_ended(space, pid)


def _write(
  store: ts.KvStore, content: bytes | None, version: bytes
) -> bytes | None:
  """Writes the object if it has the given version; returns the new one."""
  return conditional_objects.write(store, content, version, _is_own)


def _is_own(content: bytes) -> bool:
  return _parse(content).get("token") == _token()
