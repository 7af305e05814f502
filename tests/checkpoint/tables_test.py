"""Checkpoints of AGN and Accumulate with rows of tables, within a period."""

import jax
import numpy as np
import optax
import pytest

import flaxshard as fs

ROWS = 12
PARAMS = {"table": np.ones((ROWS, 2), np.float32), "w": np.ones(2, np.float32)}
SGD = optax.sgd(0.1, momentum=0.5)
SPARSE = fs.sparse_rows(SGD, ["table"])
IDS = np.array([[0, 3, 3, 5], [1, 3, 0, 0], [7, 3, 9, 0]], np.int32)


def step(state, ids):
  return state.minimize(lambda p: (p["table"][ids] @ p["w"]).mean())


def create(tx, wrapper, replicas):
  strategy = fs.Strategy(devices=jax.devices()[:replicas])
  state = fs.TrainState.create(
    apply_fn=None,
    params=PARAMS,
    tx=tx,
    wrappers=[wrapper],
    strategy=strategy,
  )
  return strategy, state


def train(strategy, state, batches):
  run = strategy.jit(step)
  for ids in batches:
    state, _ = run(state, strategy.shard_batch(ids))
  return state


def save(directory, state):
  with fs.checkpoint.Checkpointer(directory) as checkpointer:
    checkpointer.save(2, state)


def restore(directory, state):
  with fs.checkpoint.Checkpointer(directory) as checkpointer:
    return checkpointer.restore(state)


def assert_close(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
  "wrapper", [fs.AGN(3, "mean"), fs.Accumulate(3)], ids=["agn", "accumulate"]
)
def test_a_period_goes_on_after_a_restore(wrapper, tmp_path):
  strategy, state = create(SPARSE, wrapper, 2)
  saved = train(strategy, state, IDS[:2])
  save(tmp_path, saved)
  expected = train(strategy, saved, IDS[2:])
  restored = restore(tmp_path, create(SPARSE, wrapper, 2)[1])
  resumed = train(strategy, restored, IDS[2:])
  for x, y in zip(
    jax.tree.leaves(resumed), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
  "wrapper", [fs.AGN(3, "mean"), fs.Accumulate(3)], ids=["agn", "accumulate"]
)
def test_runs_with_and_without_rows_continue_each_other(wrapper, tmp_path):
  tx = optax.sgd(0.1)
  rows = fs.sparse_rows(tx, ["table"])
  strategy, state = create(tx, wrapper, 2)
  expected = train(strategy, state, IDS)
  for first, then in ((tx, rows), (rows, tx)):
    directory = tmp_path / str(then is rows)
    save(directory, train(strategy, create(first, wrapper, 2)[1], IDS[:2]))
    restored = restore(directory, create(then, wrapper, 2)[1])
    touched = restored.wrapper_states[wrapper.name].touched
    if then is rows:
      used = np.any(np.atleast_2d(touched["table"]), axis=0)
      assert np.flatnonzero(used).tolist() == [0, 1, 3, 5]
    else:
      assert touched == {}
    resumed = train(strategy, restored, IDS[2:])
    assert_close(resumed.params, expected.params)


@pytest.mark.slow
def test_a_restart_on_other_replicas_begins_a_period(tmp_path):
  wrapper = fs.AGN(3, "mean")
  strategy, state = create(SPARSE, wrapper, 2)
  saved = train(strategy, state, IDS[:2])
  save(tmp_path, saved)
  for tx in (SPARSE, SGD):
    restored = restore(tmp_path, create(tx, wrapper, 4)[1])
    agn = restored.wrapper_states["agn"]
    assert int(agn.local_step) == 0
    assert not any(map(np.any, jax.tree.leaves((agn.grad_accum, agn.touched))))
    assert agn.local_params["table"].shape == (4, ROWS, 2)
    np.testing.assert_array_equal(
      restored.params["table"], saved.params["table"]
    )
