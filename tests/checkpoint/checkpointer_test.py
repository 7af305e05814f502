"""Checkpointer: saves states and positions in the data, and restores them."""

import json
import logging
import os

import checkpoint_states as states
import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import v1 as ocp_v1
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import data

# One state.


def test_saved_state_can_be_donated_and_an_error_waits_for_the_save(tmp_path):
  state = states.weights(2.0)
  with pytest.raises(KeyError), fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
    overwrite = jax.jit(
      lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0
    )
    jax.block_until_ready(overwrite(state))
    raise KeyError
  restored = fs.checkpoint.restore(tmp_path, states.weights())
  assert_trees_equal(restored, states.weights(2.0))


def test_saving_a_step_again_returns_false_and_logs(tmp_path, caplog):
  state = states.weights()
  with fs.Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.save(1, state) is True
    # While the first save still runs, and after it.
    with caplog.at_level(logging.INFO, "flaxshard"):
      assert checkpointer.save(1, state) is False
    assert f"step 1 has been saved in {tmp_path} already" in caplog.text
    # The number of a step may be that of an array.
    assert checkpointer.save(jnp.int32(2), state)
    assert checkpointer.save(np.int64(1), state) is False
  assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_workdir_directory_of_steps_and_step_are_restored(tmp_path):
  steps = tmp_path / "checkpoints"
  (tmp_path / "slurm-1234").mkdir()  # no step of the workdir
  # Saved in the workdir, which has its steps in `checkpoints` already.
  states.write_ours(steps, states.weights(3), step=3)
  states.write_ours(tmp_path, states.weights(4), step=4)
  assert sorted(os.listdir(steps)) == ["3", "4"]
  assert sorted(os.listdir(tmp_path)) == ["checkpoints", "slurm-1234"]
  for path, number, wanted in (
    (tmp_path, None, 4),
    (tmp_path, np.array(3), 3),
    (steps, None, 4),
    (steps / "3", None, 3),
    (os.path.relpath(steps / "3"), 3, 3),
  ):
    restored = fs.checkpoint.restore(path, states.weights(), number)
    assert_trees_equal(restored, states.weights(wanted))


def test_reading_a_missing_directory_creates_nothing(tmp_path):
  with fs.Checkpointer(tmp_path / "typo") as checkpointer:
    assert checkpointer.latest_step() is None
    assert list(checkpointer.all_steps()) == []
    assert checkpointer.best_step() is None
    checkpointer.check()
  assert os.listdir(tmp_path) == []


# The position in the data.


def take(iterator, count):
  return [next(iterator)["labels"].tolist() for _ in range(count)]


def make_iterator():
  numbers = np.arange(12)
  source = data.Arrays(numbers * 2.0, numbers)
  splits = data.Splits(source, source, num_classes=12)
  return data.train_iterator(splits, batch_size=5, seed=0)


def test_data_continues_from_the_saved_position(tmp_path):
  whole = take(make_iterator(), 9)
  iterator = make_iterator()
  iterator.start_prefetch()
  assert take(iterator, 4) == whole[:4]
  position = iterator.get_state()
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(4, states.weights(), data=iterator)
    # The save is asynchronous, its position that of the call.
    assert take(iterator, 2) == whole[4:6]
  saved = json.loads((tmp_path / "4/input_iterator/metadata").read_text())
  assert saved == {"positions": [position], "is_bytes": False}
  fresh = make_iterator()
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.restore(states.weights(), data=fresh)
  assert take(fresh, 5) == whole[4:]


@pytest.mark.parametrize(
  ("position", "first", "other"),
  [({"next": [1, 2]}, None, b""), (b"\x00 bytes", b"", None)],
)
def test_custom_iterator_is_restored(tmp_path, position, first, other):
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, states.weights(), data=states.Counter(position))
    counter = states.Counter(first)
    checkpointer.restore(states.weights(), data=counter)
    assert counter.position == position
    with pytest.raises(ValueError, match=r"another iterator.*bytes"):
      checkpointer.restore(states.weights(), data=states.Counter(other))


def test_a_position_that_grain_has_saved_is_restored(tmp_path):
  dataset = grain.MapDataset.range(9).to_iter_dataset()
  iterator, state = iter(dataset), states.weights()
  assert [next(iterator) for _ in range(3)] == [0, 1, 2]
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(
      1,
      args=ocp.args.Composite(
        default=ocp.args.StandardSave(state.without_wrappers()),
        input_iterator=grain.checkpoint.CheckpointSave(iterator),
      ),
    )
  fresh = iter(dataset)
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.restore(state, data=fresh)
  assert next(fresh) == 3


# Several states, as of a GAN. One of them is an ensemble, as `jax.vmap` makes.


def make_states():
  critic = states.weights(5.0, wrappers=[fs.Accumulate(4)])
  return {
    "generator": states.weights(
      3.0, wrappers=[fs.LossScale("dynamic"), fs.EMA(0.5)]
    ),
    "discriminator": states.weights(4.0, wrappers=[], size=4),
    "critics": jax.tree.map(lambda x: jnp.stack([x, -x]), critic),
  }


def test_states_by_name(tmp_path):
  saved = jax.tree.map(lambda x: x + 1, make_states())
  with fs.Checkpointer(tmp_path) as checkpointer:
    assert checkpointer.save(7, saved)
    restored = checkpointer.restore(make_states())
    assert list(restored) == ["generator", "discriminator", "critics"]
    assert_trees_equal(restored, saved)
    assert not checkpointer.save(7, restored)
    with pytest.raises(ValueError, match="was saved from another state"):
      checkpointer.save(7, make_states())
  # Some of them, and into another stack of wrappers.
  other = {"generator": states.weights(wrappers=[fs.EMA(0.5)])}
  other = fs.checkpoint.restore(tmp_path, other)["generator"]
  assert_trees_equal(other.params, saved["generator"].params)
  average = saved["generator"].wrapper_states["ema"]
  assert_trees_equal(other.wrapper_states["ema"], average)
  # A plain program reads a dict of plain states.
  with pytest.warns(UserWarning, match="accumulate.* 1 batches"):
    plain = {name: s.without_wrappers() for name, s in saved.items()}
  with ocp.CheckpointManager(tmp_path) as manager:
    found = manager.restore(7, args=ocp.args.StandardRestore(plain))
  assert_trees_equal(jax.tree.map(np.asarray, found), plain)
  # Other states. Of another model the average differs, too.
  larger = states.weights(size=4, wrappers=[fs.EMA(0.5)])
  for wanted, error, words in (
    (states.weights(), ValueError, "'discriminator', 'generator'.* one state"),
    ({"critic": states.weights()}, ValueError, "'generator'.*'critic'"),
    ({"generator": larger}, ValueError, r"model .*: params/w: .*\(4,\)"),
    ({"generator": {"w": jnp.ones(2)}}, TypeError, "TrainState"),
    ({}, TypeError, "TrainState"),
  ):
    with pytest.raises(error, match=words):
      fs.checkpoint.restore(tmp_path, wanted)


def test_two_checkpointers_of_a_process_know_each_others_steps(tmp_path):
  with fs.Checkpointer(tmp_path) as first, fs.Checkpointer(tmp_path) as second:
    first.save(1, states.weights(1))
    second.save(5, states.weights(5))
    second.wait()
    assert_trees_equal(first.restore(states.weights()), states.weights(5))
    with pytest.raises(ValueError, match="step=3 cannot be saved"):
      first.save(3, states.weights(3))
    first.save(6, states.weights(6))


# Managers of Orbax.


def test_plain_item_names_the_item_of_the_train_state(tmp_path):
  state = states.weights(2.0, wrappers=[])
  with ocp.CheckpointManager(tmp_path) as manager:
    args = ocp.args.Composite(
      train=ocp.args.StandardSave(state.without_wrappers()),
      other=ocp.args.StandardSave({"x": jnp.ones(1)}),
    )
    manager.save(3, args=args)
  restored = fs.checkpoint.restore(
    tmp_path, states.weights(wrappers=[]), plain_item="train"
  )
  assert_trees_equal(restored, state)
  # A Checkpointer cannot read it, and does not rename it.
  with fs.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(ValueError, match="only 'other', 'train': plain_item"):
      checkpointer.restore(restored)
    assert checkpointer.save(4, restored)
    assert checkpointer.all_steps() == [3, 4]


def test_a_manager_of_orbax_saves_and_restores(tmp_path):
  state = states.weights(2.0)
  options = ocp.CheckpointManagerOptions(
    step_prefix="step", step_format_fixed_length=6
  )
  handlers = fs.checkpoint.item_handlers() | {
    "more": ocp.JsonCheckpointHandler()
  }
  with ocp.CheckpointManager(
    tmp_path, options=options, item_handlers=handlers
  ) as manager:
    for number in (1, 20):
      wanted = state.replace(step=jnp.int32(number))
      items = {"more": ocp.args.JsonSave({"a": 1})}
      items |= fs.checkpoint.save_args(wanted)
      manager.save(number, args=ocp.args.Composite(**items))
      # `restore` waits for the save that still runs.
      restored = fs.checkpoint.restore(manager, states.weights())
      assert_trees_equal(restored, wanted)
    assert int(fs.checkpoint.restore(manager, state, 1).step) == 1
    plain = ocp.args.StandardRestore(states.abstract(wanted.without_wrappers()))
    read = manager.restore(
      20,
      args=ocp.args.Composite(default=plain, wrappers=ocp.args.PyTreeRestore()),
    )
    manager.save(21, args=fs.checkpoint.save_args(wanted))
  assert_trees_equal(read["default"], wanted.without_wrappers())
  scale = read["wrappers"]["loss_scale"]["scale"]
  assert scale == state.wrapper_states["loss_scale"].scale
  assert (tmp_path / "step_000021" / "wrappers").is_dir()
  assert int(fs.checkpoint.restore(str(tmp_path), state).step) == 20
  with ocp_v1.training.Checkpointer(tmp_path / "v1") as checkpointer:
    checkpointer.save(1, state.without_wrappers())
    restored = fs.checkpoint.restore(checkpointer, states.weights())
  assert_trees_equal(restored, state)
