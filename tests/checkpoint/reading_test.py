"""Reading while another program saves, or while an error passes."""

import os
import pathlib
import shutil
import subprocess
import sys

import checkpoint_states as states
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import reader

_TESTS = str(pathlib.Path(__file__).parents[1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Two steps of a plain Flax program, which have no digests."""
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  with ocp.CheckpointManager(path) as manager:
    for step in (1, 2):
      state = states.weights(step).without_wrappers()
      manager.save(step, args=ocp.args.StandardSave(state))
  return path


@pytest.fixture
def path(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "checkpoints")


def assert_healthy(path):
  """The newest step can be restored, and saving renames no directory."""
  with fs.Checkpointer(path) as checkpointer:
    restored = checkpointer.restore(states.weights())
    assert checkpointer.restored_step == 2
    np.testing.assert_array_equal(restored.params["w"], np.full(3, 2.0))
    checkpointer.save(3, restored)
  assert sorted(os.listdir(path)) == ["1", "2", "3"]


TRANSIENT = [
  jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
  MemoryError(),
  OSError(24, "Too many open files"),
  ValueError("NOT_FOUND: Error opening file [too many open files]"),
]


@pytest.mark.parametrize("error", TRANSIENT, ids=lambda e: type(e).__name__)
def test_transient_errors_are_raised(path, error, monkeypatch):
  def fail(*args, **kwargs):
    monkeypatch.undo()
    raise error

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
  with fs.Checkpointer(path) as checkpointer:
    with pytest.raises(type(error)) as e:
      checkpointer.restore(states.weights())
    assert e.value is error
  assert_healthy(path)


# Another program saves and deletes steps.


def restore_by_checkpointer(path):
  with fs.Checkpointer(path) as checkpointer:
    return checkpointer.restore(states.weights())


READERS = [
  restore_by_checkpointer,
  lambda path: fs.checkpoint.restore(path, states.weights()),
]


@pytest.fixture
def live(tmp_path):
  with fs.Checkpointer(tmp_path / "checkpoints") as checkpointer:
    for step in (1, 2, 3):
      checkpointer.save(step, states.weights(step), metrics={"loss": 0.5})
  return tmp_path / "checkpoints"


@pytest.mark.parametrize("restore", READERS)
@pytest.mark.parametrize("deleted", ["3", "3/default/_METADATA"])
def test_step_deleted_while_it_is_read_gives_way_to_a_newer_one(
  live, restore, deleted, monkeypatch
):
  # The program that saves has reached step 3 and deletes step 2.
  shutil.move(live / "3", live.parent / "next")
  original = reader.open_unverified

  def open_unverified(where, item=None):
    step_dir = live / "2"
    if pathlib.Path(where) == step_dir and not (live / "3").exists():
      shutil.move(live.parent / "next", live / "3")
      target = live / deleted.replace("3", "2", 1)
      if target.is_dir():
        shutil.rmtree(target)
      else:
        target.unlink()
    return original(where, item)

  monkeypatch.setattr(reader, "open_unverified", open_unverified)
  restored = restore(live)
  np.testing.assert_array_equal(restored.params["w"], np.full(3, 3.0))


_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
import checkpoint_states as states
import flaxshard as fs
with fs.Checkpointer(sys.argv[1], max_to_keep=2) as checkpointer:
  for step in range(1, 60):
    checkpointer.save(step, states.weights(step), metrics={"loss": 1 / step})
print(step)
"""


@pytest.mark.slow
def test_reading_beside_a_program_that_saves(tmp_path, capsys):
  path = tmp_path / "checkpoints"
  state = states.weights()
  reading = fs.Checkpointer(path)
  with subprocess.Popen(
    [sys.executable, "-c", _WRITER, str(path), _TESTS], stdout=subprocess.PIPE
  ) as writer:
    last = 0
    while writer.poll() is None:
      if reading.latest_step() is None:
        continue
      for restore in (
        lambda: fs.checkpoint.restore(path, state),
        lambda: reading.restore(state),
      ):
        step = int(restore().params["w"][0])
        assert step >= last
        last = step
      assert inspection.main([str(path)]) == 0
    assert writer.returncode == 0
  assert last > 2
