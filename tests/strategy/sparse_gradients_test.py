"""Row-sparse gradients in every way to run a step on several devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sparse_states
from tree_equality import assert_trees_close

import flaxshard as fs
from flaxshard.replicas import rows as rows_lib

P = jax.sharding.PartitionSpec

EIGHT = fs.Strategy()
SPATIAL = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
ONE = fs.Strategy(devices=jax.devices()[:1])

# No warning is due to a correct step.
pytestmark = pytest.mark.filterwarnings("error")


@functools.cache
def reference():
  """Returns the parameters of one device, with dense gradients and optax."""
  return sparse_states.reference(sparse_states.ADAGRAD, 3)


def run(strategy, state, way):
  """Takes three steps."""
  batches = [strategy.shard_batch(sparse_states.batch(i)) for i in range(3)]
  if way == "run_steps":
    return strategy.run_steps(sparse_states.train_step, state, batches)[0]
  jit = strategy.jit if way == "run" else jax.jit
  step = jit(sparse_states.train_step, donate_argnums=0)
  for batch in batches:
    state, _ = step(state, batch)
  return state


def slow(*case):
  return pytest.param(*case, marks=pytest.mark.slow)


DYNAMIC, SHARDED = fs.LossScale("dynamic"), fs.CrossShard()


@pytest.mark.parametrize(
  ("way", "strategy", "spec", "wrappers"),
  [
    ("run", EIGHT, P(), []),
    slow("run", EIGHT, P(), [DYNAMIC, SHARDED]),
    slow("run", EIGHT, P("replica", None), [fs.LossScale(8.0)]),
    ("run", SPATIAL, P("model", None), [SHARDED, DYNAMIC]),
    slow("run", SPATIAL, P(None, "model"), []),
    slow("run_steps", SPATIAL, P("model", None), [DYNAMIC]),
    slow("jit", EIGHT, P(), [DYNAMIC]),
    slow("jit", EIGHT, P("replica", None), []),
    ("jit", SPATIAL, P("model", None), []),
  ],
)
def test_steps_equal_dense_steps_on_the_whole_batch(
  way, strategy, spec, wrappers
):
  state = sparse_states.create(strategy, sparse_states.ADAGRAD, wrappers, spec)
  new = run(strategy, state, way)
  assert_trees_close(new.params, reference())
  assert new.params["table"].sharding.is_equivalent_to(
    jax.sharding.NamedSharding(strategy.mesh, spec), 2
  )


# 8 replicas with two ids each: rows are gathered for the larger table, and a
# whole array is summed for the smaller one.
@pytest.mark.slow
@pytest.mark.parametrize("rows", [sparse_states.ROWS, 6])
def test_rows_that_no_replica_uses_stay_whatever_is_sent(rows):
  def step(state, batch):
    batch = {**batch, "ids": batch["ids"] % 4}
    return state.minimize(sparse_states.loss_fn, batch)

  def train(strategy):
    state = sparse_states.create(strategy, optax.adam(0.1), rows=rows)
    step_of_strategy = strategy.jit(step)
    for i in range(3):
      batch = strategy.shard_batch(sparse_states.batch(i))
      state, _ = step_of_strategy(state, batch)
    return state

  slices = fs.IndexedSlices(jnp.arange(2), jnp.ones((2, 4)), (rows, 4))
  assert rows_lib.gather_is_smaller(slices, 8) == (rows > 6)
  many, one = train(EIGHT), train(ONE)
  # Without their momentum, which dense Adam would apply.
  assert_trees_close((many.params, many.opt_state), (one.params, one.opt_state))
  np.testing.assert_array_equal(
    many.params["table"][4:], sparse_states.TABLE[4:rows]
  )


@pytest.mark.parametrize(
  ("bad", "strategy", "spec", "wrappers"),
  [
    (np.inf, EIGHT, P(), [DYNAMIC, SHARDED]),
    slow(np.nan, EIGHT, P(), [DYNAMIC]),
    slow(np.nan, SPATIAL, P("model", None), [SHARDED, DYNAMIC]),
  ],
)
def test_overflow_in_rows_of_one_replica_skips_the_step_on_all(
  bad, strategy, spec, wrappers
):
  step = strategy.jit(sparse_states.step_with_poison)
  state = sparse_states.create(strategy, sparse_states.ADAGRAD, wrappers, spec)
  poison = np.zeros(sparse_states.BATCH, np.float32)
  good = strategy.shard_batch({**sparse_states.batch(0), "poison": poison})
  state, _ = step(state, good)
  before = jax.device_get((state.params, state.opt_state))
  poison[11] = bad
  batch = strategy.shard_batch({**sparse_states.batch(1), "poison": poison})
  state, _ = step(state, batch)
  after = jax.device_get((state.params, state.opt_state))
  jax.tree.map(np.testing.assert_array_equal, before, after)
  metrics = {name: float(x) for name, x in state.metrics().items()}
  assert metrics == {"loss_scale": 2.0**14, "skipped_steps": 1}
  assert int(state.step) == 1
  # On every device.
  for x in jax.tree.leaves(state.params):
    assert all(np.isfinite(s.data).all() for s in x.addressable_shards)


@pytest.mark.slow
def test_replicas_equal_one_replica_with_tf_semantics():
  eight, one = (
    run(
      strategy,
      sparse_states.create(strategy, optax.adam(0.1), sparse_semantics="tf"),
      "run",
    )
    for strategy in (EIGHT, ONE)
  )
  assert_trees_close(
    (eight.params, eight.opt_state), (one.params, one.opt_state)
  )


def step_reduced_by_hand(skip, state, batch):
  loss, grads = state.value_and_grad(sparse_states.loss_fn, batch)
  grads = fs.get_replica_context().all_reduce("mean", grads)
  new = state.apply_gradients(grads=grads, skip_gradients_aggregation=skip)
  return new, loss


@pytest.mark.slow
def test_rows_reduced_by_hand():
  state = sparse_states.create(EIGHT, sparse_states.ADAGRAD, [SHARDED])
  step = EIGHT.jit(functools.partial(step_reduced_by_hand, True))
  for i in range(3):
    state, _ = step(state, EIGHT.shard_batch(sparse_states.batch(i)))
  assert_trees_close(state.params, reference())


@pytest.mark.filterwarnings("default")
def test_rows_reduced_twice_warn():
  state = sparse_states.create(EIGHT, sparse_states.ADAGRAD)
  batch = EIGHT.shard_batch(sparse_states.batch(0))
  with pytest.warns(UserWarning, match="already reduced over the replicas"):
    EIGHT.jit(functools.partial(step_reduced_by_hand, False)).trace(
      state, batch
    )
