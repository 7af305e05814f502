"""Copies of a run's files, without a bucket; bucket_test.py has one."""

import pathlib
import threading
import time

import pytest

from flaxshard.core import directories
from flaxshard.core import files
from flaxshard.train import mirror


@pytest.fixture
def objects(monkeypatch):
  """The objects of a bucket, by path."""
  found = {}
  monkeypatch.setattr(files, "exists", lambda path: path in found)
  monkeypatch.setattr(files, "write_bytes", found.__setitem__)
  monkeypatch.setattr(directories, "check_lock", lambda *args: None)
  return found


def _append(path, text):
  with open(pathlib.Path(path, "file"), "a") as f:
    f.write(text)


def test_a_local_workdir_is_the_folder(tmp_path):
  with mirror.open_folder(str(tmp_path), ("file",)) as (path, copy):
    assert path == str(tmp_path)
    copy(True)


def test_all_text_is_copied_when_the_block_ends_or_raises(objects):
  with mirror.open_folder("gs://bucket/run", ()) as (path, copy):
    _append(path, "a")
    copy(True)
    assert objects == {"gs://bucket/run/file": b"a"}
    _append(path, "b")
  assert objects["gs://bucket/run/file"] == b"ab"
  assert not pathlib.Path(path).exists()
  with pytest.raises(KeyError):
    with mirror.open_folder("gs://bucket/run", ()) as (path, copy):
      _append(path, "c")
      raise KeyError
  assert objects["gs://bucket/run/file"] == b"c"


def test_copying_in_the_background_does_not_wait(objects, monkeypatch):
  written = threading.Event()
  started = threading.Event()

  def write(path, content):
    started.set()
    assert written.wait(60)
    objects[path] = content

  monkeypatch.setattr(files, "write_bytes", write)
  with mirror.open_folder("gs://bucket/run", ()) as (path, copy):
    _append(path, "a")
    for _ in range(3):
      copy(False)  # would wait for a minute
    assert started.wait(60) and not objects
    written.set()
  assert objects == {"gs://bucket/run/file": b"a"}


def test_errors_of_the_thread_are_raised(objects, monkeypatch, caplog):
  errors = [OSError("no answer"), RuntimeError("unexpected")]

  def fail(path, content):
    raise errors[0] if len(errors) > 1 else errors[-1]

  monkeypatch.setattr(files, "write_bytes", fail)
  monkeypatch.setattr(mirror, "_REST_AFTER_ERROR", 0.0)
  monkeypatch.setattr(mirror, "_LEAST_REST_SECONDS", 0.0)
  deadline = time.monotonic() + 60
  with pytest.raises(RuntimeError, match="unexpected"):
    with mirror.open_folder("gs://bucket/run", ()) as (path, copy):
      _append(path, "a")
      copy(False)
      # An OSError may go away.
      while "no answer" not in caplog.text:
        assert time.monotonic() < deadline
        copy(False)
      with pytest.raises(OSError, match="no answer"):
        copy(True)
      errors.pop(0)
      while time.monotonic() < deadline:
        copy(False)
  with pytest.raises(RuntimeError, match="unexpected"):
    with mirror.open_folder("gs://bucket/run", ()) as (path, copy):
      _append(path, "a")
