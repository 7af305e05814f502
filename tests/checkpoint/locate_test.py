"""Paths that a user gives: of steps, of a workdir, of one step, or wrong."""

import os
import pathlib

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs
from flaxshard.checkpoint import inspection
from flaxshard.checkpoint import step_names


def create(value=0.0):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.full(3, float(value))}, tx=optax.sgd(0.1)
  )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  path = tmp_path_factory.mktemp("runs") / "digits"
  with fs.Checkpointer(path / "checkpoints") as checkpointer:
    checkpointer.save(3, create(3))
    checkpointer.save(12, create(12))
  (path / "metrics.jsonl").touch()
  return path


def restore_by_checkpointer(path, step=None):
  with fs.Checkpointer(path) as checkpointer:
    return checkpointer.restore(create(), step)


READERS = [
  restore_by_checkpointer,
  lambda path, step=None: fs.checkpoint.restore(path, create(), step),
]


@pytest.mark.parametrize("restore", READERS)
def test_workdir_directory_of_steps_and_step_are_restored(restore, workdir):
  steps = workdir / "checkpoints"
  for path, step, wanted in (
    (workdir, None, 12),
    (workdir, 3, 3),
    (steps, None, 12),
    (steps / "3", None, 3),
    (os.path.relpath(steps / "3"), 3, 3),
  ):
    restored = restore(path, step)
    np.testing.assert_array_equal(restored.params["w"], np.full(3, wanted))
  with pytest.raises(ValueError, match="step 12"):
    restore(steps / "3", 12)


def test_step_is_shown(workdir, capsys):
  assert inspection.main([str(workdir / "checkpoints" / "3")]) == 0
  assert "  step: 3\n" in capsys.readouterr().out


def test_saving_in_a_step_raises(workdir):
  step_dir = workdir / "checkpoints" / "3"
  with fs.Checkpointer(step_dir) as checkpointer:
    assert list(checkpointer.all_steps()) == [3]
    with pytest.raises(ValueError, match=r"checkpoints/3' is one checkpoint"):
      checkpointer.save(20, create())


def test_workdir_is_saved_in_with_its_checkpoints(tmp_path):
  for step in (1, 2):
    with fs.Checkpointer(
      tmp_path / "checkpoints" if step == 1 else tmp_path
    ) as c:
      c.save(step, create())
  assert sorted(os.listdir(tmp_path / "checkpoints")) == ["1", "2"]
  assert os.listdir(tmp_path) == ["checkpoints"]


# Mistake: a wrong path.


@pytest.mark.parametrize("restore", READERS)
def test_misspelt_path_is_named_with_a_similar_one(restore, workdir):
  for path, reason, similar in (
    (workdir.parent / "digitz", "no such path", workdir),
    (workdir.parent / "digit" / "checkpoints", "no such path", workdir),
    (workdir / "checkpoint", "no such path", workdir / "checkpoints"),
    (workdir.parent, "no steps, only digits", workdir),
  ):
    with pytest.raises(ValueError) as e:
      restore(path)
    assert f"{path}: " in str(e.value)
    assert reason in str(e.value)
    assert f"Did you mean '{similar}'?" in str(e.value)
  assert os.listdir(workdir.parent) == ["digits"]


@pytest.mark.parametrize("restore", READERS)
def test_path_without_steps_says_what_is_there(restore, workdir, tmp_path):
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match=r"empty: .* it is empty"):
    restore(tmp_path / "empty")
  moved = tmp_path / "other"
  (moved / "kept").mkdir(parents=True)
  (moved / "notes.txt").touch()
  (moved / "kept" / "5").mkdir()
  with pytest.raises(ValueError, match=r"only kept, notes.txt") as e:
    restore(moved)
  assert f"Did you mean '{moved / 'kept'}'?" in str(e.value)
  with pytest.raises(ValueError, match=r"step 4 .*are \[3, 12\]"):
    restore(workdir, 4)


def test_misspelt_path_creates_nothing(tmp_path):
  path = tmp_path / "typo" / "checkpoints"
  with fs.Checkpointer(path) as checkpointer:
    assert checkpointer.latest_step() is None
    assert list(checkpointer.all_steps()) == []
    assert checkpointer.best_step() is None
    checkpointer.check()
    checkpointer.wait()
    with pytest.raises(ValueError, match="no such path"):
      checkpointer.restore(create())
    with pytest.raises(ValueError, match="step must be"):
      checkpointer.save(-1, create())
  assert inspection.main([str(path)]) == 2
  assert os.listdir(tmp_path) == []


def test_first_save_creates_the_directory(tmp_path):
  path = tmp_path / "new" / "checkpoints"
  reader = fs.Checkpointer(path)
  with fs.Checkpointer(path) as checkpointer:
    assert checkpointer.save(1, create(1))
    checkpointer.wait()
    # A checkpointer that was created before the directory sees it.
    assert reader.latest_step() == 1
    np.testing.assert_array_equal(
      reader.restore(create()).params["w"], np.ones(3)
    )


def test_manager_without_steps_names_its_directory(tmp_path):
  with ocp.CheckpointManager(tmp_path / "none") as manager:
    with pytest.raises(ValueError, match=r"/none: .* empty"):
      fs.checkpoint.restore(manager, create())


def test_a_directory_that_vanishes_while_it_is_listed_has_no_steps(
  tmp_path, monkeypatch
):
  def fail(path):
    raise FileNotFoundError(path)

  monkeypatch.setattr(pathlib.Path, "iterdir", fail)
  assert step_names.steps(tmp_path) == {}
