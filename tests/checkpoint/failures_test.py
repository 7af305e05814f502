"""Saves that fail: in the background, at the end of the program, for space."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest
import xla_flags

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard.checkpoint import step_files

_ROOT = pathlib.Path(__file__).parents[2]


def create(value=1.0, size=3):
  noise = value + jax.random.normal(jax.random.key(0), (size,))
  return fs.TrainState.create(
    apply_fn=None, params={"w": noise}, tx=optax.sgd(0.1)
  )


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def assert_holds(path, value, size=3):
  """Asserts that the newest step has the state `create(value, size)`."""
  restored = fs.checkpoint.restore(path, create(0.0, size))
  wanted = create(value, size).params["w"]
  np.testing.assert_array_equal(restored.params["w"], wanted)


def fail_at(monkeypatch, step):
  """Makes the save of one step fail when all its arrays are written."""
  original = step_files.write_digests

  def write(step_dir, contents):
    if f"{os.sep}{step}." in os.fspath(step_dir):
      raise OSError(28, "No space left on device")
    return original(step_dir, contents=contents)

  monkeypatch.setattr(step_files, "write_digests", write)


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
  original = step_files.write_digests
  written = []

  def write(step_dir, contents):
    time.sleep(0.5)
    written.append(step_dir)
    return original(step_dir, contents=contents)

  monkeypatch.setattr(step_files, "write_digests", write)
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
  assert "the last checkpoint is lost" in done.stderr
  assert f"step 8 could not be saved in {path}" in done.stderr
  assert os.listdir(path) == ["7"]
  assert_holds(path, 2.0, size=1_000_000)


# A disk that fills up: a small tmpfs, in a new mount namespace.

_MOUNT = 'mount -t tmpfs -o size=8m tmpfs "$1" && shift && exec "$@"'
_NAMESPACE = ["unshare", "-Urm", "sh", "-c", _MOUNT, "sh"]

_SCRIPT = """
import os, sys, time
import jax.numpy as jnp
import numpy as np
import flaxshard as fs
from checkpoint.failures_test import assert_holds, create

disk = sys.argv[1]
path = os.path.join(disk, "checkpoints")
filler = os.path.join(disk, "filler")


def room():
  found = os.statvfs(disk)
  return found.f_bavail * found.f_frsize


def fill(leave=0):
  # Up to a number of bytes.
  with open(filler, "ab", buffering=0) as f:
    try:
      for size in (1 << 16, 1 << 12, 1):
        while room() - size >= leave:
          f.write(bytes(size))
    except OSError:
      assert leave == 0


size = 300_000  # 1.2 MB of noise, which cannot be compressed


def create_more(value):
  # Many writes, of which some go on after one has failed.
  state = create(value, size)
  more = {f"w{i}": jnp.arange(20_000.0) for i in range(30)}
  return state.replace(params=state.params | more)


checkpointer = fs.Checkpointer(path)
checkpointer.save(1, create(1.0))
checkpointer.wait()
state = create_more(2.0)
fill(leave=500_000)
checkpointer.save(2, state)  # fails in the background
try:
  for _ in range(1000):  # as a loop whose steps take 10 ms
    checkpointer.check()
    time.sleep(0.01)
except fs.checkpoint.SaveError as e:
  error = str(e)
assert error.startswith(f"step 2 could not be saved in {path}: "), error
assert "No space left on device" in error, error
checkpointer.check()  # raises once
# What was written of the step is removed.
assert set(os.listdir(path)) == {"1", ".lock"} and room() > 400_000
assert list(checkpointer.all_steps()) == [1]
assert_holds(path, 1.0)

os.remove(filler)
checkpointer.save(2, state)
checkpointer.wait()
restored = checkpointer.restore(create_more(0.0))
for name, x in state.params.items():
  np.testing.assert_array_equal(restored.params[name], x)

checkpointer.close()
"""


@pytest.mark.slow
def test_disk_fills_up_during_a_save(tmp_path):
  try:
    done = subprocess.run(
      [*_NAMESPACE, str(tmp_path), "true"], capture_output=True, text=True
    )
  except FileNotFoundError as e:
    pytest.skip(f"no mount namespace: {e}")
  if done.returncode:
    pytest.skip(f"no tmpfs in a mount namespace: {done.stderr.strip()}")
  done = subprocess.run(
    [*_NAMESPACE, str(tmp_path), sys.executable, "-c", _SCRIPT, str(tmp_path)],
    cwd=_ROOT,
    env={
      **os.environ,
      "XLA_FLAGS": xla_flags.FAST,
      "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT / "tests"))),
    },
    capture_output=True,
    text=True,
    timeout=180,
  )
  assert done.returncode == 0, done.stderr[-4000:]
