"""Checkpoints of AGN with transport="host", and of one transport by another."""

import functools
import logging

import jax
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard.state import host_commits

PARAMS = {"w": np.arange(4, dtype=np.float32) / 4}
TX = optax.adam(0.125)
KINDS = {"commit": "mean", "outer_tx": optax.sgd(0.5, momentum=0.5)}
COMPILED = fs.AGN(3, **KINDS)
HOST = fs.AGN(3, transport="host", **KINDS)


@functools.cache
def strategy_of(replicas):
  return fs.Strategy(devices=jax.devices()[:replicas])


def create(wrapper, replicas=None):
  return fs.TrainState.create(
    apply_fn=None,
    params=PARAMS,
    tx=TX,
    wrappers=[wrapper],
    strategy=replicas and strategy_of(replicas),
    stats={"mean": np.zeros(2, np.float32)},
  )


def train_step(state, x):
  loss_fn = lambda p: ((p["w"] - x.mean()) ** 2).sum()
  _, grads = state.value_and_grad(loss_fn)
  stats = {"mean": state.stats["mean"] + x.mean()}
  return state.apply_gradients(grads=grads, stats=stats)


def trained(state, steps, replicas=None):
  step = jax.jit(train_step)
  for i in range(steps):
    x = np.arange(4, dtype=np.float32) + i
    if replicas is not None:
      step = strategy_of(replicas).jit(train_step)
      x = strategy_of(replicas).shard_batch(x)
    state = step(state, x)
    agn = host_commits.find(state.wrappers)
    if agn is not None and host_commits.due(agn, i + 1):
      state, commit = host_commits.take(state, (0,))
      state = host_commits.apply_mean(state, (0,), jax.device_get(commit))
  return state


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def save(path, state):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(5, state)


def restore(path, state):
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(state)


def warnings_of(caplog):
  return [
    r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING
  ]


def assert_center_equal(given, wanted):
  given, wanted = map(jax.device_get, (given, wanted))
  jax.tree.map(
    np.testing.assert_array_equal,
    (given.params, given.opt_state, given.step, given.stats),
    (wanted.params, wanted.opt_state, wanted.step, wanted.stats),
  )


@pytest.mark.parametrize("replicas", [None, 2])
def test_resuming_in_mid_period_is_exact(path, caplog, replicas):
  state = trained(create(HOST), 5)
  assert int(state.wrapper_states["agn"].commits) == 1
  save(path, state)
  # Replicated, so also on other devices.
  fresh = create(HOST, replicas)
  restored = restore(path, fresh)
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(restored),
    jax.device_get(state),
  )
  for a, b in zip(
    jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True
  ):
    assert a.sharding == b.sharding
  assert warnings_of(caplog) == []


def test_compiled_commits_of_replicas_continue_on_the_host(path, caplog):
  state = trained(create(COMPILED, 4), 5, 4)
  save(path, state)
  restored = restore(path, create(HOST))
  assert_center_equal(restored, state)
  own, saved = restored.wrapper_states["agn"], state.wrapper_states["agn"]
  np.testing.assert_array_equal(own.local_params["w"], state.params["w"])
  np.testing.assert_array_equal(own.grad_accum["w"], np.zeros(4))
  assert int(own.local_opt_state[0].count) == 5
  assert (int(own.local_step), int(own.commits)) == (3, 1)
  np.testing.assert_array_equal(
    own.outer_opt_state[0].trace["w"], saved.outer_opt_state[0].trace["w"]
  )
  assert not own.received.any()
  assert warnings_of(caplog) == [
    f"{path / '5'} has the state of wrapper 'agn' for 4 replicas, now it is "
    "one for all replicas of a process: each begins at the restored "
    "parameters. Dropped are the per-replica local_params, local_opt_state, "
    "grad_accum, collections; local_step goes back from 5 to 3 (accumulated "
    "steps lost: 2)."
  ]
  step = jax.jit(train_step, donate_argnums=0)
  assert int(step(restored, np.ones(4, np.float32)).step) == 6


@pytest.mark.parametrize("replicas", [None, 4])
def test_commits_on_the_host_continue_compiled(path, caplog, replicas):
  state = trained(create(HOST), 5)
  save(path, state)
  restored = restore(path, create(COMPILED, replicas))
  assert_center_equal(restored, state)
  own = restored.wrapper_states["agn"]
  rows = np.broadcast_to(state.params["w"], (replicas or 1, 4))
  np.testing.assert_array_equal(own.local_params["w"], rows)
  assert own.local_opt_state[0].count.tolist() == [5] * len(rows)
  assert (int(own.local_step), int(own.commits)) == (3, 1)
  [message] = warnings_of(caplog)
  assert "for all replicas of a process together, now there are" in message
  trained(restored, 1, replicas)


def test_a_checkpoint_of_an_old_state_without_flags(path):
  state = trained(create(HOST), 5)
  own = state.wrapper_states["agn"]
  save(path, state.replace(wrapper_states={"agn": own._replace(received=())}))
  restored = restore(path, create(HOST)).wrapper_states["agn"]
  # Those with a sum have had a gradient.
  assert restored.received.tolist() == [True]
