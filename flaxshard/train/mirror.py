"""Copies the files that a run appends to into its bucket.

An object cannot be appended to. So `metrics.jsonl` and the TensorBoard events
of a run in a bucket are written to a temporary folder, and a thread copies each
changed file as a whole. It rests ten times as long as a copy took, so that it
takes little of the network, and at least a second: more frequent writes of one
object are refused by Google Cloud Storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import logging
import os
import tempfile
import threading
import time
from typing import NamedTuple

from flaxshard.core import directories
from flaxshard.core import files
from flaxshard.train import metrics as metrics_lib

_log = logging.getLogger(__name__)

_LEAST_REST_SECONDS = 1.0
_REST_PER_COPY = 10.0
_REST_AFTER_ERROR = 10.0


class Folder(NamedTuple):
  """A folder to write the files of a run in.

  Attributes:
    path: Path of the folder, on a file system.
    copy: Lets the thread copy the files that have changed. Waits for that if
      its argument is True. Raises an OSError if they cannot be copied then, and
      a ValueError if another program has taken over the lock of the workdir.
  """

  path: str
  copy: Callable[[bool], None]


@contextlib.contextmanager
def open_folder(workdir: str, names: tuple[str, ...]) -> Iterator[Folder]:
  """Opens the folder to write the files of a run in.

  Args:
    workdir: The workdir. If it is on a file system, it is the folder itself.
    names: The files of a bucket that are to be continued.

  Yields:
    The folder. When the `with` block ends, all of its files are copied.

  Raises:
    OSError: The files cannot be copied.
    ValueError: Another program has taken over the lock of the workdir.
  """
  if not files.is_bucket(workdir):
    yield Folder(workdir, lambda wait: None)
    return
  with tempfile.TemporaryDirectory(prefix="flaxshard_") as path:
    for name in names:
      in_bucket = os.path.join(workdir, name)
      if files.exists(in_bucket):
        files.write_bytes(os.path.join(path, name), files.read_bytes(in_bucket))
    mirror = _Mirror(path, workdir)
    with metrics_lib.close_on_exit(mirror.close):
      yield Folder(path, mirror.copy)


class _Mirror:
  """Copies the files of a folder into a bucket from a thread."""

  def __init__(self, path: str, workdir: str):
    self._path = path
    self._workdir = workdir
    # The time and size of each file that was copied.
    self._copied: dict[str, tuple[int, int]] = {}
    self._error: Exception | None = None  # it has ended the thread
    self._lock = threading.Lock()  # one copy at a time
    self._changed = threading.Event()
    self._closed = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="flaxshard_mirror", daemon=True
    )
    self._thread.start()

  def copy(self, wait: bool) -> None:
    if self._error is not None:
      raise self._error
    if wait:
      self._copy_changed()
    else:
      self._changed.set()

  def close(self) -> None:
    self._closed.set()
    self._changed.set()
    self._thread.join()
    self._copy_changed()

  def _run(self) -> None:
    while self._changed.wait() and not self._closed.is_set():
      self._changed.clear()
      start = time.monotonic()
      least_rest = _LEAST_REST_SECONDS
      try:
        self._copy_changed()
      except OSError as e:
        _log.warning("not copied, will be tried again: %s", e)
        self._changed.set()
        least_rest = _REST_AFTER_ERROR
      except Exception as e:
        self._error = e  # the next call of `copy` raises it
        return
      seconds = time.monotonic() - start
      self._closed.wait(max(least_rest, _REST_PER_COPY * seconds))

  def _copy_changed(self) -> None:
    with self._lock:
      for path in files.files_in(self._path):
        status = os.stat(path)
        version = (status.st_mtime_ns, status.st_size)
        if self._copied.get(path) == version:
          continue
        content = files.read_bytes(path)
        # Otherwise this is the file of another run.
        directories.check_lock("workdir", self._workdir)
        name = os.path.relpath(path, self._path)
        files.write_bytes(os.path.join(self._workdir, name), content)
        self._copied[path] = version
