"""Checkpoints of AGN with a center in a store, and of one kind by the other."""

import functools

import center_workers
import jax
import numpy as np
import optax
import pytest
import tree_equality

import flaxshard as fs
from flaxshard import checkpoint

PARAMS = {"w": np.arange(4, dtype=np.float32) / 4, "b": np.float32(1)}
TX = optax.adam(0.125)
KINDS = {"commit": "mean", "outer_tx": optax.sgd(0.5, momentum=0.5)}
COMPILED = fs.AGN(3, **KINDS)
STORE = fs.AGN(3, transport="store", **KINDS)
CODED = fs.AGN(
  4,
  "sum",
  transport=fs.Store(fragments=2, delay=1, blend=0.5, commit_dtype="int4"),
)


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
  loss_fn = lambda p: ((p["w"] - x.mean()) ** 2).sum() + p["b"] ** 2
  _, grads = state.value_and_grad(loss_fn)
  stats = {"mean": state.stats["mean"] + x.mean()}
  return state.apply_gradients(grads=grads, stats=stats)


STEP = jax.jit(train_step)


def batch(i):
  return np.arange(4, dtype=np.float32) + i


def trained(state, first, last, directory=None):
  """Returns the state of a single worker after some steps."""
  with center_workers.Workers([state], STEP, directory) as group:
    for i in range(first, last):
      group.step([batch(i)])
    return group.settle()[0]


def trained_compiled(state, steps, replicas):
  step = strategy_of(replicas).jit(train_step) if replicas else STEP
  for i in range(steps):
    x = strategy_of(replicas).shard_batch(batch(i)) if replicas else batch(i)
    state = step(state, x)
  return state


def restore(path, given, wanted):
  """Returns what a state becomes in another one's shape."""
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(5, given)
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(wanted)


def assert_center_equal(given, wanted):
  given, wanted = map(jax.device_get, (given, wanted))
  jax.tree.map(
    np.testing.assert_array_equal,
    (given.params, given.opt_state, given.step, given.stats),
    (wanted.params, wanted.opt_state, wanted.step, wanted.stats),
  )


@pytest.mark.parametrize("wrapper", [STORE, CODED], ids=["mean", "coded"])
def test_resuming_in_mid_period_is_exact(tmp_path, caplog, wrapper):
  directory = center_workers.new_directory()
  state = trained(create(wrapper), 0, 7, directory)
  fresh = create(wrapper)
  restored = restore(tmp_path, state, fresh)
  tree_equality.assert_trees_equal(restored, state)
  for a, b in zip(
    jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True
  ):
    assert a.sharding == b.sharding
  found = trained(restored, 7, 13, directory)
  # The same without the break. What was in flight is settled before it.
  with center_workers.Workers([create(wrapper)], STEP) as group:
    for i in range(13):
      group.step([batch(i)])
      if i == 6:
        group.states = group.settle()
    [wanted] = group.settle()
  tree_equality.assert_trees_equal(found, wanted)
  assert center_workers.warnings_of(caplog) == []


def test_one_that_was_left_behind_takes_the_newest_center(tmp_path, caplog):
  directory = center_workers.new_directory()
  state = trained(create(STORE), 0, 4, directory)
  newest = trained(state, 4, 10, directory)
  restored = restore(tmp_path, state, create(STORE))
  with fs.Worker(directory, 0, 1) as worker:
    state = worker.start(restored)
    assert (worker.clock, worker.missed_steps) == (9, 5)
  own = state.wrapper_states["agn"]
  tree_equality.assert_trees_equal(state.params, newest.params)
  tree_equality.assert_trees_equal(own.local_params, newest.params)
  assert not any(x.any() for x in jax.tree.leaves(own.grad_accum))
  [message] = center_workers.warnings_of(caplog)
  assert "worker 0 goes on from local step 9, where the others are" in message


def test_compiled_commits_of_replicas_continue_in_a_store(tmp_path, caplog):
  state = trained_compiled(create(COMPILED, 4), 5, 4)
  restored = restore(tmp_path, state, create(STORE))
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
  [message] = center_workers.warnings_of(caplog)
  assert "another state of wrapper 'agn'" in message
  compiled = restore(tmp_path / "compiled", state, create(COMPILED))
  with fs.Worker(center_workers.new_directory(), 0, 1) as worker:
    state = worker.start(restored)
    assert worker.clock == 3
    for i in range(3):
      state = worker.commit(STEP(state, batch(i)))
      compiled = STEP(compiled, batch(i))
  assert int(state.wrapper_states["agn"].commits) == 2
  # Its commit is the mean of these three steps.
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6),
    state.params,
    compiled.params,
  )


@pytest.mark.parametrize("replicas", [None, 4])
def test_commits_in_a_store_continue_compiled(tmp_path, caplog, replicas):
  state = trained(create(STORE), 0, 5)
  restored = restore(tmp_path, state, create(COMPILED, replicas))
  assert_center_equal(restored, state)
  own = restored.wrapper_states["agn"]
  rows = np.broadcast_to(state.params["w"], (replicas or 1, 4))
  np.testing.assert_array_equal(own.local_params["w"], rows)
  assert own.local_opt_state[0].count.tolist() == [5] * len(rows)
  assert (int(own.local_step), int(own.commits)) == (3, 1)
  [message] = center_workers.warnings_of(caplog)
  assert "another state of wrapper 'agn'" in message
  trained_compiled(restored, 1, replicas)
