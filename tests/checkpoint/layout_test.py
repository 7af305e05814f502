"""Checkpoints: files on disk, shardings, random keys."""

import json
from typing import Any

from flax import nnx
from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
from normed_states import assert_plain_equal
from normed_states import create
from normed_states import dynamic
from normed_states import MODEL
from normed_states import restore
from normed_states import save
from normed_states import trained
from normed_states import TX
from normed_states import X
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import data

P = jax.sharding.PartitionSpec


class FlaxState(flax_train_state.TrainState):
  """A state with batch statistics, as in Flax's ImageNet example."""

  batch_stats: Any


def create_flax(seed=0):
  variables = MODEL.init(jax.random.key(seed), X)
  return FlaxState.create(
    apply_fn=MODEL.apply,
    params=variables["params"],
    tx=TX,
    batch_stats=variables["batch_stats"],
  ).replace(step=jnp.zeros((), jnp.int32))


def save_flax(path, state, step=3):
  """Saves as a plain Flax program does."""
  with ocp.CheckpointManager(path) as manager:
    manager.save(step, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()


def abstract(state):
  return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def make_splits():
  numbers = np.arange(12)
  source = data.Arrays(numbers * 2.0, numbers)
  return data.Splits(source, source, num_classes=12)


# Files on disk.


def test_items_of_a_step(path):
  state = create(wrappers=dynamic())
  splits = make_splits()
  iterator = data.train_iterator(splits, batch_size=4, seed=0)
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, state)
    checkpointer.save(2, create())
    # With float32 parameters "auto" scales nothing and has no state.
    checkpointer.save(3, create(wrappers=[fs.LossScale("auto")]))
    checkpointer.save(4, state, data=iterator)
  items = {
    step: sorted(p.name for p in (path / step).iterdir() if p.is_dir())
    for step in ("1", "2", "3", "4")
  }
  assert items == {
    "1": ["default", "flaxshard", "wrappers"],
    "2": ["default", "flaxshard"],
    "3": ["default", "flaxshard"],
    "4": ["default", "flaxshard", "input_iterator", "wrappers"],
  }


def metadata(path, item="default"):
  return json.loads((path / "3" / item / "_METADATA").read_text())


def test_plain_item_equals_that_of_a_plain_program(tmp_path):
  save(tmp_path / "ours", trained(create(wrappers=dynamic())))
  save_flax(tmp_path / "plain", trained(create_flax()))
  assert metadata(tmp_path / "ours") == metadata(tmp_path / "plain")


def test_wrapper_states_are_saved_by_name(path):
  save(path, create(wrappers=dynamic()))
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(path / "3" / "wrappers")
  assert sorted(restored) == ["loss_scale"]
  assert float(restored["loss_scale"]["scale"]) == 2.0**15


def test_plain_program_restores_our_checkpoint(path):
  state = trained(create(wrappers=dynamic()))
  save(path, state)
  target = abstract(create_flax(seed=1))
  with ocp.CheckpointManager(path) as manager:
    restored = manager.restore(3, args=ocp.args.StandardRestore(target))
  assert type(restored) is FlaxState
  assert_plain_equal(restored, state)
  with ocp.StandardCheckpointer() as checkpointer:
    restored = checkpointer.restore(path / "3" / "default", target)
  assert_plain_equal(restored, state)
  # Both take the same next step.
  assert_plain_equal(trained(restored, 1), trained(state.without_wrappers(), 1))


# Shardings.


def test_replicated_state_is_restored_replicated(path):
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
  assert mesh.size == 8
  everywhere = jax.sharding.NamedSharding(mesh, P())
  put = lambda state: jax.device_put(state, everywhere)
  state = trained(put(create(wrappers=dynamic())))
  save(path, state)
  restored = restore(path, put(create(wrappers=dynamic(), seed=1)))
  assert_plain_equal(restored, state)
  assert_trees_equal(restored.wrapper_states, state.wrapper_states)
  for leaf in jax.tree.leaves(restored):
    assert leaf.sharding == everywhere
    assert leaf.committed
  assert int(restored.opt_state[0].count) == 3
  # A step takes it with a batch that is committed to the same mesh.
  step = jax.jit(lambda s, x: trained(s, 1).replace(step=s.step + x.sum()))
  batch = jax.device_put(
    np.ones(8, np.int32), jax.sharding.NamedSharding(mesh, P("replica"))
  )
  assert int(step(restored, batch).step) == 11


@pytest.mark.slow
def test_unplaced_leaves_are_restored_on_the_mesh_of_the_others(path):
  # Only the parameters are sharded. The optimizer's count is restored as a
  # committed array, which must not be committed to the first device.
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
  split = jax.sharding.NamedSharding(mesh, P("replica"))
  params = {"w": jax.device_put(jnp.arange(16.0), split)}
  make = lambda p: fs.TrainState.create(
    apply_fn=None, params=p, tx=TX, wrappers=dynamic()
  )
  state = make(params).apply_gradients(grads=params)
  save(path, state)
  fresh = make(jax.tree.map(jnp.zeros_like, params))
  restored = restore(path, fresh)
  assert restored.params["w"].sharding == split
  assert (
    restored.opt_state[0]
    .mu["w"]
    .sharding.is_equivalent_to(fresh.opt_state[0].mu["w"].sharding, 1)
  )
  for leaf in jax.tree.leaves(restored):
    assert len(leaf.devices()) == 8
  new_state = jax.jit(lambda s: s.apply_gradients(grads=s.params))(restored)
  wanted = state.apply_gradients(grads=state.params)
  np.testing.assert_allclose(new_state.params["w"], wanted.params["w"])
  assert int(new_state.opt_state[0].count) == 2
  assert int(new_state.wrapper_states["loss_scale"].good_steps) == 2


# Random keys.


class Dropped(nnx.Module):
  def __init__(self, rngs):
    self.linear = nnx.Linear(2, 3, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.linear(x))


def test_nnx_random_streams_are_restored(path):
  def make(seed):
    module = Dropped(nnx.Rngs(seed))
    return fs.create_train_state(module, None, None, TX, wrappers=dynamic())

  def draw(state):
    variables = {"params": state.params, "rngs": state.rngs}
    output, new = state.apply_fn(variables, X, mutable=["rngs"], mode="train")
    return output, state.replace(rngs=new["rngs"])

  _, state = draw(make(0))
  keys = [
    leaf
    for leaf in jax.tree.leaves(state.rngs)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
  ]
  assert keys
  save(path, state)
  restored = restore(path, make(1))
  assert_trees_equal(restored.rngs, state.rngs)
  np.testing.assert_array_equal(draw(restored)[0], draw(state)[0])


def make_keyed(key):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(2)}, tx=TX, keys={"dropout": key}
  )


def test_random_keys_are_restored(path):
  impl = "rbg"
  state = make_keyed(jax.random.split(jax.random.key(3, impl=impl), 4))
  save(path, state)
  fresh = make_keyed(jax.random.split(jax.random.key(0, impl=impl), 4))
  restored = restore(path, fresh)
  assert restored.keys["dropout"].dtype == state.keys["dropout"].dtype
  assert_trees_equal(restored.keys, state.keys)


def test_restoring_a_key_of_another_kind_raises(path):
  save(path, make_keyed(jax.random.key(3, impl="threefry2x32")))
  with pytest.raises(ValueError, match=r"keys/dropout: "):
    restore(path, make_keyed(jax.random.key(3, impl="rbg")))
