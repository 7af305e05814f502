"""One program at a time writes in a directory."""

import contextlib
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.core import lock

_ROOT = pathlib.Path(__file__).parents[2]

_HOLD = """
import sys
from flaxshard.core import lock
release = lock.acquire("directory", sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def create(value):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.full(3, value)}, tx=optax.sgd(0.1)
  )


def assert_holds(path, value, step=None):
  with fs.Checkpointer(path) as checkpointer:
    w = checkpointer.restore(create(0.0), step).params["w"]
  np.testing.assert_array_equal(w, np.full(3, value, np.float32))


@contextlib.contextmanager
def held(path):
  """Another process that writes in the directory."""
  process = subprocess.Popen(
    [sys.executable, "-c", _HOLD, str(path)],
    cwd=_ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with process:
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def test_two_processes_cannot_write_in_one_directory(path):
  with fs.Checkpointer(path) as checkpointer:
    with held(path) as holder:
      told = f"directory='{path}' is being written by process {holder.pid} on "
      with pytest.raises(ValueError, match=told):
        checkpointer.save(1, create(1.0))
      assert list(checkpointer.all_steps()) == []
    # A killed process holds nothing, though its file is there.
    assert (path / ".lock").exists()
    checkpointer.save(1, create(1.0))
  assert os.listdir(path) == ["1"]


def test_reading_needs_no_lock(path):
  with fs.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create(3.0))
  with held(path):
    assert_holds(path, 3.0)


def test_two_checkpointers_of_one_program(path):
  with fs.Checkpointer(path) as one, fs.Checkpointer(path) as two:
    one.save(1, create(1.0))
    two.save(2, create(2.0))
    one.wait()
    two.wait()
    # What is there is left as it is, whoever saved it.
    two.save(1, create(3.0))
    one.save(2, create(3.0))
    assert one.all_steps() == two.all_steps() == [1, 2]
  assert_holds(path, 1.0, step=1)
  assert_holds(path, 2.0, step=2)


def test_two_runs_in_one_workdir(tmp_path):
  with held(tmp_path) as holder:
    told = rf"workdir=.* process {holder.pid} on"
    with pytest.raises(ValueError, match=told):
      train.train_and_evaluate(tiny.config(), str(tmp_path))
    assert os.listdir(tmp_path) == [".lock"]


def test_locks_in_one_process(tmp_path):
  one = lock.acquire("directory", str(tmp_path), again=True)
  two = lock.acquire("directory", str(tmp_path), again=True)
  with pytest.raises(ValueError, match="written by this process"):
    lock.acquire("workdir", str(tmp_path))
  one()
  one()  # no harm
  assert os.listdir(tmp_path) == [".lock"]
  two()
  assert os.listdir(tmp_path) == []
  lock.acquire("workdir", str(tmp_path))()


def test_a_file_system_without_locks(path, monkeypatch, caplog):
  def flock(file, how):
    raise OSError(95, "Operation not supported")

  monkeypatch.setattr(lock.fcntl, "flock", flock)
  with fs.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create(1.0))
  assert "cannot be locked (Operation not supported)" in caplog.text
  assert_holds(path, 1.0)
