"""Directories: one program at a time writes in one, if it can be written."""

import contextlib
import logging
import os
import pathlib
import subprocess
import sys

import filelock
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import train
from flaxshard.core import directories

_ROOT = pathlib.Path(__file__).parents[2]

_HOLD = """
import sys
from flaxshard.core import directories
release = directories.lock("directory", sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""


def create(value):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.full(3, value)}, tx=optax.sgd(0.1)
  )


@contextlib.contextmanager
def locked_by_another_program(path):
  process = subprocess.Popen(
    [sys.executable, "-c", _HOLD, str(path)],
    cwd=_ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()


@pytest.mark.slow
def test_another_program_holds_the_lock(tmp_path):
  path = tmp_path / "checkpoints"
  with fs.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create(1.0))
  with fs.Checkpointer(path) as checkpointer:
    with locked_by_another_program(path) as holder:
      by_holder = f"is being written by process {holder.pid} on "
      with pytest.raises(ValueError, match=f"directory='{path}' {by_holder}"):
        checkpointer.save(2, create(2.0))
      assert list(checkpointer.all_steps()) == [1]
      # Reading needs no lock.
      w = checkpointer.restore(create(0.0)).params["w"]
      np.testing.assert_array_equal(w, np.ones(3, np.float32))
    # The file of a killed process is left, and locks nothing.
    assert (path / ".lock").exists()
    assert checkpointer.save(2, create(2.0))
  assert sorted(os.listdir(path)) == ["1", "2"]
  workdir = tmp_path / "workdir"
  workdir.mkdir()
  with locked_by_another_program(workdir) as holder:
    with pytest.raises(ValueError, match=rf"workdir=.* process {holder.pid} "):
      train.train_and_evaluate(tiny.config(), str(workdir))
    assert os.listdir(workdir) == [".lock"]


def test_reentrant_lock_is_held_until_its_last_release(tmp_path):
  directory = str(tmp_path)
  release_1 = directories.lock("directory", directory, reentrant=True)
  release_2 = directories.lock("directory", directory, reentrant=True)
  with pytest.raises(ValueError, match=r"workdir=.* by this process"):
    directories.lock("workdir", directory)
  release_1()
  release_1()  # the second call does nothing
  assert os.listdir(tmp_path) == [".lock"]
  assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} ")
  release_2()
  assert os.listdir(tmp_path) == []
  directories.lock("workdir", directory)()


def test_two_checkpointers_of_one_program_share_the_lock(tmp_path):
  with fs.Checkpointer(tmp_path) as one, fs.Checkpointer(tmp_path) as two:
    assert one.save(1, create(1.0))
    assert two.save(2, create(2.0))
    one.wait()
    two.wait()
    assert not two.save(1, create(1.0))
    assert not one.save(2, create(2.0))
    assert one.all_steps() == two.all_steps() == [1, 2]
  assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_file_system_without_locks_is_logged(tmp_path, monkeypatch, caplog):
  def raise_unsupported(self, **kwargs):
    raise OSError(95, "Operation not supported")

  monkeypatch.setattr(filelock.FileLock, "acquire", raise_unsupported)
  with caplog.at_level(logging.WARNING, "flaxshard"):
    directories.lock("workdir", str(tmp_path))()
  assert "cannot be locked" in caplog.text
  assert "Operation not supported" in caplog.text


def test_check_writable_creates_the_directory_and_nothing_in_it(tmp_path):
  path = tmp_path / "new" / "workdir"
  checkpoint.check_writable("workdir", str(path))
  assert list(path.iterdir()) == []


def test_unwritable_directory_raises(tmp_path):
  file = tmp_path / "file"
  file.write_text("content")
  for directory in (file, file / "below", "hdfs://host/run"):
    with pytest.raises(ValueError, match=f"workdir.*{directory}"):
      directories.check_writable("workdir", str(directory))
  assert file.read_text() == "content"
