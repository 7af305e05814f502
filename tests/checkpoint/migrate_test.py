"""Restoring checkpoints with Flax's DynamicScale or optax's wrappers."""

import logging
from typing import Any

import flax
from flax.training import checkpoints
from flax.training import dynamic_scale as dynamic_scale_lib
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import flaxshard as fs

STEP = 7
ADAM = optax.adam(0.125)
PARAMS = {
  "w": np.arange(8, dtype=np.float32).reshape(2, 4),
  "half": np.ones(3, np.float16),
}
SCALED = fs.LossScale("dynamic")


class FlaxState(flax_train_state.TrainState):
  """As in Flax's ImageNet and WMT examples."""

  dynamic_scale: Any = None


def flax_state(tx=ADAM, dynamic_scale=None, params=PARAMS, **fields):
  """Returns a state after three steps, in which every leaf has changed."""
  params = jax.tree.map(jnp.asarray, params)
  state = FlaxState.create(
    apply_fn=None, params=params, tx=tx, dynamic_scale=dynamic_scale
  )
  for _ in range(3):
    state = _train_step(state)
  return state.replace(**fields)


@jax.jit
def _train_step(state):
  return state.apply_gradients(grads=state.params)


def ours(tx=ADAM, wrappers=(SCALED,), **kwargs):
  params = jax.tree.map(lambda x: jnp.zeros_like(jnp.asarray(x)), PARAMS)
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers, **kwargs
  )


def save_v0(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(STEP, args=ocp.args.StandardSave(state))


def save_flax(path, state):
  checkpoints.save_checkpoint(str(path), jax.device_get(state), STEP)


def save_msgpack(path, state):
  was = flax.config.flax_use_orbax_checkpointing
  flax.config.update("flax_use_orbax_checkpointing", False)
  try:
    save_flax(path, state)
  finally:
    flax.config.update("flax_use_orbax_checkpointing", was)
  assert (path / f"checkpoint_{STEP}").is_file()


def assert_same(given, wanted):
  given, wanted = jax.tree.leaves(given), jax.tree.leaves(wanted)
  for x, y in zip(given, wanted, strict=True):
    assert isinstance(x, jax.Array)
    assert x.dtype == jnp.asarray(y).dtype and not x.weak_type
    np.testing.assert_array_equal(x, y)


@pytest.fixture
def logged_notes(caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  return lambda: [
    r.getMessage().split(": ", 1)[-1]
    for r in caplog.records
    if r.name.startswith("flaxshard") and "no digests" not in r.getMessage()
  ]


# A field `dynamic_scale`.


DynamicScale = dynamic_scale_lib.DynamicScale
SCALES = {
  "trained": DynamicScale(fin_steps=jnp.int32(2), scale=jnp.float32(2.0**15)),
  # Its counter and scale are Python numbers until it is used.
  "unused": DynamicScale(scale=1024.0),
}


@pytest.mark.parametrize("save", [save_v0, save_flax, save_msgpack])
@pytest.mark.parametrize("name", SCALES)
def test_dynamic_scale_becomes_loss_scale(save, name, tmp_path, logged_notes):
  scale = SCALES[name]
  plain = flax_state(dynamic_scale=scale)
  save(tmp_path, plain)
  restored = fs.checkpoint.restore(tmp_path, ours())
  for field in ("step", "params", "opt_state"):
    assert_same(getattr(restored, field), getattr(plain, field))
  own = restored.wrapper_states["loss_scale"]
  values = (int(scale.fin_steps), 0, 0)
  wanted = (np.float32(scale.scale), *map(np.int32, values))
  assert_same(own, type(own)(*wanted))
  assert logged_notes() == [
    "its field 'dynamic_scale' becomes the state of wrapper 'loss_scale'"
  ]
  # Training continues from there.
  step = jax.jit(lambda s: s.minimize(lambda p: (p["w"] ** 2).sum())[0])
  new = step(restored)
  assert int(new.wrapper_states["loss_scale"].good_steps) == values[0] + 1


def test_loss_scale_starts_fresh_without_dynamic_scale(tmp_path, logged_notes):
  save_v0(tmp_path, flax_state())  # the field is None: float32, say
  restored = fs.checkpoint.restore(tmp_path, ours())
  assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**15
  assert logged_notes() == [
    "it has no state of wrapper 'loss_scale': that starts fresh"
  ]


def test_state_with_a_dynamic_scale_field_restores_it(tmp_path, logged_notes):
  scale = SCALES["trained"]
  save_v0(tmp_path, flax_state(dynamic_scale=scale))
  fresh = jax.tree.map(jnp.zeros_like, scale)
  state = ours(wrappers=(), dynamic_scale=fresh)
  restored = fs.checkpoint.restore(tmp_path, state)
  assert_same(restored.dynamic_scale, scale)
  assert logged_notes() == []


# Files and meshes.


def write_flax(directory, step):
  (directory / f"checkpoint_{step}").write_bytes(
    flax.serialization.to_bytes(flax_state(step=step))
  )


def test_restores_the_given_flax_file(tmp_path):
  for step in (2, 10):
    write_flax(tmp_path, step)
  for given, step, wanted in (
    (tmp_path, None, 10),
    (tmp_path, 2, 2),
    (tmp_path / "checkpoint_2", None, 2),
    (str(tmp_path / "checkpoint_2"), None, 2),
  ):
    assert int(fs.checkpoint.restore(given, ours(), step).step) == wanted
  # Of two with the same number, that of a manager.
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "2", flax_state(step=22))
  assert int(fs.checkpoint.restore(tmp_path, ours(), 2).step) == 22


def test_checkpointer_continues_from_flax_files(tmp_path, caplog):
  for step in (2, 10, 11):
    write_flax(tmp_path, step)
  cut = tmp_path / "checkpoint_11"
  cut.write_bytes(cut.read_bytes()[:40])
  with fs.Checkpointer(tmp_path, max_to_keep=1) as checkpointer:
    assert checkpointer.all_steps() == [2, 10, 11]
    state = checkpointer.restore(ours())
    assert int(state.step) == checkpointer.restored_step == 10
    assert f"step 11 is damaged, passed over: {cut}" in caplog.text
    assert int(checkpointer.restore(ours(), 2).step) == 2
    with pytest.raises(ValueError, match=r"step=3 .* which has step 10"):
      checkpointer.save(3, state)
    checkpointer.save(10, state)  # is there
    checkpointer.save(12, state.replace(step=state.step + 2))
    checkpointer.save(13, state.replace(step=state.step + 3))
    assert int(checkpointer.restore(ours()).step) == 13
    assert checkpointer.all_steps() == [2, 10, 13]
    # Of two with the same number, that of a manager.
    write_flax(tmp_path, 99)
    (tmp_path / "checkpoint_99").rename(tmp_path / "checkpoint_13")
    assert int(checkpointer.restore(ours()).step) == 13
    assert checkpointer.all_steps() == [2, 10, 13]
  # No file of Flax is renamed or deleted.
  names = sorted(path.name for path in tmp_path.iterdir())
  theirs = [f"checkpoint_{step}" for step in (10, 11, 13, 2)]
  assert names == ["13", *theirs]
