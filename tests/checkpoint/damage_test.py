"""Restoring and saving when the newest checkpoint is damaged."""

import functools
import hashlib
import logging
import os
import pathlib
import shutil

from damages import flipped
from damages import MARKS
from damages import removed
from damages import truncated_to_half
from damages import truncated_to_nothing
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiny

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import train
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import digests


@functools.cache
def initial(tx=None):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.arange(6.0).reshape(2, 3)},
    tx=tx or optax.adam(0.5),
    wrappers=[fs.LossScale("dynamic")],
  )


@functools.cache
def trained(steps):
  """Returns the state after a number of steps."""
  if steps == 0:
    return initial()
  state = trained(steps - 1)
  return _train_step(state)


@jax.jit
def _train_step(state):
  return state.apply_gradients(grads=state.params)


def make_iterator(position=0):
  iterator = iter(grain.MapDataset.range(100).to_iter_dataset())
  for _ in range(position):
    next(iterator)
  return iterator


def save(path, *steps, **kwargs):
  with checkpoint.Checkpointer(path, **kwargs) as checkpointer:
    for step in steps:
      checkpointer.save(step, trained(step), data=make_iterator(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  save(path, 1, 2, 3)
  return path


@pytest.fixture
def path(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "checkpoints")


def assert_is(state, step):
  """Asserts that a state is `trained(step)`, bit for bit."""
  wanted = trained(step)
  jax.tree.map(np.testing.assert_array_equal, state, wanted)
  assert int(state.step) == step


def contents(path):
  """Returns every directory, and a hash of every file."""
  return {
    str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).digest()
    if p.is_file()
    else None
    for p in sorted(pathlib.Path(path).rglob("*"))
  }


def warnings(caplog):
  return [
    r.getMessage()
    for r in caplog.records
    if r.levelno >= logging.WARNING and r.name.startswith("flaxshard")
  ]


# Passing a damaged step over.


@pytest.mark.slow
def test_step_with_a_damaged_file_is_passed_over(path, caplog):
  # One file of each kind; digests_test damages every file.
  arrays = max(
    (path / "3" / "default" / "d").iterdir(), key=lambda p: p.stat().st_size
  )
  for file, damage in (
    ("_CHECKPOINT_METADATA", truncated_to_half),
    (arrays, flipped),
    ("wrappers/manifest.ocdbt", truncated_to_nothing),
    ("input_iterator/process_0-of-1.json", flipped),
    ("flaxshard/digests.json", removed),
    (MARKS[0], removed),
  ):
    file = path / "3" / file
    content = file.read_bytes()
    damage(file)
    before = contents(path)
    caplog.clear()
    step = 3 if file.name in MARKS else 2
    with checkpoint.Checkpointer(path) as checkpointer:
      iterator = make_iterator()
      state = checkpointer.restore(initial(), data=iterator)
      assert checkpointer.restored_step == checkpointer.latest_step() == step
    assert_is(state, step)
    assert next(iterator) == step
    assert contents(path) == before
    told = warnings(caplog)
    assert len(told) == (step == 2)
    for message in told:
      assert message.startswith(f"step 3 is damaged, passed over: {file} ")
    file.write_bytes(content)


def test_no_complete_step_raises_and_names_all(path):
  flipped(path / "1" / "wrappers" / "_METADATA")
  shutil.rmtree(path / "2" / "default")
  shutil.rmtree(path / "3")
  (path / "3").mkdir()
  before = contents(path)
  iterator = make_iterator()
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError) as e:
      checkpointer.restore(initial(), data=iterator)
    assert checkpointer.latest_step() is None
  message = str(e.value)
  assert message.startswith(f"{path} has no checkpoint that is complete: ")
  for part in (
    f"{path / '3'} is empty.",
    f"{path / '2' / 'default'} is missing; _CHECKPOINT_METADATA has it.",
    f"{path / '1' / 'wrappers' / '_METADATA'} has crc32 ",
  ):
    assert part in message
  assert contents(path) == before
  # The position in the data is unchanged.
  assert next(iterator) == 0


def test_empty_directory_is_not_a_step(tmp_path, caplog):
  (tmp_path / "5").mkdir()
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.latest_step() is None
    with pytest.raises(ValueError, match=r"/5 is empty"):
      checkpointer.restore(initial(), 5)
    checkpointer.save(5, trained(1))
    assert_is(checkpointer.restore(initial()), 1)
  assert sorted(os.listdir(tmp_path)) == ["5", "5.damaged"]


def test_remains_of_a_killed_save_are_not_a_step(path, caplog):
  for name in ("4.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-1234"):
    shutil.copytree(path / "3", path / name)
  before = contents(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    assert list(checkpointer.all_steps()) == [1, 2, 3]
    assert_is(checkpointer.restore(initial()), 3)
    assert contents(path) == before
    checkpointer.save(4, trained(4))
    checkpointer.wait()
    assert_is(checkpointer.restore(initial()), 4)
  assert not warnings(caplog)


def test_other_model_or_missing_position_is_not_damage(path):
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=r"/3 was written by another model"):
      checkpointer.restore(initial(optax.sgd(0.1)))
    assert list(checkpointer.all_steps()) == [1, 2, 3]
    checkpointer.save(4, trained(4))
    with pytest.raises(ValueError, match="/4 has no input_iterator"):
      checkpointer.restore(initial(), data=make_iterator())
    assert list(checkpointer.all_steps()) == [1, 2, 3, 4]


# Saving after a damaged step was passed over.


def test_damaged_step_is_renamed_when_it_is_saved_again(path, caplog):
  flipped(path / "3" / "default" / "_METADATA")
  damaged = contents(path / "3")
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.restore(initial())
    checkpointer.save(3, trained(3), data=make_iterator(3))
    checkpointer.wait()
    assert list(checkpointer.all_steps()) == [1, 2, 3]
  assert warnings(caplog)[1] == (
    f"{path / '3'} is damaged: renamed to {path / '3.damaged'}"
  )
  assert contents(path / "3.damaged") == damaged
  with checkpoint.Checkpointer(path) as checkpointer:
    assert list(checkpointer.all_steps()) == [1, 2, 3]
    assert_is(checkpointer.restore(initial()), 3)
  assert digests.verify(path / "3")


def test_step_before_damaged_ones_can_be_saved(path):
  (path / "3").rename(path / "6")
  flipped(path / "6" / "default" / "_METADATA")
  (path / "9").mkdir()
  with checkpoint.Checkpointer(path, max_to_keep=2) as checkpointer:
    assert_is(checkpointer.restore(initial()), 2)
    checkpointer.save(4, trained(4))
    checkpointer.wait()
    assert list(checkpointer.all_steps()) == [2, 4]
  assert sorted(os.listdir(path)) == ["2", "4", "6.damaged", "9.damaged"]


# Steps that were copied or renamed.


def copy(path):
  shutil.copytree(path / "2", path / "20")
  return 3, 2


def rename(path):
  shutil.move(path / "3", path / "20")
  return 2, 3


@pytest.mark.parametrize("change", [copy, rename])
def test_copied_or_renamed_step_is_passed_over(path, change, caplog, capsys):
  newest, origin = change(path)
  message = f"{path}/20 was saved as step {origin}"
  iterator = make_iterator()
  with checkpoint.Checkpointer(path) as checkpointer:
    assert checkpointer.latest_step() == newest
    assert_is(checkpointer.restore(initial(), data=iterator), newest)
    assert (checkpointer.restored_step, next(iterator)) == (newest, newest)
    with pytest.raises(ValueError, match=message):
      checkpointer.restore(initial(), 20)
  assert message in caplog.text
  assert_is(checkpoint.restore(path, initial()), newest)
  with pytest.raises(ValueError, match=message):
    checkpoint.restore(path / "20", initial())
  assert inspection.main([str(path)]) == 1
  assert f"was saved as step {origin}" in capsys.readouterr().out
  # It does not count as the newest step when the next one is saved.
  save(path, 4, max_to_keep=2)
  assert "20.damaged" in os.listdir(path)


def test_position_of_another_step_is_damage_without_digests_too(tmp_path):
  save(tmp_path, 1, 2, digests=False)
  positions = [tmp_path / step / "input_iterator" for step in ("1", "2")]
  shutil.rmtree(positions[1])
  shutil.copytree(*positions)
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match="2/input_iterator/"):
      checkpointer.restore(initial(), 2, make_iterator())


# Custom managers.


def test_restore_passes_over_damaged_steps(path, caplog):
  flipped(path / "3" / "default" / "_METADATA")
  (path / "7").mkdir()
  before = contents(path)
  # Without handlers, Orbax refuses a directory with an empty step.
  with ocp.CheckpointManager(
    path, item_handlers=checkpoint.item_handlers()
  ) as manager:
    for where in (manager, path):
      caplog.clear()
      assert_is(checkpoint.restore(where, initial()), 2)
      empty, other = warnings(caplog)
      assert empty == f"step 7 is damaged, passed over: {path / '7'} is empty."
      assert other.startswith(
        f"step 3 is damaged, passed over: {path / '3'}/default/_METADATA has"
      )
      assert_is(checkpoint.restore(where, initial(), 1), 1)
      with pytest.raises(ValueError, match="/3/default/_METADATA has crc32"):
        checkpoint.restore(where, initial(), 3)
  with pytest.raises(ValueError, match="/3/default/_METADATA has crc32"):
    checkpoint.restore(path / "3", initial())
  assert contents(path) == before


# The loop.


@pytest.mark.slow
def test_loop_continues_from_the_step_before(tmp_path, caplog):
  config = tiny.config(
    num_train_steps=3,
    log_every_steps=1,
    eval_every_steps=3,
    checkpoint_every_steps=1,
  )
  whole = train.train_and_evaluate(config, str(tmp_path / "whole"))
  workdir = tmp_path / "workdir"
  shutil.copytree(tmp_path / "whole", workdir)
  checkpoints = workdir / "checkpoints"
  largest = max(
    (p for p in (checkpoints / "3" / "default").rglob("*") if p.is_file()),
    key=lambda p: p.stat().st_size,
  )
  flipped(largest)
  caplog.clear()
  with caplog.at_level(logging.INFO, "flaxshard"):
    resumed = train.train_and_evaluate(config, str(workdir))
  assert f"step 3 is damaged, passed over: {largest} has crc32" in caplog.text
  assert "resuming from step 2" in caplog.text
  for x, y in zip(
    jax.tree.leaves(resumed), jax.tree.leaves(whole), strict=True
  ):
    np.testing.assert_array_equal(x, y)
  assert sorted(os.listdir(checkpoints)) == ["1", "2", "3", "3.damaged"]
  rows = tiny.untimed_rows(str(workdir))
  assert rows == tiny.untimed_rows(str(tmp_path / "whole"))
  assert [row["step"] for row in rows] == [1, 2, 3]
