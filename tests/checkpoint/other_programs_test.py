"""Checkpoints of other programs: layouts, whole states."""

import logging
from typing import Any

import checkpoint_states as states
import flax
from flax import serialization
from flax.training import checkpoints as flax_checkpoints
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import plain_states
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

STEP = 5
ADAM = optax.adam(0.125)
PARAMS = {"w": np.arange(8.0).reshape(2, 4), "half": np.ones(3, np.float16)}
PARAMS = jax.tree.map(jnp.asarray, PARAMS)
WRAPPERS = {
  "loss_scale": fs.LossScale("dynamic"),
  "cross_shard": fs.CrossShard("mean"),
  "agn": fs.AGN(4),
}


class FlaxState(flax_train_state.TrainState):
  """As in Flax's ImageNet and WMT examples."""

  dynamic_scale: Any = None


def flax_state(dynamic_scale=None, step=0):
  """Returns a state in which every leaf but the scale has changed."""
  state = FlaxState.create(apply_fn=None, params=PARAMS, tx=ADAM)
  state = plain_states.changed(state.replace(step=jnp.int32(0)))
  return state.replace(step=step, dynamic_scale=dynamic_scale)


def create(*names, **kwargs):
  return fs.TrainState.create(
    apply_fn=None,
    params=jax.tree.map(jnp.zeros_like, PARAMS),
    tx=ADAM,
    wrappers=[WRAPPERS[name] for name in names],
    **kwargs,
  )


@pytest.fixture
def logged_notes(caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  return lambda: [
    message.split(": ", 1)[-1]
    for message in states.messages(caplog, logging.INFO)
  ]


# The writers; each may return the path that is restored.


def flax_orbax(path, state):
  flax_checkpoints.save_checkpoint(str(path), jax.device_get(state), STEP)


def flax_msgpack(path, state):
  with flax.config.temp_flip_flag("use_orbax_checkpointing", False):
    flax_checkpoints.save_checkpoint(str(path), jax.device_get(state), STEP)
  assert (path / f"checkpoint_{STEP}").is_file()


def clu_checkpoint(path, state):
  # What clu.checkpoint writes; the package itself needs TensorFlow.
  (path / "ckpt-5.flax").write_bytes(serialization.to_bytes(state))
  (path / "ckpt-5.index").write_bytes(b"of TensorFlow")


def to_bytes(path, state):
  (path / "state.msgpack").write_bytes(serialization.to_bytes(state))
  return path / "state.msgpack"


WRITERS = [
  plain_states.write_v0,
  plain_states.write_v0_flat,
  flax_orbax,
  flax_msgpack,
  clu_checkpoint,
  to_bytes,
]


@pytest.fixture(scope="module")
def state():
  """A state in which no leaf has its first value."""
  return plain_states.changed(create("loss_scale", "agn"))


@pytest.mark.parametrize("write", WRITERS)
def test_whole_state_is_restored_with_and_without_its_wrappers(
  write, state, tmp_path, caplog
):
  where = write(tmp_path, state) or tmp_path
  for names in (["loss_scale", "agn"], [], ["cross_shard", "loss_scale"]):
    caplog.clear()
    with caplog.at_level(logging.INFO, "flaxshard"):
      restored = fs.checkpoint.restore(where, create(*names))
    assert_trees_equal(
      (restored.step, restored.params, restored.opt_state),
      (state.step, state.params, state.opt_state),
    )
    for name in state.wrapper_states:
      told = f"a state of wrapper '{name}': left alone" in caplog.text
      assert told == (name not in names)
      if name in names:
        assert_trees_equal(
          restored.wrapper_states[name], state.wrapper_states[name]
        )


# A field `dynamic_scale`.

DynamicScale = dynamic_scale_lib.DynamicScale
SCALES = {
  "trained": DynamicScale(fin_steps=jnp.int32(2), scale=jnp.float32(2.0**15)),
  # Its counter and scale are Python numbers until it is used.
  "unused": DynamicScale(scale=1024.0),
}


@pytest.mark.parametrize("write", [plain_states.write_v0, flax_msgpack])
@pytest.mark.parametrize("name", SCALES)
def test_dynamic_scale_becomes_loss_scale(write, name, tmp_path, logged_notes):
  scale = SCALES[name]
  plain = flax_state(scale, step=jnp.int32(3))
  write(tmp_path, plain)
  restored = fs.checkpoint.restore(tmp_path, create("loss_scale"))
  for field in ("step", "params", "opt_state"):
    assert_trees_equal(getattr(restored, field), getattr(plain, field))
  own = restored.wrapper_states["loss_scale"]
  values = (int(scale.fin_steps), 0, 0)
  wanted = (np.float32(scale.scale), *map(np.int32, values))
  assert_trees_equal(own, type(own)(*map(jnp.asarray, wanted)))
  (note,) = logged_notes()
  assert "'dynamic_scale' becomes" in note and "'loss_scale'" in note
  # Training continues from there.
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  new = step(restored)
  assert int(new.wrapper_states["loss_scale"].good_steps) == values[0] + 1
  # Without the wrapper, the field is left alone.
  fs.checkpoint.restore(tmp_path, create())
  assert "'dynamic_scale': left alone" in logged_notes()[1]


def test_states_without_loss_scale_or_with_the_field(tmp_path, logged_notes):
  plain_states.write_v0(tmp_path / "none", flax_state())  # the field is None
  restored = fs.checkpoint.restore(tmp_path / "none", create("loss_scale"))
  assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**15
  assert logged_notes() == [
    "it has no state of wrapper 'loss_scale': that starts fresh"
  ]
  scale = SCALES["trained"]
  plain_states.write_v0(tmp_path / "field", flax_state(scale))
  state = create(dynamic_scale=jax.tree.map(jnp.zeros_like, scale))
  restored = fs.checkpoint.restore(tmp_path / "field", state)
  assert_trees_equal(restored.dynamic_scale, scale)
  assert len(logged_notes()) == 1


# Numbers.


def test_number_without_a_field_is_passed_over_and_named(tmp_path, caplog):
  saved = {**serialization.to_state_dict(create()), "epoch": 3}
  saved["meta"] = {"rate": 0.5}
  with ocp.CheckpointManager(tmp_path / "orbax") as manager:
    manager.save(5, args=ocp.args.StandardSave(saved))
  (tmp_path / "msgpack").write_bytes(serialization.msgpack_serialize(saved))
  for name in ("orbax", "msgpack"):
    caplog.clear()
    with caplog.at_level(logging.INFO, "flaxshard"):
      fs.checkpoint.restore(tmp_path / name, create())
    assert "'epoch'" in caplog.text and "'meta/rate'" in caplog.text
  # An array may be a part of the model.
  saved["epoch"] = np.int32(3)
  (tmp_path / "msgpack").write_bytes(serialization.msgpack_serialize(saved))
  with pytest.raises(ValueError, match=r"epoch: .*where nothing is expected"):
    fs.checkpoint.restore(tmp_path / "msgpack", create())


@pytest.mark.parametrize("write", [plain_states.write_v0, to_bytes])
def test_step_of_64_bits_is_restored_if_it_fits(write, tmp_path):
  state = create()
  (tmp_path / "large").mkdir()
  with jax.enable_x64(True):
    fits = write(tmp_path, state.replace(step=jnp.int64(7))) or tmp_path
    too_large = state.replace(step=jnp.int64(2**31))
    large = tmp_path / "large"
    large = write(large, too_large) or large
  restored = fs.checkpoint.restore(fits, create())
  assert (int(restored.step), restored.step.dtype) == (7, jnp.int32)
  with pytest.raises(ValueError, match=rf"step: {2**31} is .* int32"):
    fs.checkpoint.restore(large, create())


# Directories of Flax's files.


def write_flax(directory, step):
  (directory / f"checkpoint_{step}").write_bytes(
    serialization.to_bytes(flax_state(step=step))
  )


def test_checkpointer_continues_from_flax_files(tmp_path, caplog):
  for step in (2, 10, 11):
    write_flax(tmp_path, step)
  cut = tmp_path / "checkpoint_11"
  cut.write_bytes(cut.read_bytes()[:40])
  with fs.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
    assert checkpointer.all_steps() == [2, 10, 11]
    state = checkpointer.restore(create())
    assert int(state.step) == checkpointer.restored_step == 10
    assert f"step 11 is damaged, passed over: {cut}" in caplog.text
    assert int(checkpointer.restore(create(), 2).step) == 2
    assert (
      int(fs.checkpoint.restore(tmp_path / "checkpoint_2", state).step) == 2
    )
    with pytest.raises(ValueError, match=r"step=3 .* which has step 10"):
      checkpointer.save(3, state)
    checkpointer.save(10, state)  # is there
    checkpointer.save(12, state.replace(step=state.step + 2))
    checkpointer.save(13, state.replace(step=state.step + 3))
    assert int(checkpointer.restore(create()).step) == 13
    assert checkpointer.all_steps() == [2, 10, 13]
    # Of two with the same number, that of a manager.
    write_flax(tmp_path, 99)
    (tmp_path / "checkpoint_99").rename(tmp_path / "checkpoint_13")
    assert int(checkpointer.restore(create()).step) == 13
    assert checkpointer.all_steps() == [2, 10, 13]
  # No file of Flax is renamed or deleted.
  names = sorted(path.name for path in tmp_path.iterdir())
  theirs = [f"checkpoint_{step}" for step in (10, 11, 13, 2)]
  assert names == ["13", *theirs]
