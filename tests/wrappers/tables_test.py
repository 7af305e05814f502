"""Wrappers with gradients that are rows of a table."""

import warnings

import agn_problem
import grouped
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
import sparse_states
import tree_equality

import flaxshard as fs


class Watch(fs.wrappers.Base):
  """Overrides neither of the methods that get gradients."""


def create(tx, *wrappers, params=None, sparse=("table",), strategy=None):
  params = params or sparse_states.params()
  return quadratic_states.create(
    wrappers, tx, params, strategy=strategy, sparse=sparse
  )


def train(tx, wrapper, sparse=("table",)):
  strategy = agn_problem.strategy_of(4)
  state = create(
    tx, fs.LossScale(8.0), wrapper, sparse=sparse, strategy=strategy
  )
  run = strategy.jit(sparse_states.train_step)
  for i in range(3):
    state, _ = run(state, strategy.shard_batch(sparse_states.batch(i)))
  return state


@pytest.mark.parametrize(
  ("tx", "wrapper", "is_dense"),
  [
    (optax.sgd(0.1), fs.EMA(0.5), False),
    # Adam moves rows without a gradient, too, if a table is dense.
    (optax.adam(0.1), fs.AGN(2, "mean"), True),
    (optax.adam(0.1), fs.AGN(2, "mean", transport="store"), True),
    (optax.adam(0.1), fs.Accumulate(2, per_replica=True), True),
    (optax.adagrad(0.1), fs.CrossShard("sum", ((0, 2), (1, 3))), False),
  ],
)
@pytest.mark.filterwarnings("ignore:CrossShard")
def test_steps_equal_those_of_whole_gradients(tx, wrapper, is_dense):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    warnings.filterwarnings("ignore", "CrossShard")
    state = train(tx, wrapper)
  words = f"'{wrapper.name}'", "table", "takes_indexed_slices"
  said = [all(x in str(w.message) for x in words) for w in caught]
  assert said == [True] * is_dense
  dense = train(tx, wrapper, sparse=())
  for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(dense), strict=True):
    x, y = grouped.on_each(x), grouped.on_each(y)
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrapper", [fs.EMA(), Watch()])
def test_a_wrapper_that_takes_rows_gets_rows(wrapper):
  batch = sparse_states.batch(0)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    # Momentum moves the other rows if the gradient is a whole array.
    state = create(optax.chain(optax.trace(0.9), optax.sgd(0.1)), wrapper)
    trace = jax.tree.map(jnp.ones_like, state.opt_state)
    state = state.replace(opt_state=trace)
    new, _ = jax.jit(sparse_states.train_step)(state, batch)
  unused = ~np.isin(np.arange(sparse_states.ROWS), batch["ids"])
  tree_equality.assert_trees_equal(
    new.params["table"][unused], state.params["table"][unused]
  )


def test_small_gradients_of_rows_in_float16():
  """Without a scale 1e-8 is zero in float16."""

  def loss_fn(params):
    rows = params["table"].astype(jnp.float16)[jnp.array([2, 5, 2])]
    return (rows.astype(jnp.float32) * 1e-8).sum()

  params = {"table": np.ones((6, 4))}
  state = create(optax.sgd(1e6), fs.LossScale("dynamic"), params=params)
  loss, grads = jax.jit(lambda s: s.value_and_grad(loss_fn))(state)
  assert float(loss) == pytest.approx(1.2e-7)
  assert fs.is_indexed_slices(grads["table"])
  assert grads["table"].dtype == jnp.float32
  wanted = np.zeros((6, 4))
  wanted[2], wanted[5] = 2e-8, 1e-8
  np.testing.assert_allclose(grads["table"].to_dense(), wanted, rtol=2e-2)
  new, _ = jax.jit(lambda s: s.minimize(loss_fn))(state)
  np.testing.assert_allclose(new.params["table"], 1 - 1e6 * wanted, rtol=1e-3)


def test_a_sum_of_rows_that_overflows_float32_skips_the_step():
  rule = fs.DynamicLossScale(1.0, min_scale=0.25)
  params = {"table": np.ones((5, 2))}
  state = create(optax.sgd(1e-3), fs.LossScale(rule), params=params)
  # Ids that occur twice: each row is finite, not their sum.
  loss = lambda p: (p["table"][jnp.array([3, 3, 1])] * 2e38).sum()
  new, _ = jax.jit(lambda s: s.minimize(loss))(state)
  assert float(new.wrapper_states["loss_scale"].scale) == 0.5
  tree_equality.assert_trees_equal(new.params, state.params)
