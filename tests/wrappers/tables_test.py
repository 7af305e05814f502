"""Wrappers with gradients that are rows of a table."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
import sparse_states
import tree_equality

import flaxshard as fs

SGD = optax.sgd(0.1)
ADAM = optax.adam(0.1)


@functools.cache
def strategy_of(replicas):
  return fs.Strategy(devices=jax.devices()[:replicas])


def create(tx, wrappers, strategy=None, params=None, sparse=("table",)):
  params = params or sparse_states.params()
  return quadratic_states.create(
    wrappers, tx, params, strategy=strategy, sparse=sparse
  )


def train(tx, wrappers, steps, replicas, sparse=("table",)):
  strategy = strategy_of(replicas)
  state = create(tx, wrappers, strategy, sparse=sparse)
  run = strategy.jit(sparse_states.train_step)
  for i in range(steps):
    state, _ = run(state, strategy.shard_batch(sparse_states.batch(i % 3)))
  return state


@pytest.mark.slow
def test_rows_around_an_average_equal_whole_gradients():
  state = train(SGD, [fs.EMA(0.5)], 7, 4)
  dense = train(SGD, [fs.EMA(0.5)], 7, 4, sparse=())
  tree_equality.assert_trees_close(state.params, dense.params)
  tree_equality.assert_trees_close(state.wrapper_states, dense.wrapper_states)


@pytest.mark.parametrize(
  "wrapper",
  [
    fs.AGN(2, "mean"),
    fs.AGN(2, "mean", transport="store"),
    fs.Accumulate(2, per_replica=True),
  ],
)
def test_tables_are_dense_with_one_warning(wrapper):
  wrappers = [fs.LossScale(8.0), wrapper]
  with pytest.warns(UserWarning) as caught:
    state = train(ADAM, wrappers, 3, 2)
  (warning,) = caught
  assert f"'{wrapper.name}'" in str(warning.message)
  assert "table" in str(warning.message)
  dense = train(ADAM, wrappers, 3, 2, sparse=())
  for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(dense), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_small_gradients_of_rows_in_float16():
  """Without a scale 1e-8 is zero in float16."""
  ids = jnp.array([2, 5, 2])

  def loss_fn(params):
    rows = params["table"].astype(jnp.float16)[ids]
    return (rows.astype(jnp.float32) * 1e-8).sum()

  state = create(
    optax.sgd(1e6), [fs.LossScale("dynamic")], params={"table": np.ones((6, 4))}
  )
  loss, grads = jax.jit(lambda s: s.value_and_grad(loss_fn))(state)
  assert fs.is_indexed_slices(grads["table"])
  assert grads["table"].dtype == jnp.float32
  wanted = np.zeros((6, 4))
  wanted[2], wanted[5] = 2e-8, 1e-8
  np.testing.assert_allclose(grads["table"].to_dense(), wanted, rtol=2e-2)
  new, _ = jax.jit(lambda s: s.minimize(loss_fn))(state)
  np.testing.assert_allclose(new.params["table"], 1 - 1e6 * wanted, rtol=1e-3)
  assert float(loss) == pytest.approx(1.2e-7)


def test_a_sum_of_rows_that_overflows_float32_skips_the_step():
  state = create(
    optax.sgd(1e-3),
    [fs.LossScale(fs.DynamicLossScale(1.0, min_scale=0.25))],
    params={"table": np.ones((5, 2))},
  )
  # Ids that occur twice: each row is finite, not their sum.
  loss = lambda p: (p["table"][jnp.array([3, 3, 1])] * 2e38).sum()
  new, _ = jax.jit(lambda s: s.minimize(loss))(state)
  assert float(new.wrapper_states["loss_scale"].scale) == 0.5
  np.testing.assert_array_equal(new.params["table"], state.params["table"])


@dataclasses.dataclass(frozen=True)
class Sign(fs.wrappers.Base):
  """Maps over all leaves, as a wrapper that knows no rows."""

  def apply(self, state, target, grads, next):
    return next(target, jax.tree.map(jnp.sign, grads)), state


@dataclasses.dataclass(frozen=True)
class RowSign(fs.wrappers.Base):
  takes_indexed_slices = True

  def apply(self, state, target, grads, next):
    is_rows = fs.is_indexed_slices
    signs = jax.tree.map(
      lambda g: g.map_values(jnp.sign) if is_rows(g) else jnp.sign(g),
      grads,
      is_leaf=is_rows,
    )
    return next(target, signs), state


class Watch(fs.wrappers.Base):
  """Overrides neither of the methods that get gradients."""


BATCH = sparse_states.batch(0)
jitted = jax.jit(sparse_states.train_step)


def test_a_custom_wrapper_gets_whole_gradients_and_a_warning():
  with pytest.warns(UserWarning, match=r"'sign'.*table.*takes_indexed_slices"):
    state, _ = jitted(create(SGD, [Sign()]), BATCH)
  dense, _ = jitted(create(SGD, [Sign()], sparse=()), BATCH)
  tree_equality.assert_trees_equal(state.params, dense.params)


@pytest.mark.parametrize("wrapper", [RowSign(), Watch()])
def test_a_custom_wrapper_that_takes_rows_gets_rows(wrapper):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    # Momentum moves the other rows if the gradient is a whole array.
    tx = optax.chain(optax.trace(0.9), optax.sgd(0.1))
    state = create(tx, [wrapper])
    trace = jax.tree.map(jnp.ones_like, state.opt_state)
    new, _ = jitted(state.replace(opt_state=trace), BATCH)
  unused = ~np.isin(np.arange(sparse_states.ROWS), BATCH["ids"])
  np.testing.assert_array_equal(
    new.params["table"][unused], state.params["table"][unused]
  )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:CrossShard")
@pytest.mark.parametrize(("rows", "reduction"), [(40, "sum"), (3, "mean")])
def test_groups_reduce_rows_as_they_reduce_arrays(rows, reduction):
  """For 4 replicas with two ids each, 3 rows are summed as an array."""

  def step(state, batch):
    batch = {**batch, "ids": batch["ids"] % 3}
    return state.minimize(sparse_states.loss_fn, batch)

  strategy = strategy_of(8)
  wrappers = [fs.CrossShard(reduction, ((0, 2, 4, 6), (1, 3, 5, 7)))]
  tables = []
  for sparse in ([], ["table"]):
    params = sparse_states.params(rows=rows)
    state = create(optax.adagrad(0.1), wrappers, strategy, params, sparse)
    jitted = strategy.jit(step)
    for i in range(2):
      state, _ = jitted(state, strategy.shard_batch(sparse_states.batch(i)))
    tables.append(
      [np.asarray(s.data) for s in state.params["table"].addressable_shards]
    )
  dense, new = tables
  np.testing.assert_allclose(new, dense, rtol=1e-6, atol=1e-6)
  assert not np.allclose(new[0], new[1])
  np.testing.assert_array_equal(new[0], new[2])
