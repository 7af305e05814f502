"""Restoring and saving when steps are damaged, deleted or written meanwhile."""

import hashlib
import json
import os
import pathlib
import pkgutil
import shutil
import zlib

import checkpoint_states as states
from checkpoint_states import flip
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.checkpoint import __main__ as inspection
from flaxshard.checkpoint import reader
from flaxshard.checkpoint import step_files
from flaxshard.checkpoint import steps


def trained(step, **kwargs):
  """Returns a state that differs from that of any other step."""
  return states.weights(step, **kwargs).replace(step=jnp.int32(step))


RESTORE = ("orbax.checkpoint.PyTreeCheckpointHandler.restore",)
INITIAL = trained(0)
CONFIG = {"seed": 3, "model": {"name": "cnn"}}


def cut(file):
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def save(path, *steps, **kwargs):
  with fs.Checkpointer(path, **kwargs) as checkpointer:
    for step in steps:
      data = states.Counter(step)
      checkpointer.save(step, trained(step), data, metrics={"step": step})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  save(path, 1, 2, 3, config=CONFIG)
  return path


@pytest.fixture
def path(saved, tmp_path, monkeypatch):
  # No other program deletes these steps meanwhile.
  monkeypatch.setattr(steps, "_DELETION_SECONDS", 0)
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
  items = {"default", "input_iterator", "metrics", "wrappers", "flaxshard"}
  assert {name.split("/")[0] for name in named} == items
  assert step_files.check(step) == {
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


def test_without_digests_only_sizes_are_compared(tmp_path, monkeypatch):
  # In a container, the owner of the files may have no name.
  monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
  save(tmp_path, 3, 4, digests=False)
  file = tmp_path / "4" / "default" / "manifest.ocdbt"
  flip(file)
  assert not step_files.verify(tmp_path / "4")
  cut(file)
  with fs.Checkpointer(tmp_path, digests=False) as checkpointer:
    assert_is(checkpointer.restore(INITIAL), 3)
  # The position of another step, which has the same size, is damage too.
  position = "input_iterator/metadata"
  shutil.copy(tmp_path / "4" / position, tmp_path / "3" / position)
  with pytest.raises(ValueError, match=f"3/{position} has crc32"):
    fs.checkpoint.restore(tmp_path, INITIAL, 3)


@pytest.mark.parametrize("damage", [cut, flip, pathlib.Path.unlink])
def test_every_damaged_file_is_named(path, damage):
  step = path / "3"
  assert step_files.verify(step)
  names = files(step)
  # Of Orbax's own metadata only the items are compared.
  if damage is flip:
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
  for text in (json.dumps(found), "5", '{"files": {}}'):
    file.write_text(text)
    with pytest.raises(step_files.Damaged, match=r"digests\.json is not"):
      step_files.verify(path / "3")
  # What a deletion that was killed late can leave of a step.
  shutil.copytree(path / "3" / "default", path / "4" / "default")
  names = "1/default 2/wrappers 3/flaxshard 4/_CHECKPOINT_METADATA"
  for name in names.split():
    shutil.rmtree(path / name, ignore_errors=True)
    with pytest.raises(step_files.Damaged, match=f"/{name} is missing"):
      step_files.verify(path / name[0])


# Passing a damaged step over.


def test_damaged_steps_are_passed_over(path, caplog):
  file = max(path.glob("3/default/d/*"), key=lambda p: p.stat().st_size)
  flip(file)
  (path / "7").mkdir()
  (path / "8").write_text("a note")  # no step, as for Orbax
  before = contents(path)
  data = states.Counter(0)
  with fs.Checkpointer(path) as checkpointer:
    assert_is(checkpointer.restore(INITIAL, data=data), 2)
    assert checkpointer.restored_step == checkpointer.latest_step() == 2
  assert data.position == 2
  # Without handlers, Orbax refuses a directory with an empty step.
  with ocp.CheckpointManager(
    path, item_handlers=fs.checkpoint.item_handlers()
  ) as manager:
    assert_is(fs.checkpoint.restore(manager, INITIAL), 2)
  assert_is(fs.checkpoint.restore(path, INITIAL, 1), 1)
  empty, other = states.messages(caplog)[:2]
  assert "7 is empty" in empty
  assert other.startswith(f"step 3 is damaged, passed over: {file} has crc32")
  for where in (path / "3", path / "3" / "default"):
    with pytest.raises(ValueError, match=r"/3/default/d/.* has crc32"):
      fs.checkpoint.restore(where, INITIAL)
  assert contents(path) == before
  # Where no step is whole, all are named.
  shutil.rmtree(path / "2" / "default")
  flip(path / "1" / "wrappers" / "_METADATA")
  with fs.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match="no checkpoint that is compl") as e:
      checkpointer.restore(INITIAL, data=data)
    assert checkpointer.latest_step() is None
  for fact in ("7 is empty.", f"{file} has", "2/default is", "_METADATA has"):
    assert fact in str(e.value)
  assert data.position == 2


def test_other_model_or_missing_position_is_not_damage(path):
  with fs.Checkpointer(path) as checkpointer:
    with pytest.raises(ValueError, match=r"/3 was written by another model"):
      checkpointer.restore(trained(0, tx=optax.sgd(0.1)))
    checkpointer.save(4, trained(4))
    with pytest.raises(ValueError, match="/4 has no input_iterator"):
      checkpointer.restore(INITIAL, data=states.Counter(0))
    assert list(checkpointer.all_steps()) == [1, 2, 3, 4]


# Saving after a damaged step was passed over.


@pytest.mark.parametrize(
  ("name", "damage"),
  [
    ("default/_METADATA", flip),
    # Orbax's manager cannot be created with these, and names no file.
    ("metrics/metrics", lambda file: file.write_text("[1]")),
    ("_CHECKPOINT_METADATA", cut),
  ],
)
def test_damaged_steps_are_renamed_at_the_next_save(path, name, damage, caplog):
  # What a killed save leaves is no step, and not renamed.
  shutil.copytree(path / "3", path / "4.orbax-checkpoint-tmp")
  damage(path / "3" / name)
  damaged = contents(path / "3")
  (path / "9").mkdir()
  with fs.Checkpointer(path, max_to_keep=2, best_metric="step") as checkpointer:
    assert_is(checkpointer.restore(INITIAL), 2)
    assert checkpointer.best_step() == 2
    with pytest.raises(ValueError, match=f"/3/{name}"):
      checkpointer.restore(INITIAL, 3)
    checkpointer.save(3, trained(3), metrics={"step": 3})
    assert checkpointer.best_step() == 3
    assert list(checkpointer.all_steps()) == [2, 3]
    assert_is(checkpointer.restore(INITIAL), 3)
  for step in (3, 9):
    message = f"{path / str(step)} is damaged: renamed to {path}/{step}.damaged"
    assert message in states.messages(caplog)
  assert {"2", "3", "3.damaged", "9.damaged"} <= set(os.listdir(path))
  assert contents(path / "3.damaged") == damaged
  assert step_files.verify(path / "3")


@pytest.mark.parametrize(
  ("move", "origin", "newest"), [(shutil.copytree, 2, 3), (shutil.move, 3, 2)]
)
def test_copied_or_renamed_step_is_passed_over(path, move, origin, newest):
  move(path / str(origin), path / "20")
  data = states.Counter(0)
  with fs.Checkpointer(path) as checkpointer:
    assert checkpointer.latest_step() == newest
    assert_is(checkpointer.restore(INITIAL, data=data), newest)
    assert (checkpointer.restored_step, data.position) == (newest, newest)
  for where, step in ((path / "20", None), (path, 20)):
    with pytest.raises(ValueError, match=f"/20 was saved as step {origin}"):
      fs.checkpoint.restore(where, INITIAL, step)
  assert inspection.main([str(path)]) == 1
  # It does not count as the newest step when the next one is saved.
  save(path, 4, max_to_keep=2)
  assert "20.damaged" in os.listdir(path)


# While another program saves, or an error passes.


def restore_by_checkpointer(path):
  with fs.Checkpointer(path) as checkpointer:
    return checkpointer.restore(states.weights())


def restore(path):
  return fs.checkpoint.restore(path, states.weights())


def failing(original, error):
  """Returns a function that fails for the item `default` of step 2."""

  def fail(*args, **kwargs):
    if "/2/default" in str(args):
      raise error
    return original(*args, **kwargs)

  return fail


@pytest.mark.parametrize(
  ("names", "error"),
  [
    (RESTORE, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")),
    (RESTORE, ValueError("NOT_FOUND: Error opening [too many open files]")),
    (RESTORE, MemoryError()),
    (("os.stat", "builtins.open"), PermissionError(13, "Permission denied")),
  ],
)
def test_transient_errors_are_raised(tmp_path, names, error, monkeypatch):
  with ocp.CheckpointManager(tmp_path) as manager:
    for step in (1, 2):
      state = states.weights(step).without_wrappers()
      manager.save(step, args=ocp.args.StandardSave(state))
  with fs.Checkpointer(tmp_path) as checkpointer:
    with monkeypatch.context() as patch:
      for name in names:
        patch.setattr(name, failing(pkgutil.resolve_name(name), error))
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
  [
    (restore_by_checkpointer, ["."]),
    (restore, ["default/_METADATA"]),
    (restore, ["default/d"]),  # an error of Orbax
    (restore, ["flaxshard", "_CHECKPOINT_METADATA", "default/d"]),
  ],
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
      for target in (path / "2" / name for name in deleted):
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    return original(where, item)

  # While it is waited for, the other program goes on.
  monkeypatch.setattr("time.sleep", lambda _: shutil.rmtree(path / "2", True))
  monkeypatch.setattr(reader, "open_unverified", open_unverified)
  assert_trees_equal(read(path), states.weights(3))


_WRITER = """
import sys
import checkpoint_states as states
import flaxshard as fs
with fs.Checkpointer(sys.argv[1], max_to_keep=2) as checkpointer:
  for step in range(1, 60):
    checkpointer.save(step, states.weights(step), metrics={"loss": 1 / step})
"""


@pytest.mark.slow
def test_reading_beside_a_program_that_saves(programs, tmp_path):
  path = tmp_path / "checkpoints"
  reading = fs.Checkpointer(path)
  writer, last = programs.start(tmp_path, str(path), script=_WRITER), 0
  while not writer.has_ended:
    if reading.latest_step() is None:
      continue
    for state in (restore(path), reading.restore(states.weights())):
      step = int(state.params["w"][0])
      assert step >= last
      last = step
    assert inspection.main([str(path)]) == 0
  writer.end()
  assert last > 2
