"""Restoring and saving when the newest checkpoint is damaged."""

import functools
import hashlib
import json
import logging
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tiny

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import data
from flaxshard import train
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import metadata_item


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


def make_iterator(batches=0):
  numbers = np.arange(12)
  source = data.Arrays(numbers * 2.0, numbers)
  splits = data.Splits(source, source, num_classes=12)
  iterator = data.train_iterator(splits, batch_size=4, seed=0)
  for _ in range(batches):
    next(iterator)
  return iterator


def save(path, *steps, **kwargs):
  with checkpoint.Checkpointer(path, **kwargs) as checkpointer:
    for step in steps:
      checkpointer.save(step, trained(step), data=make_iterator(step))


def save_plain(path, *steps):
  """Saves as a plain Flax program does, without digests."""
  with ocp.CheckpointManager(path) as manager:
    for step in steps:
      state = trained(step).without_wrappers()
      manager.save(step, args=ocp.args.StandardSave(state))


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


def truncated_to_half(file):
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def truncated_to_nothing(file):
  file.write_bytes(b"")


def flipped(file):
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 1
  file.write_bytes(content)


def removed(file):
  file.unlink()


DAMAGES = [truncated_to_half, truncated_to_nothing, flipped, removed]
# Orbax writes these two last; nothing reads them.
MARKS = ["commit_success.txt", "flaxshard/commit_success.txt"]


def files(step):
  return sorted(
    str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()
  )


# Passing a damaged step over.


def assert_damage_is_passed_over(path, damages, caplog):
  """Damages one file of step 3 at a time, and restores.

  Args:
    path: Path of the checkpoints.
    damages: The function that damages a file, by the file's name.
    caplog: Pytest's fixture.
  """
  for name, damage in damages.items():
    file = path / "3" / name
    content = file.read_bytes()
    damage(file)
    before = contents(path)
    caplog.clear()
    with checkpoint.Checkpointer(path) as checkpointer:
      iterator = make_iterator()
      state = checkpointer.restore(initial(), data=iterator)
      step = 3 if name in MARKS else 2
      assert checkpointer.restored_step == checkpointer.latest_step() == step
    assert_is(state, step)
    np.testing.assert_array_equal(
      next(iterator)["labels"], next(make_iterator(step))["labels"]
    )
    assert contents(path) == before
    if name in MARKS:
      assert not warnings(caplog)
    else:
      (message,) = warnings(caplog)
      assert message.startswith(f"step 3 is damaged, passed over: {file} ")
    file.write_bytes(content)


@pytest.mark.slow
def test_step_with_a_damaged_file_is_passed_over(path, caplog):
  # One file of each kind; digests_test damages every file.
  arrays = max(
    (name for name in files(path / "3") if name.startswith("default/d/")),
    key=lambda name: (path / "3" / name).stat().st_size,
  )
  damages = {
    "_CHECKPOINT_METADATA": truncated_to_half,
    arrays: flipped,
    "wrappers/manifest.ocdbt": truncated_to_nothing,
    "input_iterator/process_0-of-1.json": flipped,
    "flaxshard/digests.json": removed,
    MARKS[0]: removed,
  }
  assert_damage_is_passed_over(path, damages, caplog)


@pytest.mark.slow  # a restore for each file of a step
@pytest.mark.parametrize("turn", [0, 2])
def test_step_with_any_damaged_file_is_passed_over(path, turn, caplog):
  # Each file gets one kind of damage; digests_test tries all of them.
  damages = {
    name: DAMAGES[(i + turn) % 4] for i, name in enumerate(files(path / "3"))
  }
  assert_damage_is_passed_over(path, damages, caplog)


def test_explicit_damaged_step_raises(path):
  file = path / "3" / "default" / "_METADATA"
  flipped(file)
  before = contents(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=rf"^{file} has crc32 "):
      checkpointer.restore(initial(), 3)
    assert checkpointer.restored_step is None
    assert_is(checkpointer.restore(initial(), 1), 1)
    assert checkpointer.restored_step == 1
  assert contents(path) == before


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
  np.testing.assert_array_equal(
    next(iterator)["labels"], next(make_iterator())["labels"]
  )


def test_two_damaged_steps_are_passed_over(path, caplog):
  removed(path / "3" / "flaxshard" / "digests.json")
  flipped(path / "2" / "input_iterator" / "process_0-of-1.json")
  with checkpoint.Checkpointer(path) as checkpointer:
    assert_is(checkpointer.restore(initial()), 1)
    assert list(checkpointer.all_steps()) == [1]
  assert [m.split(" is damaged")[0] for m in warnings(caplog)] == [
    "step 3",
    "step 2",
  ]


def test_step_with_a_missing_item_is_passed_over(path, caplog):
  item = "wrappers"  # digests_test removes each of them
  shutil.rmtree(path / "3" / item)
  with checkpoint.Checkpointer(path) as checkpointer:
    assert_is(checkpointer.restore(initial()), 2)
  (message,) = warnings(caplog)
  assert f"{path / '3' / item} is missing" in message


def test_empty_directory_is_not_a_step(path, caplog):
  (path / "7").mkdir()
  with checkpoint.Checkpointer(path) as checkpointer:
    assert checkpointer.latest_step() == 3
    assert list(checkpointer.all_steps()) == [1, 2, 3]
    assert_is(checkpointer.restore(initial()), 3)
    with pytest.raises(ValueError, match=r"/7 is empty"):
      checkpointer.restore(initial(), 7)
  (message,) = warnings(caplog)
  assert message == f"step 7 is damaged, passed over: {path / '7'} is empty."


def test_empty_directory_of_the_saved_step_is_renamed(path, caplog):
  with checkpoint.Checkpointer(path) as checkpointer:
    (path / "4").mkdir()
    checkpointer.save(4, trained(4))
    checkpointer.wait()
    assert_is(checkpointer.restore(initial()), 4)
  (message,) = warnings(caplog)
  assert message == f"{path / '4'} is damaged: renamed to {path / '4'}.damaged"


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


def test_half_deleted_step_is_damaged(path):
  for name in ("flaxshard", "wrappers"):
    shutil.rmtree(path / "1" / name)
  (path / "1" / "_CHECKPOINT_METADATA").unlink()
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(
      ValueError, match=r"/1/flaxshard is missing, .* half del"
    ):
      checkpointer.restore(initial(), 1)
  # Alone, it may be the step of another program.
  for name in ("2", "3"):
    shutil.rmtree(path / name)
  with checkpoint.Checkpointer(path) as checkpointer:
    state = checkpointer.restore(initial())
  np.testing.assert_array_equal(state.params["w"], trained(1).params["w"])


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


def test_empty_directory_does_not_prevent_saving(tmp_path):
  (tmp_path / "5").mkdir()
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.latest_step() is None
    checkpointer.save(5, trained(1))
  assert sorted(os.listdir(tmp_path)) == ["5", "5.damaged"]
  with checkpoint.Checkpointer(tmp_path) as checkpointer:
    assert_is(checkpointer.restore(initial()), 1)


def test_saving_before_the_latest_step_raises(path):
  before = contents(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(
      ValueError, match=r"step=0 cannot be saved .* has step 3"
    ):
      checkpointer.save(0, initial())
    assert not checkpointer.save(2, trained(2))
  assert contents(path) == before


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


def test_restore_without_a_complete_step_raises(path):
  for step in (1, 2, 3):
    removed(path / str(step) / "default" / "_METADATA")
  with pytest.raises(
    ValueError,
    match=r"has no checkpoint that is complete: .*3.* is missing.*"
    r"2.* is missing.*1.* is missing",
  ):
    checkpoint.restore(path, initial())


# Steps without digests.


@pytest.mark.parametrize("damage", [truncated_to_half, removed])
def test_plain_step_without_readable_metadata_is_passed_over(
  tmp_path, damage, caplog
):
  path = tmp_path / "checkpoints"
  save_plain(path, 1, 2)
  damage(path / "2" / "default" / "_METADATA")
  before = contents(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    state = checkpointer.restore(initial())
    assert checkpointer.restored_step == 1
  np.testing.assert_array_equal(state.params["w"], trained(1).params["w"])
  (message,) = warnings(caplog)
  assert message.startswith(f"step 2 is damaged, passed over: {path / '2'}")
  assert contents(path) == before


@pytest.mark.slow  # a restore for each file of a step
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", DAMAGES)
def test_plain_step_that_orbax_cannot_read_is_passed_over(
  tmp_path, damage, caplog
):
  path = tmp_path / "checkpoints"
  save_plain(path, 1, 2)
  passed = []
  for name in files(path / "2"):
    file = path / "2" / name
    content = file.read_bytes()
    damage(file)
    before = contents(path)
    caplog.clear()
    with checkpoint.Checkpointer(path) as checkpointer:
      try:
        checkpointer.restore(initial())
        if checkpointer.restored_step == 1:
          passed.append(name)
          (message,) = warnings(caplog)
          assert message.startswith(
            f"step 2 is damaged, passed over: {path / '2'}"
          )
      except ValueError as e:  # it has another tree now
        assert "was written by another model" in str(e)
    assert contents(path) == before
    file.write_bytes(content)
  # No checksum, so a flipped bit is found only where it breaks something.
  assert "default/_METADATA" in passed or damage is flipped
  assert len(passed) >= (2 if damage is flipped else 3)


def test_plain_step_is_restored_when_ours_is_damaged(tmp_path, caplog):
  path = tmp_path / "checkpoints"
  save_plain(path, 1)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(2, trained(2))
  flipped(path / "2" / "default" / "_METADATA")
  with checkpoint.Checkpointer(path) as checkpointer:
    state = checkpointer.restore(initial())
  np.testing.assert_array_equal(state.params["w"], trained(1).params["w"])
  assert len(warnings(caplog)) == 1


# The loop.


@pytest.mark.slow
def test_loop_continues_from_the_step_before(tmp_path, caplog):
  config = tiny.config(
    model={"name": "normed:Normed"},
    mesh={"replica": 1},
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
  # Every checkpoint has the config.
  metadata = metadata_item.read_metadata(checkpoints / "3")
  assert metadata["config"] == json.loads((workdir / "config.json").read_text())
  assert metadata["step"] == 3
