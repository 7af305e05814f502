"""Checkpoints of Accumulate with rows of tables, within a period."""

import jax
import numpy as np
import optax
import pytest

import flaxshard as fs

PARAMS = {"table": np.ones((12, 2), np.float32), "w": np.ones(2, np.float32)}
DENSE = optax.sgd(0.1)
ROWS = fs.sparse_rows(DENSE, ["table"])
IDS = np.array([[0, 3, 3, 5], [1, 3, 0, 0], [7, 3, 9, 0]], np.int32)


def step(state, ids):
  return state.minimize(lambda p: (p["table"][ids] @ p["w"]).mean())


@pytest.mark.slow
def test_runs_with_and_without_rows_continue_each_other(tmp_path):
  strategy = fs.Strategy(devices=jax.devices()[:2])
  run = strategy.jit(step)

  def create(tx):
    return fs.TrainState.create(
      apply_fn=None,
      params=PARAMS,
      tx=tx,
      wrappers=[fs.Accumulate(3)],
      strategy=strategy,
    )

  def train(state, batches):
    for ids in batches:
      state, _ = run(state, strategy.shard_batch(ids))
    return state

  expected = train(create(DENSE), IDS)
  for i, (first, then) in enumerate(
    ((DENSE, ROWS), (ROWS, DENSE), (ROWS, ROWS))
  ):
    with fs.Checkpointer(tmp_path / str(i)) as checkpointer:
      checkpointer.save(2, train(create(first), IDS[:2]))
    restored = fs.checkpoint.restore(tmp_path / str(i), create(then))
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7),
      train(restored, IDS[2:]).params,
      expected.params,
    )
