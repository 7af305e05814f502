"""Wrappers with gradients that are rows of a table."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sparse_states
import tree_equality

import flaxshard as fs

RNG = np.random.default_rng(0)
ROWS, WIDTH, PER_REPLICA = 40, 4, 6
PARAMS = {
  "table": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
  "w": RNG.normal(size=WIDTH).astype(np.float32),
}
SGD = optax.sgd(0.1)
ADAM = optax.adam(0.1)


@functools.cache
def strategy_of(replicas):
  return fs.Strategy(devices=jax.devices()[:replicas])


def make_batches(replicas, steps, size=PER_REPLICA):
  rng = np.random.default_rng(1)
  count = replicas * size
  return [
    {
      "ids": rng.integers(0, ROWS, count).astype(np.int32),
      "y": rng.normal(size=count).astype(np.float32),
    }
    for _ in range(steps)
  ]


def loss_fn(params, batch):
  predicted = params["table"][batch["ids"]] @ params["w"]
  return ((predicted - batch["y"]) ** 2).mean()


def step(state, batch):
  return state.minimize(loss_fn, batch)


def create(tx, wrappers, strategy=None, params=PARAMS, sparse=("table",)):
  return fs.TrainState.create(
    apply_fn=None,
    params=jax.tree.map(jnp.asarray, params),
    tx=tx,
    wrappers=wrappers,
    strategy=strategy,
    sparse=sparse,
  )


def train(tx, wrappers, batches, replicas=1, state=None, sparse=("table",)):
  strategy = strategy_of(replicas)
  state = state or create(tx, wrappers, strategy, sparse=sparse)
  run = strategy.jit(step)
  for batch in batches:
    state, _ = run(state, strategy.shard_batch(batch))
  return state


def assert_close(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_around_an_average_equal_whole_gradients():
  batches = make_batches(4, 7)
  state = train(SGD, [fs.EMA(0.5)], batches, 4)
  dense = train(SGD, [fs.EMA(0.5)], batches, 4, sparse=())
  assert_close(state.params, dense.params)
  assert_close(state.wrapper_states, dense.wrapper_states)


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
  batches = make_batches(2, 3)
  with pytest.warns(UserWarning) as caught:
    state = train(ADAM, wrappers, batches, 2)
  (warning,) = caught
  assert f"'{wrapper.name}'" in str(warning.message)
  assert "table" in str(warning.message)
  dense = train(ADAM, wrappers, batches, 2, sparse=())
  assert_close(state, dense)


@pytest.mark.parametrize("way", ["run", "jit"])
def test_a_table_whose_rows_are_split_has_the_values_of_a_whole_one(way):
  strategy = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
  sharding = jax.NamedSharding(strategy.mesh, jax.P("model"))
  split = {**PARAMS, "table": jax.device_put(PARAMS["table"], sharding)}
  state, wanted = create(ADAM, [], strategy, split), create(ADAM, [])
  jitted = strategy.jit(step) if way == "run" else jax.jit(step)
  for batch in make_batches(2, 3):
    state, _ = jitted(state, strategy.shard_batch(batch))
    wanted, _ = step(wanted, batch)
  assert state.params["table"].sharding.is_equivalent_to(sharding, 2)
  assert_close(
    (state.params, state.opt_state), (wanted.params, wanted.opt_state)
  )


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


def test_a_custom_wrapper_gets_whole_gradients_and_a_warning():
  batch = make_batches(1, 1)[0]
  with pytest.warns(UserWarning, match=r"'sign'.*table.*takes_indexed_slices"):
    state, _ = step(create(SGD, [Sign()]), batch)
  dense, _ = step(create(SGD, [Sign()], sparse=()), batch)
  tree_equality.assert_trees_equal(state.params, dense.params)


@pytest.mark.parametrize("wrapper", [RowSign(), Watch()])
def test_a_custom_wrapper_that_takes_rows_gets_rows(wrapper):
  batch = make_batches(1, 1)[0]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    # Momentum moves the other rows if the gradient is a whole array.
    tx = optax.chain(optax.trace(0.9), optax.sgd(0.1))
    state, _ = step(create(tx, [wrapper]), batch)
    unused = np.flatnonzero(~np.isin(np.arange(ROWS), batch["ids"]))
    trace = jax.tree.map(lambda x: x.at[...].set(1), state.opt_state)
    new, _ = step(state.replace(opt_state=trace), batch)
  np.testing.assert_array_equal(
    new.params["table"][unused, :], PARAMS["table"][unused, :]
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
