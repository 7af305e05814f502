"""Restoring and saving when the newest checkpoint is damaged."""

import hashlib
import json
import os
import pathlib
import shutil
import zlib

import checkpoint_states as states
import grain
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import step_files


def trained(step, **kwargs):
  """Returns a state that differs from that of any other step."""
  return states.weights(step, **kwargs).replace(step=jnp.int32(step))


INITIAL = trained(0)


def make_iterator(position=0):
  iterator = iter(grain.MapDataset.range(100).to_iter_dataset())
  for _ in range(position):
    next(iterator)
  return iterator


CONFIG = {"seed": 3, "model": {"name": "cnn"}}


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


def save(path, *steps, **kwargs):
  with checkpoint.Checkpointer(path, **kwargs) as checkpointer:
    for step in steps:
      checkpointer.save(step, trained(step), data=make_iterator(step))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  save(path, 1, 2, 3, config=CONFIG)
  return path


@pytest.fixture
def path(saved, tmp_path):
  return shutil.copytree(saved, tmp_path / "checkpoints")


def assert_is(state, step):
  """Asserts that a state is `trained(step)`, bit for bit."""
  assert_trees_equal(state, trained(step))


def contents(path):
  """Returns every directory, and a hash of every file."""
  return {
    str(p.relative_to(path)): hashlib.sha256(p.read_bytes()).digest()
    if p.is_file()
    else None
    for p in sorted(pathlib.Path(path).rglob("*"))
  }


# The digests of a step.


def digests_in(step):
  return json.loads((step / "flaxshard" / "digests.json").read_text())


def files(step):
  return sorted(
    str(p.relative_to(step))
    for p in step.rglob("*")
    # Orbax's marks: nothing reads them.
    if p.is_file() and p.name != "commit_success.txt"
  )


def test_every_file_has_its_size_and_crc32(saved):
  step = saved / "3"
  named = digests_in(step)["files"]
  rest = ["_CHECKPOINT_METADATA", "flaxshard/digests.json"]
  assert sorted([*named, *rest]) == files(step)
  for name, (size, crc) in named.items():
    content = (step / name).read_bytes()
    assert (len(content), zlib.crc32(content)) == (size, crc)
  items = ["default", "input_iterator", "wrappers"]
  assert {name.split("/")[0] for name in named} == {*items, "flaxshard"}
  assert step_files.read_metadata(step) == {
    "flaxshard": fs.__version__,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "step": 3,
    "state_step": 3,
    "wrappers": [repr(fs.LossScale("dynamic"))],
    "processes": 1,
    "devices": None,
    "mesh": None,
    "config": CONFIG,
  }


def test_without_digests_only_sizes_are_compared(tmp_path):
  save(tmp_path, 3, 4, digests=False)
  step = tmp_path / "4"
  for name, (size, crc) in digests_in(step)["files"].items():
    assert size == (step / name).stat().st_size
    # Those of two steps often have one size, and are small.
    is_small = name.startswith(("flaxshard/", "input_iterator/"))
    assert (crc is not None) == is_small
  flipped(step / "default" / "manifest.ocdbt")
  assert not step_files.verify(step)
  truncated_to_half(step / "default" / "manifest.ocdbt")
  with pytest.raises(step_files.Damaged, match=r"manifest\.ocdbt has "):
    step_files.verify(step)
  # Restoring passes the damaged step over. The position of another step, which
  # has the same size, is damage too.
  with checkpoint.Checkpointer(tmp_path, digests=False) as checkpointer:
    assert_is(checkpointer.restore(INITIAL), 3)
    positions = [tmp_path / name / "input_iterator" for name in ("4", "3")]
    shutil.rmtree(positions[1])
    shutil.copytree(*positions)
    with pytest.raises(ValueError, match="3/input_iterator/"):
      checkpointer.restore(INITIAL, 3, make_iterator())


@pytest.mark.parametrize(
  "damage", [truncated_to_half, truncated_to_nothing, flipped, removed]
)
def test_every_damaged_file_is_named(path, damage):
  step = path / "3"
  assert step_files.verify(step)
  names = files(step)
  # Of Orbax's own metadata only the items are compared.
  if damage is flipped:
    names.remove("_CHECKPOINT_METADATA")
  assert len(names) > 20
  for name in names:
    content = (step / name).read_bytes()
    damage(step / name)
    with pytest.raises(step_files.Damaged) as e:
      step_files.verify(step)
    assert str(e.value).startswith(f"{step / name} "), name
    (step / name).write_bytes(content)
  assert step_files.verify(step)


def test_changed_digests_or_a_missing_item_are_damage(path):
  file = path / "3" / "flaxshard" / "digests.json"
  found = digests_in(path / "3")
  found["files"].pop("wrappers/_METADATA")
  for text in (json.dumps(found), "5", "{}", "[]", '{"files": {}}'):
    file.write_text(text)
    with pytest.raises(step_files.Damaged, match=r"digests\.json is not"):
      step_files.verify(path / "3")
  for step, item in ((1, "default"), (2, "wrappers"), (3, "flaxshard")):
    shutil.rmtree(path / str(step) / item)
    with pytest.raises(step_files.Damaged, match=rf"/{item} is missing"):
      step_files.verify(path / str(step))


# Passing a damaged step over.


def test_damaged_steps_are_passed_over(path, caplog):
  file = max(path.glob("3/default/d/*"), key=lambda p: p.stat().st_size)
  flipped(file)
  (path / "7").mkdir()
  before = contents(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    iterator = make_iterator()
    state = checkpointer.restore(INITIAL, data=iterator)
    assert checkpointer.restored_step == checkpointer.latest_step() == 2
  assert_is(state, 2)
  assert next(iterator) == 2
  # Without handlers, Orbax refuses a directory with an empty step.
  with ocp.CheckpointManager(
    path, item_handlers=checkpoint.item_handlers()
  ) as manager:
    for where in (manager, path):
      assert_is(checkpoint.restore(where, INITIAL), 2)
      assert_is(checkpoint.restore(where, INITIAL, 1), 1)
  for empty, other in zip(*[iter(states.messages(caplog))] * 2, strict=True):
    assert "7 is empty" in empty
    assert other.startswith(f"step 3 is damaged, passed over: {file} has crc32")
  with pytest.raises(ValueError, match=r"/3/default/d/.* has crc32"):
    checkpoint.restore(path / "3", INITIAL)
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
      checkpointer.restore(INITIAL, data=iterator)
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


def test_remains_of_a_killed_save_are_not_a_step(path, caplog):
  for name in ("4.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-1234"):
    shutil.copytree(path / "3", path / name)
  before = contents(path)
  with checkpoint.Checkpointer(path) as checkpointer:
    assert list(checkpointer.all_steps()) == [1, 2, 3]
    assert_is(checkpointer.restore(INITIAL), 3)
    assert contents(path) == before
    checkpointer.save(4, trained(4))
    checkpointer.wait()
    assert_is(checkpointer.restore(INITIAL), 4)
  assert not states.messages(caplog)


def test_other_model_or_missing_position_is_not_damage(path):
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=r"/3 was written by another model"):
      checkpointer.restore(trained(0, tx=optax.sgd(0.1)))
    assert list(checkpointer.all_steps()) == [1, 2, 3]
    checkpointer.save(4, trained(4))
    with pytest.raises(ValueError, match="/4 has no input_iterator"):
      checkpointer.restore(INITIAL, data=make_iterator())
    assert list(checkpointer.all_steps()) == [1, 2, 3, 4]


# Saving after a damaged step was passed over.


def test_damaged_steps_are_renamed_at_the_next_save(path, caplog):
  flipped(path / "3" / "default" / "_METADATA")
  damaged = contents(path / "3")
  (path / "9").mkdir()
  with checkpoint.Checkpointer(path, max_to_keep=2) as checkpointer:
    assert_is(checkpointer.restore(INITIAL), 2)
    checkpointer.save(3, trained(3), data=make_iterator(3))
    checkpointer.wait()
    assert list(checkpointer.all_steps()) == [2, 3]
  for step in (3, 9):
    message = f"{path / str(step)} is damaged: renamed to {path}/{step}.damaged"
    assert message in states.messages(caplog)
  assert sorted(os.listdir(path)) == ["2", "3", "3.damaged", "9.damaged"]
  assert contents(path / "3.damaged") == damaged
  with checkpoint.Checkpointer(path) as checkpointer:
    assert list(checkpointer.all_steps()) == [2, 3]
    assert_is(checkpointer.restore(INITIAL), 3)
  assert step_files.verify(path / "3")


# Steps that were copied or renamed.


@pytest.mark.parametrize(
  ("move", "origin", "newest"), [(shutil.copytree, 2, 3), (shutil.move, 3, 2)]
)
def test_copied_or_renamed_step_is_passed_over(
  path, move, origin, newest, caplog, capsys
):
  move(path / str(origin), path / "20")
  message = f"{path}/20 was saved as step {origin}"
  iterator = make_iterator()
  with checkpoint.Checkpointer(path) as checkpointer:
    assert checkpointer.latest_step() == newest
    assert_is(checkpointer.restore(INITIAL, data=iterator), newest)
    assert (checkpointer.restored_step, next(iterator)) == (newest, newest)
    with pytest.raises(ValueError, match=message):
      checkpointer.restore(INITIAL, 20)
  assert message in caplog.text
  assert_is(checkpoint.restore(path, INITIAL), newest)
  with pytest.raises(ValueError, match=message):
    checkpoint.restore(path / "20", INITIAL)
  assert inspection.main([str(path)]) == 1
  assert f"was saved as step {origin}" in capsys.readouterr().out
  # It does not count as the newest step when the next one is saved.
  save(path, 4, max_to_keep=2)
  assert "20.damaged" in os.listdir(path)
