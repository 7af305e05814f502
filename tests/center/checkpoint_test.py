"""Checkpoints of AGN with a center in a store, and of one kind by the other."""

import center_workers
from center_workers import new_directory
from center_workers import warnings_of
from center_workers import Workers
import jax
import numpy as np
import optax
import pytest
import quadratic_states
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import checkpoint

PARAMS = {"w": np.arange(4, dtype=np.float32) / 4, "b": np.float32(1)}
TX = optax.adam(0.125)
FOUR = fs.Strategy(devices=jax.devices()[:4])
KINDS = {"commit": "mean", "outer_tx": optax.sgd(0.5, momentum=0.5)}
COMPILED = fs.AGN(3, **KINDS)
STORE = center_workers.agn(3, **KINDS)
FRAGMENTS = center_workers.agn(4, "mean", fragments=2)
CODED = center_workers.agn(
  4, "sum", fragments=2, delay=1, blend=0.5, commit_dtype="int4"
)


def create(wrapper, strategy=None):
  stats = {"mean": np.zeros(2, np.float32)}
  return quadratic_states.create(
    [wrapper], TX, PARAMS, strategy=strategy, stats=stats
  )


def train_step(state, x):
  loss_fn = lambda p: ((p["w"] - x.mean()) ** 2).sum() + p["b"] ** 2
  _, grads = state.value_and_grad(loss_fn)
  stats = {"mean": state.stats["mean"] + x.mean()}
  return state.apply_gradients(grads=grads, stats=stats)


STEP = jax.jit(train_step)


def batch(i):
  return np.arange(4, dtype=np.float32) + i


def trained(state, first, last, directory=None, settled_at=None):
  """Returns the state of a single worker after some steps."""
  with Workers([state], STEP, directory) as group:
    for i in range(first, last):
      group.step([batch(i)])
      if i + 1 in (settled_at, last):
        group.states = group.settle()
    return group.states[0]


def trained_compiled(state, steps, strategy):
  step = strategy.jit(train_step) if strategy else STEP
  for i in range(steps):
    state = step(
      state, strategy.shard_batch(batch(i)) if strategy else batch(i)
    )
  return state


def restore(path, given, wanted):
  """Returns what a state becomes in another one's shape."""
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(5, given)
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(wanted)


def assert_center_equal(given, wanted, caplog):
  for name in ("params", "opt_state", "step", "stats"):
    a, b = jax.device_get((getattr(given, name), getattr(wanted, name)))
    assert_trees_equal(a, b)
  own = given.wrapper_states["agn"]
  assert (int(own.local_step), int(own.commits)) == (3, 1)
  [message] = warnings_of(caplog)
  assert "another state of wrapper 'agn'" in message
  return own


@pytest.mark.parametrize("wrapper", [STORE, CODED], ids=["mean", "coded"])
def test_resuming_in_mid_period_is_exact(tmp_path, caplog, wrapper):
  directory = new_directory()
  state, fresh = trained(create(wrapper), 0, 7, directory), create(wrapper)
  restored = restore(tmp_path, state, fresh)
  assert_trees_equal(restored, state)
  shardings = lambda state: jax.tree.map(lambda x: x.sharding, state)
  assert shardings(restored) == shardings(fresh)
  found = trained(restored, 7, 13, directory)
  # The same without the break. What was in flight is settled before it.
  assert_trees_equal(found, trained(create(wrapper), 0, 13, settled_at=7))
  assert warnings_of(caplog) == []


@pytest.mark.parametrize(
  ("wrapper", "steps", "clock"), [(STORE, 4, 9), (FRAGMENTS, 0, 10)]
)
def test_who_comes_later_takes_the_newest_center(
  tmp_path, caplog, wrapper, steps, clock
):
  directory = new_directory()
  state = create(wrapper)
  if steps:
    state = trained(state, 0, steps, directory)
  newest = trained(state, steps, 10, directory)
  restored = restore(tmp_path, state, create(wrapper))
  with fs.Worker(directory, 0, 1) as worker:
    state = worker.start(restored)
    assert (worker.clock, worker.missed_steps) == (clock, clock - steps)
  own = state.wrapper_states["agn"]
  assert_trees_equal(
    (state.params, state.opt_state), (newest.params, newest.opt_state)
  )
  assert_trees_equal(own.local_params, newest.params)
  assert not any(x.any() for x in jax.tree.leaves(own.grad_accum))
  assert int(own.local_step) == int(state.step) == clock
  # A new worker begins with the moments of the center.
  assert int(own.local_opt_state[0].count) == clock
  [message] = warnings_of(caplog)
  assert f"worker 0 goes on from local step {clock}, where the" in message


def test_compiled_commits_of_replicas_continue_in_a_store(tmp_path, caplog):
  state = trained_compiled(create(COMPILED, FOUR), 5, FOUR)
  restored = restore(tmp_path, state, create(STORE))
  own = assert_center_equal(restored, state, caplog)
  np.testing.assert_array_equal(own.local_params["w"], state.params["w"])
  np.testing.assert_array_equal(own.grad_accum["w"], np.zeros(4))
  assert int(own.local_opt_state[0].count) == 5
  saved = state.wrapper_states["agn"].outer_opt_state[0]
  np.testing.assert_array_equal(
    own.outer_opt_state[0].trace["w"], saved.trace["w"]
  )
  compiled = restore(tmp_path / "compiled", state, create(COMPILED))
  with fs.Worker(new_directory(), 0, 1) as worker:
    state = worker.start(restored)
    assert worker.clock == 3
    for i in range(3):
      state = worker.commit(STEP(state, batch(i)))
      compiled = STEP(compiled, batch(i))
  assert int(state.wrapper_states["agn"].commits) == 2
  # Its commit is the mean of these three steps.
  assert_trees_close(state.params, compiled.params, rtol=1e-6, atol=0)


@pytest.mark.parametrize("strategy", [None, FOUR])
def test_commits_in_a_store_continue_compiled(tmp_path, caplog, strategy):
  state = trained(create(STORE), 0, 5)
  restored = restore(tmp_path, state, create(COMPILED, strategy))
  own = assert_center_equal(restored, state, caplog)
  assert "outer" not in caplog.text and "sent, versions." in caplog.text
  rows = np.broadcast_to(state.params["w"], (4 if strategy else 1, 4))
  np.testing.assert_array_equal(own.local_params["w"], rows)
  assert own.local_opt_state[0].count.tolist() == [5] * len(rows)
  trained_compiled(restored, 1, strategy)
