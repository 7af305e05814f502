"""Workarounds for Orbax: each is needed, and each works."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard.checkpoint import orbax_workarounds

_ROOT = pathlib.Path(__file__).parents[2]

_PROGRAM = """
import atexit, sys
import jax
jax.config.update("jax_platforms", "cpu")
import optax
import orbax.checkpoint as ocp
import flaxshard as fs

path, how = sys.argv[1:]
w = 2.0 + jax.random.normal(jax.random.key(0), (1_000_000,))
state = fs.TrainState.create(
  apply_fn=None, params={"w": w}, tx=optax.sgd(0.1))
if how == "atexit":
  manager = ocp.CheckpointManager(path)
  atexit.register(manager.wait_until_finished)
  manager.save(7, args=fs.checkpoint.save_args(state))
else:
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
    for how in ("ends", "fails", "atexit")
  }
  try:
    programs["atexit"].communicate(timeout=30)
  except subprocess.TimeoutExpired:
    # Orbax may wait for a thread that Python no longer starts.
    programs["atexit"].kill()
  errors = {
    how: programs[how].communicate(timeout=60)[1] for how in ("ends", "fails")
  }
  assert programs["ends"].returncode == 0, errors["ends"]
  assert errors["ends"] == ""
  assert programs["fails"].returncode == 1
  assert errors["fails"].splitlines()[-1] == "KeyError: 'later'"
  w = 2.0 + jax.random.normal(jax.random.key(0), (1_000_000,))
  state = fs.TrainState.create(
    apply_fn=None, params={"w": w}, tx=optax.sgd(0.1)
  )
  for how in ("ends", "fails"):
    assert os.listdir(tmp_path / how) == ["7"]
    restored = fs.checkpoint.restore(tmp_path / how, state)
    np.testing.assert_array_equal(restored.params["w"], w)
  # `atexit` alone is too late. Once this fails, delete `wait_at_exit`.
  assert not (tmp_path / "atexit" / "7").exists()


def test_python_has_the_private_name():
  # Once Python has a public name for it, use that one.
  assert hasattr(threading, "_register_atexit")
  assert not hasattr(threading, "register_atexit")


@pytest.fixture
def full_disk(monkeypatch):
  """Makes every save of a `JsonSave` fail in the background."""

  def finalize(self, directory):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(ocp.JsonCheckpointHandler, "finalize", finalize)


def test_orbax_leaves_the_directory_of_a_failed_save(tmp_path, full_disk):
  # Once this fails, delete `remove_unfinished`.
  manager = ocp.CheckpointManager(tmp_path)
  manager.save(3, args=ocp.args.JsonSave({"a": 1}))
  with pytest.raises(OSError, match="No space left"):
    manager.wait_until_finished()
  assert os.listdir(tmp_path) == ["3.orbax-checkpoint-tmp"]
  orbax_workarounds.remove_unfinished(str(tmp_path), 3)
  assert os.listdir(tmp_path) == []


def test_orbax_calls_the_barrier_with_its_error_in_flight(tmp_path, full_disk):
  # `SaveBarrier` depends on it; `processes_test` tests it with two processes.
  in_flight = []

  def barrier(*, key, timeout_ms):
    in_flight.append(sys.exc_info()[1])

  options = ocp.CheckpointManagerOptions(
    async_options=ocp.options.AsyncOptions(
      barrier_sync_fn=barrier, create_directories_asynchronously=False
    )
  )
  manager = ocp.CheckpointManager(tmp_path, options=options)
  manager.save(3, args=ocp.args.JsonSave({"a": 1}))
  with pytest.raises(OSError, match="No space left"):
    manager.wait_until_finished()
  before, after = in_flight[:2], in_flight[2:]
  assert before == [None, None]  # at the start of the save
  assert after and all(isinstance(e, OSError) for e in after)


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
