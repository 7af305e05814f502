"""Checkpointer: saves states, restores them, and refuses wrong ones."""

import functools
import logging
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import checkpoint

P = jax.sharding.PartitionSpec
X = np.array([[1.0, 2.0], [-0.5, 0.25]], np.float32)


class Normed(nn.Module):
  features: int = 3

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.BatchNorm(use_running_average=not train)(x)
    return nn.Dense(self.features)(x)


MODEL = Normed()
TX = optax.adam(0.125)


@functools.cache
def _initialized(model, tx, wrappers, seed):
  return fs.create_train_state(
    model, jax.random.key(seed), X, tx, wrappers=wrappers
  )


def create(model=MODEL, tx=TX, wrappers=(), seed=0):
  # A copy, because one test donates it.
  return jax.tree.map(jnp.copy, _initialized(model, tx, tuple(wrappers), seed))


def dynamic():
  return [fs.LossScale("dynamic")]


@jax.jit
def _train_step(state):
  grads = jax.tree.map(lambda p: p + 1.0, state.params)
  batch_stats = jax.tree.map(lambda s: s + 0.5, state.batch_stats)
  return state.apply_gradients(grads=grads, batch_stats=batch_stats)


def trained(state, steps=3):
  """Takes some steps, after which no leaf has its initial value."""
  for _ in range(steps):
    state = _train_step(state)
  return state


def assert_plain_equal(a, b):
  """Compares step, parameters, optimizer state and batch statistics."""
  for field in ("step", "params", "opt_state", "batch_stats"):
    assert_trees_equal(getattr(a, field), getattr(b, field))


def save(path, state, step=3, **kwargs):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(step, state, **kwargs)


def restore(path, state, step=None, **kwargs):
  # A new manager, as in a new process.
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(state, step, **kwargs)


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


# Saving and restoring.


def test_state_is_restored_bit_for_bit(path):
  wrappers = dynamic()
  state = trained(create(wrappers=wrappers))
  # A skipped step, so that no counter has its initial value.
  grads = jax.tree.map(lambda p: p * jnp.nan, state.params)
  state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
  scale = state.wrapper_states["loss_scale"]
  assert (float(scale.scale), int(scale.skipped_steps)) == (2.0**14, 1)
  save(path, state)
  fresh = create(wrappers=wrappers, seed=1)
  restored = restore(path, fresh)
  assert int(restored.step) == 3
  assert type(restored) is type(fresh)
  assert restored.tx is fresh.tx
  assert restored.apply_fn == fresh.apply_fn
  assert restored.wrappers == tuple(wrappers)
  assert_plain_equal(restored, state)
  assert_trees_equal(restored.wrapper_states, state.wrapper_states)
  # The state given to `restore` is not changed.
  assert int(fresh.step) == 0
  assert_plain_equal(trained(restored, 1), trained(state, 1))


def test_state_can_be_donated_once_save_returns(path):
  state = create(wrappers=dynamic())
  wanted = jax.device_get((state.params, state.batch_stats))
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, state)
    overwrite = jax.jit(
      lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0
    )
    jax.block_until_ready(overwrite(state))
  restored = restore(path, create(wrappers=dynamic(), seed=1))
  assert_trees_equal((restored.params, restored.batch_stats), wanted)


def test_leaving_the_context_with_an_error_waits_for_the_save(path):
  with pytest.raises(KeyError), checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create())
    raise KeyError
  assert_plain_equal(restore(path, create(seed=1)), create())


# Saving a step that exists.


def test_saving_a_step_again_returns_false_and_logs(path, caplog):
  state = create(wrappers=dynamic())
  with checkpoint.Checkpointer(path) as checkpointer:
    assert checkpointer.save(1, state) is True
    # While the first save still runs, and after it.
    with caplog.at_level(logging.INFO, "flaxshard"):
      assert checkpointer.save(1, state) is False
    assert f"step 1 has been saved in {path} already" in caplog.text
    assert checkpointer.save(2, state)
    # An earlier step, too.
    assert checkpointer.save(1, state) is False


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
  for leaf in jax.tree.leaves(restored):
    assert len(leaf.devices()) == 8
  new_state = jax.jit(lambda s: s.apply_gradients(grads=s.params))(restored)
  wanted = state.apply_gradients(grads=state.params)
  np.testing.assert_allclose(new_state.params["w"], wanted.params["w"])


# Paths that a user gives: of steps, of a workdir, of one step.


def test_workdir_directory_of_steps_and_step_are_restored(tmp_path):
  steps = tmp_path / "checkpoints"
  # Saved in the workdir, which has its steps in `checkpoints` already.
  save(steps, trained(create(), 3), 3)
  save(tmp_path, trained(create(), 4), 4)
  assert sorted(os.listdir(steps)) == ["3", "4"]
  assert os.listdir(tmp_path) == ["checkpoints"]
  for path, step, wanted in (
    (tmp_path, None, 4),
    (tmp_path, 3, 3),
    (steps, None, 4),
    (steps / "3", None, 3),
    (os.path.relpath(steps / "3"), 3, 3),
  ):
    restored = fs.checkpoint.restore(path, create(), step)
    assert_plain_equal(restored, trained(create(), wanted))
  assert int(restore(tmp_path, create()).step) == 4


def test_all_dtypes_are_restored(path):
  params = {
    "half": jnp.array([1.0, 2.0**-24], jnp.float16),
    "brain": jnp.array([3.0, 1e30], jnp.bfloat16),
    "tiny": jnp.array([0.5, -448.0], jnp.float8_e4m3fn),
    "count": jnp.array([1, -(2**31)], jnp.int32),
    "flag": jnp.array([True, False]),
    "complex": jnp.array(1 + 2j, jnp.complex64),
    "numpy": np.float32(2),
    "none": None,
  }
  create_from = lambda p: fs.TrainState.create(
    apply_fn=None, params=p, tx=optax.set_to_zero(), wrappers=dynamic()
  )
  save(path, create_from(params))
  zeros = jax.tree.map(jnp.zeros_like, params)
  restored = restore(path, create_from(zeros))
  assert_trees_equal(restored.params, params)
