"""Reading while another program saves, or while an error passes."""

import os
import pathlib
import shutil
import subprocess
import sys

import checkpoint_states as states
import jax
import orbax.checkpoint as ocp
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import reader

_TESTS = str(pathlib.Path(__file__).parents[1])


def restore_by_checkpointer(path):
  with fs.Checkpointer(path) as checkpointer:
    return checkpointer.restore(states.weights())


def restore(path):
  return fs.checkpoint.restore(path, states.weights())


@pytest.mark.parametrize(
  "error",
  [
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    ValueError("NOT_FOUND: Error opening file [too many open files]"),
  ],
  ids=lambda e: type(e).__name__,
)
def test_transient_errors_are_raised(tmp_path, error, monkeypatch):
  with ocp.CheckpointManager(tmp_path) as manager:
    for step in (1, 2):
      state = states.weights(step).without_wrappers()
      manager.save(step, args=ocp.args.StandardSave(state))

  def fail(*args, **kwargs):
    raise error

  with fs.Checkpointer(tmp_path) as checkpointer:
    with monkeypatch.context() as patch:
      patch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
      with pytest.raises(type(error)) as e:
        checkpointer.restore(states.weights())
    assert e.value is error
    # The step is not taken for a damaged one.
    assert_trees_equal(
      checkpointer.restore(states.weights()), states.weights(2)
    )
    checkpointer.save(3, states.weights())
  assert sorted(os.listdir(tmp_path)) == ["1", "2", "3"]


@pytest.mark.parametrize(
  ("read", "deleted"),
  [(restore_by_checkpointer, "."), (restore, "default/_METADATA")],
)
def test_step_deleted_while_it_is_read_gives_way_to_a_newer_one(
  tmp_path, read, deleted, monkeypatch
):
  path = tmp_path / "checkpoints"
  states.write_ours(path, *map(states.weights, (1, 2, 3)), step=1)
  # The program that saves has reached step 3 and deletes step 2.
  shutil.move(path / "3", tmp_path / "next")
  original = reader.open_unverified

  def open_unverified(where, item=None):
    if where.name == "2" and not (path / "3").exists():
      shutil.move(tmp_path / "next", path / "3")
      target = path / "2" / deleted
      shutil.rmtree(target) if target.is_dir() else target.unlink()
    return original(where, item)

  monkeypatch.setattr(reader, "open_unverified", open_unverified)
  assert_trees_equal(read(path), states.weights(3))


_WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
import checkpoint_states as states
import flaxshard as fs
with fs.Checkpointer(sys.argv[1], max_to_keep=2) as checkpointer:
  for step in range(1, 60):
    checkpointer.save(step, states.weights(step), metrics={"loss": 1 / step})
"""


@pytest.mark.slow
def test_reading_beside_a_program_that_saves(tmp_path, capsys):
  path = tmp_path / "checkpoints"
  reading = fs.Checkpointer(path)
  with subprocess.Popen(
    [sys.executable, "-c", _WRITER, str(path), _TESTS]
  ) as writer:
    last = 0
    while writer.poll() is None:
      if reading.latest_step() is None:
        continue
      for state in (restore(path), reading.restore(states.weights())):
        step = int(state.params["w"][0])
        assert step >= last
        last = step
      assert inspection.main([str(path)]) == 0
    assert writer.returncode == 0
  assert last > 2
