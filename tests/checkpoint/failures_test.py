"""Saves that fail, in the background or at the end of the program."""

import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import saving

_ROOT = pathlib.Path(__file__).parents[2]


def create(value=1.0, size=3):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def assert_holds(path, value, step=None, size=3):
  """Asserts that a step has the state `create(value, size)`."""
  restored = fs.checkpoint.restore(path, create(0.0, size), step)
  wanted = create(value, size).params["w"]
  np.testing.assert_array_equal(restored.params["w"], wanted)


def fail_at(monkeypatch, step):
  """Makes the save of one step fail when all its arrays are written."""
  original = digests.write

  def write(step_dir, contents):
    if f"{os.sep}{step}." in os.fspath(step_dir):
      raise OSError(28, "No space left on device")
    return original(step_dir, contents=contents)

  monkeypatch.setattr(digests, "write", write)


def test_failed_save_keeps_the_steps_it_would_have_replaced(path, monkeypatch):
  fail_at(monkeypatch, 2)
  with checkpoint.Checkpointer(path, max_to_keep=1) as checkpointer:
    checkpointer.save(1, create(1.0))
    checkpointer.save(2, create(2.0))
    message = f"step 2 could not be saved in {path}: OSError: .*No space left"
    with pytest.raises(checkpoint.SaveError, match=message) as e:
      checkpointer.wait()
    assert isinstance(e.value.__cause__, OSError)
    checkpointer.check()  # raises once
    assert list(checkpointer.all_steps()) == [1]
    monkeypatch.undo()
    assert checkpointer.save(2, create(3.0))
    checkpointer.wait()
    fail_at(monkeypatch, 3)
    # Leaving the context raises the error, too.
    with pytest.raises(checkpoint.SaveError, match="step 3"), checkpointer:
      checkpointer.save(3, create(4.0))
  assert os.listdir(path) == ["2"]
  assert_holds(path, 3.0)


def test_check_does_not_wait_for_a_save(path, monkeypatch):
  original = digests.write
  written = []

  def write(step_dir, contents):
    time.sleep(0.5)
    written.append(step_dir)
    return original(step_dir, contents=contents)

  monkeypatch.setattr(digests, "write", write)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.check()
    checkpointer.save(1, create())
    checkpointer.check()
    assert not written
  assert written


_PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import optax
import flaxshard as fs

w = 2.0 + jax.random.normal(jax.random.key(0), (1_000_000,))
state = fs.TrainState.create(
  apply_fn=None, params={"w": w}, tx=optax.sgd(0.1))
checkpointer = fs.Checkpointer(sys.argv[1])
checkpointer.save(7, state)
checkpointer.wait()
checkpointer.save(8, state)
raise KeyError("later")
"""


def test_deleted_directory_is_created_again(path):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create())
    checkpointer.wait()
    shutil.rmtree(path)
    checkpointer.save(2, create(2.0))
  assert_holds(path, 2.0)


@pytest.mark.slow
def test_program_that_ends_without_waiting_says_what_is_lost(path):
  done = subprocess.run(
    [sys.executable, "-c", _PROGRAM, str(path)],
    cwd=_ROOT,
    stderr=subprocess.PIPE,
    text=True,
    timeout=180,
  )
  assert done.returncode == 1
  assert "KeyError: 'later'" in done.stderr
  assert f"step 8, the last checkpoint in {path} is lost" in done.stderr
  assert os.listdir(path) == ["7"]
  assert_holds(path, 2.0, size=1_000_000)


def test_barrier_waits_for_threads_that_still_write():
  barrier = saving.SaveBarrier()
  barrier.start_save()
  release = threading.Event()
  written, seen = [], []

  def write():
    release.wait()
    written.append(True)

  def fail():
    try:
      raise OSError
    except OSError:
      barrier(key="", timeout_ms=1000)
      seen.extend(written)

  threads = [threading.Thread(target=f) for f in (write, fail)]
  for thread in threads:
    thread.start()
  release.set()
  for thread in threads:
    thread.join()
  assert seen == [True]
