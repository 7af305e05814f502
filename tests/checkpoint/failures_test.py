"""Saves that fail, in the background or at the end of the program."""

import os
import pathlib
import subprocess
import sys
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


def test_leaving_the_context_raises_the_error_of_the_save(path, monkeypatch):
  fail_at(monkeypatch, 2)
  message = f"step 2 could not be saved in {path}: OSError: .*No space left"
  with pytest.raises(checkpoint.SaveError, match=message) as e:
    with checkpoint.Checkpointer(path) as checkpointer:
      checkpointer.save(1, create(1.0))
      checkpointer.save(2, create(2.0))
  assert isinstance(e.value.__cause__, OSError)
  assert sorted(os.listdir(path)) == ["1"]
  assert_holds(path, 1.0)


@pytest.mark.slow
def test_error_in_the_context_comes_first(path, monkeypatch, caplog):
  fail_at(monkeypatch, 2)
  with pytest.raises(KeyError), checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(2, create())
    raise KeyError
  assert "step 2 could not be saved" in caplog.text


def test_failed_save_keeps_the_steps_it_would_have_replaced(path, monkeypatch):
  fail_at(monkeypatch, 2)
  with checkpoint.Checkpointer(path, max_to_keep=1) as checkpointer:
    checkpointer.save(1, create(1.0))
    checkpointer.save(2, create(2.0))
    with pytest.raises(checkpoint.SaveError, match="step 2"):
      checkpointer.wait()
    checkpointer.check()  # raises once
    assert list(checkpointer.all_steps()) == [1]
    monkeypatch.undo()
    assert checkpointer.save(2, create(3.0))
  assert os.listdir(path) == ["2"]
  assert_holds(path, 3.0)


def test_save_in_an_except_block_succeeds(path):
  # The error that the program handles is none of the save.
  with checkpoint.Checkpointer(path) as checkpointer:
    try:
      raise KeyError
    except KeyError:
      checkpointer.save(1, create(1.0))
      checkpointer.wait()
  assert_holds(path, 1.0)


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


_SETUP = """
import os, resource, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import optax
import flaxshard as fs

path = sys.argv[1]

def create(value=1.0, size=3):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )

def limit_file_size(size):
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

"""


def run(code, path):
  """Runs a program; a program that hangs at its end fails the test."""
  return subprocess.run(
    [sys.executable, "-c", _SETUP + code, str(path)],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=60,
  )


_FULL_DISK = """
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create())
checkpointer.wait()
limit_file_size(20_000)
state = create(2.0, 100_000)
checkpointer.save(2, state)
for _ in range(1000):
  try:
    checkpointer.check()
  except fs.checkpoint.SaveError as e:
    print(e)
    break
  time.sleep(0.01)
checkpointer.check()  # raises once
print(list(checkpointer.all_steps()), sorted(os.listdir(path)))
limit_file_size(resource.RLIM_INFINITY)
checkpointer.save(3, state)
checkpointer.wait()

# The directory is replaced by a file between two saves.
os.rename(path, path + ".away")
open(path, "w").close()
try:
  checkpointer.save(4, create())
except fs.checkpoint.SaveError as e:
  print(e)
os.remove(path)
os.rename(path + ".away", path)
print(list(checkpointer.all_steps()), sorted(os.listdir(path)))

# The program ends while a save fails.
limit_file_size(20_000)
checkpointer.save(5, state)
"""


@pytest.mark.slow
def test_full_disk_raises_save_error(path):
  done = run(_FULL_DISK, path)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  message = f"SaveError: step 2 could not be saved in {path}: ValueError: "
  assert f"SaveError: {lines[0]}".startswith(message)
  assert "File too large" in lines[0] and "tensorstore_spec" not in lines[0]
  # What was written of step 2 is removed, as the disk is full.
  assert lines[2] == "[1] ['.lock', '1']"
  assert lines[3].startswith(
    f"step 4 could not be saved in {path}: NotADirectoryError: "
  )
  assert lines[5] == "[1, 3] ['.lock', '1', '3']"
  assert f"the last checkpoint in {path} is lost" in done.stderr
  assert sorted(os.listdir(path)) == ["1", "3"]
  assert_holds(path, 1.0, step=1)
  assert_holds(path, 2.0, step=3, size=100_000)
