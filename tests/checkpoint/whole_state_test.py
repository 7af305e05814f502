"""Whole states, wrappers included, that a program saved with its own calls."""

import logging

import flax
from flax import serialization
from flax.training import checkpoints as flax_checkpoints
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

WRAPPERS = {
  "loss_scale": fs.LossScale("dynamic"),
  "cross_shard": fs.CrossShard("mean"),
  "agn": fs.AGN(4),
}


def create(*names, value=0.0):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.full(3, value)},
    tx=optax.adam(0.5),
    wrappers=[WRAPPERS[name] for name in names],
  )


@pytest.fixture(scope="module")
def state():
  """A state in which no counter has its first value."""
  state = create("loss_scale", "agn", value=2.0)
  state = state.apply_gradients(grads={"w": jnp.full(3, jnp.inf)})
  return state.apply_gradients(grads={"w": jnp.ones(3)})


def standard_save(path, state):
  with ocp.CheckpointManager(path) as manager:
    manager.save(5, args=ocp.args.StandardSave(state))
  return path


def standard_checkpointer(path, state):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path / "state", state)
  return path / "state"


def flax_orbax(path, state):
  flax_checkpoints.save_checkpoint(path, state, step=5)
  return path


def flax_msgpack(path, state):
  with flax.config.temp_flip_flag("use_orbax_checkpointing", False):
    flax_checkpoints.save_checkpoint(path, jax.device_get(state), step=5)
  return path


def clu_checkpoint(path, state):
  # What clu.checkpoint writes; the package itself needs TensorFlow.
  (path / "ckpt-5.flax").write_bytes(serialization.to_bytes(state))
  (path / "ckpt-5.index").write_bytes(b"of TensorFlow")
  return path


def to_bytes(path, state):
  (path / "state.msgpack").write_bytes(serialization.to_bytes(state))
  return path / "state.msgpack"


WRITERS = [
  standard_save,
  standard_checkpointer,
  flax_orbax,
  flax_msgpack,
  clu_checkpoint,
  to_bytes,
]


@pytest.mark.parametrize("write", WRITERS)
def test_whole_state_is_restored_with_and_without_its_wrappers(
  write, state, tmp_path, caplog
):
  where = write(tmp_path, state)
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


def test_number_without_a_field_is_passed_over_and_named(tmp_path, caplog):
  saved = {**serialization.to_state_dict(create(value=2.0)), "epoch": 3}
  saved["meta"] = {"rate": 0.5}
  with ocp.CheckpointManager(tmp_path / "orbax") as manager:
    manager.save(5, args=ocp.args.StandardSave(saved))
  (tmp_path / "msgpack").write_bytes(serialization.msgpack_serialize(saved))
  for name in ("orbax", "msgpack"):
    caplog.clear()
    with caplog.at_level(logging.INFO, "flaxshard"):
      restored = fs.checkpoint.restore(tmp_path / name, create())
    np.testing.assert_array_equal(restored.params["w"], np.full(3, 2.0))
    assert "'epoch'" in caplog.text and "'meta/rate'" in caplog.text
  # An array may be a part of the model.
  saved["epoch"] = np.int32(3)
  (tmp_path / "msgpack").write_bytes(serialization.msgpack_serialize(saved))
  with pytest.raises(ValueError, match=r"epoch: .*where nothing is expected"):
    fs.checkpoint.restore(tmp_path / "msgpack", create())


@pytest.mark.parametrize("write", [standard_save, to_bytes])
def test_step_of_64_bits_is_restored_if_it_fits(write, tmp_path):
  state = create()
  (tmp_path / "large").mkdir()
  with jax.enable_x64(True):
    fits = write(tmp_path, state.replace(step=jnp.int64(7)))
    too_large = state.replace(step=jnp.int64(2**31))
    too_large = write(tmp_path / "large", too_large)
  restored = fs.checkpoint.restore(fits, create())
  assert (int(restored.step), restored.step.dtype) == (7, jnp.int32)
  with pytest.raises(ValueError, match=rf"step: {2**31} is .* int32"):
    fs.checkpoint.restore(too_large, create())
