"""Saves that fail in the background, and programs that just end."""

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

_SETUP = """
import os, signal, sys, time
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import optax
import flaxshard as fs

path = sys.argv[1]

def create(value=1.0, size=3):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )

"""


def create(value=1.0, size=3):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )


def run(code, path, timeout=60):
  return subprocess.run(
    [sys.executable, "-c", _SETUP + code, str(path)],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    timeout=timeout,
  )


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def restored(path, step=None, size=3):
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(create(0.0, size), step)


def assert_holds(path, value, step=None, size=3):
  wanted = create(value, size).params["w"]
  np.testing.assert_array_equal(restored(path, step, size).params["w"], wanted)


# Programs that end without waiting.


def test_a_program_that_just_ends_loses_nothing(path):
  # Nobody holds the checkpointer, either.
  done = run("fs.Checkpointer(path).save(7, create(2.0, 100_000))", path)
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert sorted(os.listdir(path)) == ["7"]
  assert_holds(path, 2.0, size=100_000)


def test_a_program_that_fails_loses_nothing(path):
  code = "checkpointer = fs.Checkpointer(path)\n"
  code += "checkpointer.save(7, create(2.0, 100_000))\nraise KeyError('later')"
  done = run(code, path)
  assert done.returncode == 1
  assert done.stderr.splitlines()[-1] == "KeyError: 'later'"
  assert sorted(os.listdir(path)) == ["7"]
  assert_holds(path, 2.0, size=100_000)


# A disk that is full.

_FULL = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create())
checkpointer.wait()
none = resource.RLIM_INFINITY
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, none))
state = create(2.0, 100_000)
checkpointer.save(2, state)
for _ in range(1000):
  try:
    checkpointer.check()
  except RuntimeError as e:
    print(f"{type(e).__name__}: {e}")
    break
  time.sleep(0.01)
checkpointer.check()  # told once
print(list(checkpointer.all_steps()), sorted(os.listdir(path)))
# The state is as it was, and the next save as good as any.
resource.setrlimit(resource.RLIMIT_FSIZE, (none, none))
checkpointer.save(3, state)
checkpointer.close()
print(list(checkpointer.all_steps()), sorted(os.listdir(path)))
"""


def test_a_full_disk(path):
  done = run(_FULL, path)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].startswith(
    f"SaveError: step 2 could not be saved in {path}: ValueError: "
  )
  assert "File too large" in lines[0] and "tensorstore_spec" not in lines[0]
  assert "earlier checkpoints are as they were" in lines[1]
  # What was written of it is gone, for it takes the room of others.
  assert lines[2:] == ["[1] ['.lock', '1']", "[1, 3] ['1', '3']"]
  assert_holds(path, 1.0, step=1)
  assert_holds(path, 2.0, step=3, size=100_000)


_FULL_AT_THE_END = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create())
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
checkpointer.save(2, create(2.0, 100_000))
"""


def test_a_disk_that_is_full_when_the_program_ends(path):
  done = run(_FULL_AT_THE_END, path)
  assert done.returncode == 0
  assert f"the last checkpoint in {path} is lost" in done.stderr
  assert sorted(os.listdir(path)) == ["1"]
  assert_holds(path, 1.0)


_GONE = """
checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create())
checkpointer.wait()
os.rename(path, path + ".away")
open(path, "w").close()
try:
  checkpointer.save(2, create())
  checkpointer.wait()
except RuntimeError as e:
  print(e)
os.remove(path)
os.rename(path + ".away", path)
"""


def test_a_directory_that_is_gone_and_an_end_that_does_not_hang(path):
  done = run(_GONE, path)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(
    f"step 2 could not be saved in {path}: NotADirectoryError: "
  )
  assert_holds(path, 1.0)


def fail_at(monkeypatch, step):
  """Has Orbax fail in the middle of a save of one step."""
  original = metadata_item.Handler.finalize

  def finalize(self, directory):
    if f"{os.sep}{step}." in os.fspath(directory):
      raise OSError(28, "No space left on device")
    return original(self, directory)

  monkeypatch.setattr(metadata_item.Handler, "finalize", finalize)


def test_leaving_the_context_raises_what_failed(path, monkeypatch):
  fail_at(monkeypatch, 2)
  message = f"step 2 could not be saved in {path}: OSError: .*No space left"
  with pytest.raises(checkpoint.SaveError, match=message) as e:
    with checkpoint.Checkpointer(path) as checkpointer:
      checkpointer.save(1, create(1.0))
      checkpointer.save(2, create(2.0))
  assert isinstance(e.value.__cause__, OSError)
  assert sorted(os.listdir(path)) == ["1"]
  assert_holds(path, 1.0)


def test_an_error_in_the_context_comes_first(path, monkeypatch, caplog):
  fail_at(monkeypatch, 2)
  with pytest.raises(KeyError), checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(2, create())
    raise KeyError
  assert "step 2 could not be saved" in caplog.text


def test_check_does_not_wait(path, monkeypatch):
  """Neither while a save runs nor when none does."""
  original = metadata_item.Handler.finalize

  def finalize(self, directory):
    time.sleep(0.5)
    return original(self, directory)

  monkeypatch.setattr(metadata_item.Handler, "finalize", finalize)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.check()
    checkpointer.save(1, create())
    checkpointer.check()
    assert checkpointer._manager.is_saving_in_progress()


def test_the_loop_stops_at_the_next_step(tmp_path, monkeypatch):
  """Of eight steps, the save of step 2 fails: the run does not go on to 8."""
  fail_at(monkeypatch, 2)
  monkeypatch.setattr(
    checkpoint.Checkpointer, "check", lambda self: self.wait()
  )
  config = tiny.config(checkpoint_every_steps=2, log_every_steps=1)
  where = tmp_path / "checkpoints"
  with pytest.raises(RuntimeError, match=f"step 2 could not .* in {where}:"):
    train.train_and_evaluate(config, str(tmp_path))
  assert [row["step"] for row in tiny.rows(str(tmp_path))] == [1, 2]
  assert os.listdir(where) == []
  # The lock is free again.
  assert ".lock" not in os.listdir(tmp_path)
