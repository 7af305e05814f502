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
import tiny

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import train
from flaxshard.checkpoint import metadata_item
from flaxshard.checkpoint import orbax_workarounds

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
  """Makes Orbax fail in the middle of a save of one step."""
  original = metadata_item.Handler.finalize

  def finalize(self, directory):
    if f"{os.sep}{step}." in os.fspath(directory):
      raise OSError(28, "No space left on device")
    return original(self, directory)

  monkeypatch.setattr(metadata_item.Handler, "finalize", finalize)


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
  original = metadata_item.Handler.finalize
  finalized = []

  def finalize(self, directory):
    time.sleep(0.5)
    finalized.append(directory)
    return original(self, directory)

  monkeypatch.setattr(metadata_item.Handler, "finalize", finalize)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.check()
    checkpointer.save(1, create())
    checkpointer.check()
    assert not finalized
  assert finalized


@pytest.mark.slow
def test_loop_stops_at_the_step_after_a_failed_save(tmp_path, monkeypatch):
  fail_at(monkeypatch, 2)
  # Wait in `check`, so that the failure is known at the next step.
  monkeypatch.setattr(
    checkpoint.Checkpointer, "check", lambda self, local: self.wait()
  )
  config = tiny.config(
    model={"name": "normed:Normed"},
    mesh={"replica": 1},
    num_train_steps=4,
    log_every_steps=1,
    checkpoint_every_steps=2,
  )
  where = tmp_path / "checkpoints"
  with pytest.raises(checkpoint.SaveError, match=f"step 2 could not .*{where}"):
    train.train_and_evaluate(config, str(tmp_path))
  assert [row["step"] for row in tiny.rows(str(tmp_path))] == [1, 2]
  assert os.listdir(where) == []
  assert ".lock" not in os.listdir(tmp_path)


def test_deleted_directory_is_one_line(path):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create())
    checkpointer.wait()
    shutil.rmtree(path)
    with pytest.raises(checkpoint.SaveError) as e:
      checkpointer.save(2, create())
    message = str(e.value)
    assert f"step 2 could not be saved: {path} is gone" in message
    assert "\n" not in message and e.value.__cause__ is None
    assert e.value.__suppress_context__
  assert not path.exists()


_PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import optax
import flaxshard as fs

path, how = sys.argv[1:]
w = 2.0 + jax.random.normal(jax.random.key(0), (1_000_000,))
state = fs.TrainState.create(
  apply_fn=None, params={"w": w}, tx=optax.sgd(0.1))
fs.Checkpointer(path).save(7, state)  # no variable refers to it
if how == "fails":
  raise KeyError("later")
"""


@pytest.mark.slow
def test_program_that_ends_without_waiting_loses_nothing(tmp_path):
  programs = {
    how: subprocess.Popen(
      [sys.executable, "-c", _PROGRAM, str(tmp_path / how), how],
      cwd=_ROOT,
      stderr=subprocess.PIPE,
      text=True,
    )
    for how in ("ends", "fails")
  }
  errors = {
    how: program.communicate(timeout=60)[1] for how, program in programs.items()
  }
  assert programs["ends"].returncode == 0, errors["ends"]
  assert errors["ends"] == ""
  assert programs["fails"].returncode == 1
  assert errors["fails"].splitlines()[-1] == "KeyError: 'later'"
  for how in programs:
    assert os.listdir(tmp_path / how) == ["7"]
    assert_holds(tmp_path / how, 2.0, size=1_000_000)


def test_barrier_waits_for_threads_that_still_write():
  barrier = orbax_workarounds.SaveBarrier()
  barrier.start_save()
  written = []
  release = threading.Event()

  def write():
    release.wait()
    written.append(True)

  def fail():
    try:
      raise OSError
    except OSError:
      barrier(key="", timeout_ms=1000)
      seen.extend(written)

  seen = []
  threads = [threading.Thread(target=f) for f in (write, fail)]
  for thread in threads:
    thread.start()
  release.set()
  for thread in threads:
    thread.join()
  assert seen == [True]
