"""Accumulate: batches, updates, replicas and other wrappers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
from regression import PARAMS
from regression import train_step
from regression import X
from regression import Y
import tree_equality

import flaxshard as fs

# A new optimizer would be another static field.
TX = optax.adam(optax.linear_schedule(0.1, 0.0, 4))
jitted = jax.jit(train_step)


def batch(*indices):
  return {
    "x": np.concatenate(X[list(indices)]),
    "y": np.concatenate(Y[list(indices)]),
  }


def create(wrappers=(), tx=TX, params=PARAMS, **kwargs):
  return quadratic_states.create(wrappers, tx, params, **kwargs)


assert_close = functools.partial(
  tree_equality.assert_trees_close, rtol=2e-6, atol=1e-7
)


def test_update_equals_that_of_one_large_batch(tmp_path):
  wrapper = fs.Accumulate(2)
  state, large = create([wrapper]), create()
  for i in (0, 1):
    before = state
    state, _ = jitted(state, batch(i))
    assert wrapper.pending(state.wrapper_states["accumulate"]) == 1
    tree_equality.assert_trees_equal(
      (state.params, state.opt_state), (before.params, before.opt_state)
    )
    # A restored sum continues to the bit.
    with fs.Checkpointer(tmp_path / str(i)) as checkpointer:
      checkpointer.save(1, state)
      restored = checkpointer.restore(create([wrapper]))
      # With fewer steps than are in the sum, and without the wrapper.
      fewer = checkpointer.restore(create([fs.Accumulate(1)]))
      plain = checkpointer.restore(create())
    assert int(plain.step) == i
    state, _ = jitted(state, batch(i + 1))
    restored, _ = jitted(restored, batch(i + 1))
    fewer, _ = jitted(fewer, batch(i + 1))
    large, _ = jitted(large, batch(i, i + 1))
    tree_equality.assert_trees_equal(restored, state)
    sums = state.wrapper_states["accumulate"]
    assert not any(np.any(np.asarray(g)) for g in jax.tree.leaves(sums.grads))
    assert wrapper.pending(sums) == 0
    # The optimizer's state is that of the optimizer alone.
    wanted = large.step, large.params, large.opt_state
    for got in (state, fewer):
      assert_close((got.step, got.params, got.opt_state), wanted)


def test_a_skipped_batch_is_left_out_and_does_not_change_collections():
  wrappers = [fs.LossScale("dynamic"), fs.Accumulate(3)]
  state = create(wrappers, optax.sgd(1.0), batch_stats={"sum": jnp.zeros(())})

  @jax.jit
  def step(state, x):
    _, grads = state.value_and_grad(lambda p: p["w2"].sum() * x)
    stats = {"sum": state.batch_stats["sum"] + x}
    return state.apply_gradients(grads=grads, batch_stats=stats)

  sums = []
  for x in (1.0, 2.0, jnp.inf, 4.0, 8.0):
    state = step(state, x)
    sums.append(float(state.batch_stats["sum"]))
  assert sums == [1, 3, 3, 7, 15] and int(state.step) == 1
  # The mean of three finite batches.
  assert int(state.wrapper_states["loss_scale"].skipped_steps) == 1
  assert_close(state.params["w2"], PARAMS["w2"] - np.float32(7 / 3))


def test_sums_of_half_precision_gradients_are_float32():
  params = {"w": jnp.zeros(2, jnp.bfloat16)}
  state = create([fs.Accumulate(256)], optax.sgd(1.0), params)
  assert state.wrapper_states["accumulate"].grads["w"].dtype == jnp.float32
  step = jax.jit(
    lambda state: state.apply_gradients(grads={"w": params["w"] + 1})
  )
  # In bfloat16 the sum of ones would end at 256, or before.
  state = functools.reduce(lambda state, _: step(state), range(256), state)
  assert state.params["w"].tolist() == [-1.0, -1.0]
  assert state.params["w"].dtype == jnp.bfloat16


def test_leaf_without_a_gradient_keeps_its_sum():
  state = create([fs.Accumulate(2)], tx=optax.sgd(1.0))
  ones = jax.tree.map(jnp.ones_like, state.params)
  state = state.apply_gradients(grads=ones)
  state = state.apply_gradients(grads={**ones, "w2": None})
  np.testing.assert_allclose(state.params["w1"], PARAMS["w1"] - 1, rtol=1e-6)
  np.testing.assert_array_equal(state.params["w2"], PARAMS["w2"])
  assert float(state.wrapper_states["accumulate"].grads["w2"][0]) == 1.0


# -- Replicas.


@pytest.mark.parametrize(
  "wrappers",
  [
    [fs.CrossShard(), fs.Accumulate(2)],
    [fs.Accumulate(2, per_replica=True), fs.CrossShard()],
    [fs.Accumulate(2, per_replica=True)],
    # A local step with the mean of the batches, and a commit.
    [fs.Accumulate(2, per_replica=True), fs.AGN(1, commit="mean")],
  ],
  ids=["inside", "around", "alone", "agn"],
)
def test_replicas_take_the_update_of_one_large_batch(wrappers):
  strategy = fs.Strategy()
  state = create([fs.LossScale("dynamic"), *wrappers], strategy=strategy)
  overflowing = batch(2)
  overflowing["x"][5] = np.inf  # of one replica
  for b in (batch(0), overflowing, batch(1)):
    state, _ = strategy.run(train_step, args=(state, strategy.shard_batch(b)))
  large, _ = jitted(create(), batch(0, 1))
  assert int(state.step) == 1
  assert_close(state.params, large.params, rtol=1e-5)


def test_another_number_of_replicas_starts_a_new_sum(tmp_path, caplog):
  wrappers = [fs.Accumulate(3, per_replica=True)]
  state = create(wrappers, strategy=fs.Strategy())
  sums = jax.tree.map(lambda x: x + 1, state.wrapper_states["accumulate"])
  state = state.replace(wrapper_states={"accumulate": sums})
  fewer = fs.Strategy(devices=jax.devices()[:2])
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
    restored = checkpointer.restore(create(wrappers, strategy=fewer))
  sums = restored.wrapper_states["accumulate"]
  assert int(sums.num_batches) == 0 and sums.grads["w2"].shape == (2, 8)
  assert not np.any(np.asarray(sums.grads["w2"]))
  # The log tells what is lost.
  assert "Dropped are grads" in caplog.text
