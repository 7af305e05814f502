"""Saves that fail: in the background, at the end of the program, for space."""

import os
import pathlib
import shutil
import subprocess
import sys
import time

import checkpoint_states as states
import pytest
from tree_equality import assert_trees_equal
import xla_flags

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard.checkpoint import step_files

_ROOT = pathlib.Path(__file__).parents[2]


def assert_holds(path, value):
  restored = fs.checkpoint.restore(path, states.weights())
  assert_trees_equal(restored, states.weights(value))


def before_digests(monkeypatch, call):
  """Calls a function when all arrays of a step are written."""
  original = step_files.write_digests

  def write(step_dir, contents):
    call(step_dir)
    return original(step_dir, contents=contents)

  monkeypatch.setattr(step_files, "write_digests", write)


def fail_at(monkeypatch, step):
  """Makes the save of one step fail when all its arrays are written."""

  def fail(step_dir):
    if step_dir.name.startswith(f"{step}."):
      raise OSError(28, "No space left on device")

  before_digests(monkeypatch, fail)


def test_failed_save_keeps_the_steps_it_would_have_replaced(
  tmp_path, monkeypatch
):
  fail_at(monkeypatch, 2)
  with checkpoint.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
    checkpointer.save(1, states.weights(1))
    checkpointer.save(2, states.weights(2))
    message = f"step 2 could not be saved in {tmp_path}: OSError: .*No space"
    with pytest.raises(checkpoint.SaveError, match=message) as e:
      checkpointer.wait()
    assert isinstance(e.value.__cause__, OSError)
    checkpointer.check()  # raises once
    assert list(checkpointer.all_steps()) == [1]
    monkeypatch.undo()
    assert checkpointer.save(2, states.weights(3))
    checkpointer.wait()
    fail_at(monkeypatch, 3)
    # Leaving the context raises the error, too.
    with pytest.raises(checkpoint.SaveError, match="step 3"), checkpointer:
      checkpointer.save(3, states.weights(4))
  assert os.listdir(tmp_path) == ["2"]
  assert_holds(tmp_path, 3)


def test_check_does_not_wait_for_a_save(tmp_path, monkeypatch):
  written = []

  def write(step_dir):
    time.sleep(0.5)
    written.append(step_dir)

  before_digests(monkeypatch, write)
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, states.weights())
    checkpointer.check()
    assert not written
  assert written


def test_deleted_directory_is_created_again(tmp_path):
  path = tmp_path / "checkpoints"
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, states.weights())
    checkpointer.wait()
    shutil.rmtree(path)
    checkpointer.save(2, states.weights(2))
  assert_holds(path, 2)


# Programs of their own.

_WITHOUT_WAITING = """
checkpointer.save(7, states.weights(2))
checkpointer.wait()
checkpointer.save(8, states.weights(3, size=4_000_000))
raise KeyError("later")
"""

_FULL_DISK = """
checkpointer.save(1, states.weights(1))
checkpointer.wait()
# Noise cannot be compressed. Of many writes, some go on after one has failed.
noise = jax.random.normal(jax.random.key(0), (60, 50_000))
large = {str(i): x for i, x in enumerate(noise)}
checkpointer.save(2, states.weights().replace(params=large))
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
assert set(os.listdir(path)) == {"1", ".lock"}
assert list(checkpointer.all_steps()) == [1]
assert_holds(path, 1)
checkpointer.save(2, states.weights(2))
checkpointer.wait()
assert_holds(path, 2)
checkpointer.close()
"""

_BEFORE = """
import os, sys, time
import jax
import flaxshard as fs
import checkpoint_states as states
from checkpoint.failures_test import assert_holds
path = os.path.join(sys.argv[1], "checkpoints")
checkpointer = fs.Checkpointer(path)
"""


@pytest.mark.slow
def test_program_that_ends_without_waiting_says_what_is_lost(
  programs, tmp_path
):
  script = _BEFORE + _WITHOUT_WAITING
  error = programs.start(tmp_path, str(tmp_path), script=script).end(code=1)
  path = tmp_path / "checkpoints"
  for fact in (
    "KeyError: 'later'",
    "the last checkpoint is lost",
    f"step 8 could not be saved in {path}",
  ):
    assert fact in error
  assert os.listdir(path) == ["7"]
  assert_holds(path, 2)


@pytest.mark.slow
def test_disk_fills_up_during_a_save(tmp_path):
  # A small tmpfs, in a new mount namespace.
  mount = 'mount -t tmpfs -o size=6m tmpfs "$1" && shift && exec "$@"'
  before = ["unshare", "-Urm", "sh", "-c", mount, "sh", str(tmp_path)]
  try:
    done = subprocess.run([*before, "true"], capture_output=True, text=True)
  except FileNotFoundError as e:
    pytest.skip(f"no mount namespace: {e}")
  if done.returncode:
    pytest.skip(f"no tmpfs in a mount namespace: {done.stderr.strip()}")
  search = os.pathsep.join(map(str, (_ROOT, _ROOT / "tests")))
  done = subprocess.run(
    [*before, sys.executable, "-c", _BEFORE + _FULL_DISK, str(tmp_path)],
    env={**os.environ, "XLA_FLAGS": xla_flags.FAST, "PYTHONPATH": search},
    capture_output=True,
    text=True,
    timeout=180,
  )
  assert done.returncode == 0, done.stderr[-4000:]
