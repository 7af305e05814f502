"""Objects in a store: a folder, a bucket of Google or S3, or memory.

TensorStore's `KvStore` writes an object on the condition that it still has a
certain generation. Everything here rests on that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import logging
import os
import threading
import time
from typing import Any

import tensorstore as ts

from flaxshard.core import files

_log = logging.getLogger("flaxshard")

# Seconds that a request may take: of small objects, and of large ones on a slow
# link.
_SMALL_SECONDS, _LARGE_SECONDS = 60.0, 600.0

# Bounds of the seconds between two looks for something new, and of those while
# the store cannot be reached.
_PAUSES, _FAILED_PAUSES = (0.005, 0.5), (0.1, 10.0)

# TensorStore's own attempts end after seconds, not after minutes.
_RETRIES = {"max_retries": 3, "initial_delay": "100ms", "max_delay": "1s"}

# Of all stores of this process: those in memory share their objects. Files are
# not flushed to the disk, which takes as long as all else: a machine that loses
# power may damage its last objects, which their checksums tell.
_CONTEXT = ts.Context(
  {
    "file_io_sync": False,
    "gcs_request_retries": _RETRIES,
    "s3_request_retries": _RETRIES,
  }
)


class StoreError(OSError):
  """The store cannot be read or written."""


def center_url(directory: str) -> str:
  """Returns the URL of the center of a run.

  Args:
    directory: A folder, or a URL that begins with `gs://`, `s3://` or
      `memory://`.

  Raises:
    ValueError: It is a URL of another kind, or names no bucket.

  Example:
    >>> center_url("/tmp/run"), center_url("s3://bucket/run/")
    ('/tmp/run/center', 's3://bucket/run/center')
  """
  if "://" not in directory:
    return os.path.join(files.absolute(directory), "center")
  kind, _, name = directory.rstrip("/").partition("://")
  if kind not in ("gs", "s3", "memory") or not name:
    raise ValueError(
      "directory must be a folder, gs://bucket/name, s3://bucket/name or "
      f"memory://name, got {directory!r}."
    )
  return f"{kind}://{name}/center"


class Objects:
  """The objects below a URL.

  What this process has written last of each kind of unique names is read from
  memory.

  Args:
    url: A folder, `gs://bucket/name`, `s3://bucket/name` or `memory://name`.

  Attributes:
    url: The URL.
    num_bytes: The bytes that were read and written.

  Example:
    >>> objects = Objects("memory://example")
    >>> content, generation = objects.read("head")
    >>> content, objects.write("head", b"1", generation) is None
    (None, False)
    >>> objects.write("head", b"2", generation), objects.keys("he")
    (None, ['head'])
  """

  def __init__(self, url: str):
    self.url = url
    self.num_bytes = 0
    self._lock = threading.Lock()
    # By kind of request: since when it has failed.
    self._failing: dict[str, float] = {}
    # By the key without its last part: the last key, and its content.
    self._written: dict[str, tuple[str, bytes]] = {}
    [self._kv] = self._run("opened", _open, [url])

  def read(self, key: str) -> tuple[bytes | None, bytes]:
    """Returns the content of an object, None if missing, and its generation."""
    [found] = self._read([key])
    return found

  def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
    """Returns the contents of objects, read at the same time."""
    found: dict[str, bytes | None] = {}
    found.update(self._written.get(_kind_of(key), ("", b"")) for key in keys)
    others = [key for key in keys if key not in found]
    for key, (content, _) in zip(others, self._read(others), strict=True):
      found[key] = content
    return [found[key] for key in keys]

  def write(
    self, key: str, content: bytes, generation: bytes | None
  ) -> bytes | None:
    """Writes an object if it still has a generation, or None: whatever it has.

    Returns:
      Its new generation, or None if it has another one.
    """
    write = lambda key: self._kv.write(key, content, if_equal=generation)
    [stamp] = self._run("written", write, [key])
    self._count([content])
    return stamp.generation or None

  def write_all(self, contents: Mapping[str, bytes]) -> None:
    """Writes objects of unique names at the same time."""
    write = lambda key: self._kv.write(key, contents[key])
    self._run("written", write, contents, _LARGE_SECONDS)
    self._count(contents.values())
    for key, content in contents.items():
      self._written[_kind_of(key)] = key, content

  def delete(self, keys: Iterable[str]) -> None:
    """Deletes objects; missing ones are ignored."""
    self._run("written", lambda key: self._kv.write(key, None), keys)

  def delete_before(self, key: str) -> None:
    """Deletes the objects of the kind of a key that are sorted before it."""
    older = ts.KvStore.KeyRange(f"{_kind_of(key)}/", key)
    self._run("written", self._kv.delete_range, [older])

  def keys(self, prefix: str) -> list[str]:
    """Returns the keys that begin with a prefix, sorted."""
    keys = ts.KvStore.KeyRange(prefix, prefix[:-1] + chr(ord(prefix[-1]) + 1))
    [found] = self._run("read", self._kv.list, [keys])
    return sorted(key.decode() for key in found)

  def check(self, seconds: float, begin: float) -> None:
    """Raises a StoreError if requests have failed for so many seconds.

    Args:
      seconds: How long they may fail.
      begin: By `time.monotonic`; failures before do not count.
    """
    for verb, since in list(self._failing.items()):
      if time.monotonic() - max(since, begin) > seconds:
        raise StoreError(f"{self.url} cannot be {verb} for {seconds:g} seconds")

  def _read(self, keys: Sequence[str]) -> list[tuple[bytes | None, bytes]]:
    found = self._run("read", self._kv.read, keys, _LARGE_SECONDS)
    # Of a missing object the value is empty.
    self._count(x.value for x in found)
    return [
      (None if x.state == "missing" else x.value, x.stamp.generation)
      for x in found
    ]

  def _run(
    self,
    verb: str,
    start: Callable[[Any], Any],
    items: Iterable[Any],
    seconds: float = _SMALL_SECONDS,
  ) -> list[Any]:
    """Waits for futures of TensorStore; its errors become `StoreError`.

    Args:
      verb: What is done with objects, for messages.
      start: A function that takes one of the items, and returns a future.
      items: The items, all of which are started at the same time.
      seconds: How long to wait.
    """
    try:
      end = time.monotonic() + seconds
      started = [start(item) for item in items]
      results = [x.result(timeout=end - time.monotonic()) for x in started]
    # TensorStore raises several types, with the reason in the message.
    except Exception as e:
      if verb not in self._failing:
        self._failing[verb] = time.monotonic()
        _log.warning("%s cannot be %s now: %s", self.url, verb, e)
      raise StoreError(f"{self.url} cannot be {verb}: {e}") from e
    # Nothing was asked for: nobody knows.
    since = self._failing.pop(verb, None) if results else None
    if since is not None:
      gone = time.monotonic() - since
      _log.warning("%s can be %s again, after %.0f s", self.url, verb, gone)
    return results

  def _count(self, contents: Iterable[bytes]) -> None:
    # Several threads read and write.
    with self._lock:
      self.num_bytes += sum(map(len, contents))


def _kind_of(key: str) -> str:
  return key.rpartition("/")[0]


def _open(url: str) -> Any:
  """Opens a store: the future of a `KvStore`."""
  spec: Any = f"{url}/"
  if "://" not in url:
    spec = {"driver": "file", "path": spec}
  elif url.startswith("s3://"):
    bucket, _, path = spec.removeprefix("s3://").partition("/")
    spec = {"driver": "s3", "bucket": bucket, "path": path}
    # Of any server: else two could write after both have read.
    spec["use_conditional_write"] = True
    if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
      spec["endpoint"] = endpoint
  return ts.KvStore.open(spec, context=_CONTEXT)


class Watch:
  """A thread that looks until it is closed, also while the store fails.

  Args:
    look: A function that looks, and returns the pause until the next look as a
      multiple of what it took, so that a far store is asked less often; None
      ends the thread.
    pauses: Bounds of the pause in seconds.

  Attributes:
    wake: An event: look at once.
  """

  def __init__(
    self,
    look: Callable[[], float | None],
    pauses: tuple[float, float] = _PAUSES,
  ):
    self._look, self._pauses = look, pauses
    self.wake = threading.Event()
    self._is_closed = False
    self._error: BaseException | None = None
    # Not one of a pool, whose threads a program waits for at its end.
    self._thread = threading.Thread(target=self._run, daemon=True)
    self._thread.start()

  def has_ended(self, wait: float = 0.0) -> bool:
    """Returns whether the thread has ended, and raises its error.

    Args:
      wait: Seconds to wait for its end.
    """
    self._thread.join(wait)
    if self._error is not None:
      raise self._error
    return not self._thread.is_alive()

  def close(self, seconds: float = 10.0) -> None:
    """Ends the thread.

    Args:
      seconds: How long to wait for a look that is under way.
    """
    self._is_closed = True
    self.wake.set()
    self._thread.join(seconds)

  def _run(self) -> None:
    pause = 0.0
    try:
      while not self._is_closed:
        start, bounds = time.monotonic(), self._pauses
        try:
          looks = self._look()
          if looks is None:
            return
          pause = looks * (time.monotonic() - start)
        except StoreError:  # it has warned
          pause, bounds = 2 * pause, _FAILED_PAUSES
        pause = min(max(pause, bounds[0]), bounds[1])
        if self.wake.wait(pause):
          self.wake.clear()
    except BaseException as e:
      self._error = e
