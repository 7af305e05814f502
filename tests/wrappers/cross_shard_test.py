"""CrossShard: reduced values, collectives, other wrappers, and warnings."""

import re
import warnings

import grouped
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tree_equality

import flaxshard as fs

pytestmark = pytest.mark.filterwarnings("ignore:CrossShard")


@pytest.fixture(scope="module")
def strategy():
  return fs.Strategy()


@pytest.mark.parametrize(
  ("groups", "reduction"),
  [
    (None, "sum"),
    (((5, 2, 7, 0, 1, 6, 3, 4),), "mean"),
    (((6, 3), (0, 5), (7, 2), (4, 1)), "mean"),
    (((0, 3, 5, 6), (7, 1, 4, 2)), "sum"),
    (tuple((i,) for i in range(8)), "mean"),
  ],
)
def test_reduced_values_and_collectives(strategy, groups, reduction):
  """Values as in NumPy; one collective with the bytes of the gradients."""
  state = grouped.create(strategy, fs.CrossShard(reduction, groups))
  step = strategy.jit(grouped.train_step)
  x = strategy.shard_batch(grouped.X)
  new, _ = step(state, x)
  assert_reduced(new.params, strategy, groups, reduction)
  assert int(new.step) == 1
  found = grouped.collectives(step.lower(state, x).compile(), strategy)
  size = len(groups[0]) if groups else 8
  assert found == [("all-reduce", grouped.GRADIENT_BYTES, size)]


def assert_reduced(params, strategy, groups, reduction):
  """Checks the parameters of each device after a step of `optax.sgd(1.0)`."""
  replicas = strategy.num_replicas_in_sync
  local = grouped.gradients_of(replicas)
  combine = {"mean": np.mean, "sum": np.sum}[reduction]
  for key, before in grouped.make_params().items():
    for shard in params[key].addressable_shards:
      replica = int(np.argwhere(strategy.mesh.devices == shard.device)[0][0])
      group = group_of(replica, groups or [range(replicas)])
      wanted = before - combine([local[i][key] for i in group], axis=0)
      np.testing.assert_allclose(
        shard.data, wanted[shard.index], rtol=1e-5, atol=1e-6
      )


def group_of(replica, groups):
  return next(group for group in groups if replica in group)


def test_replicas_with_two_logical_devices():
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  sharding = jax.NamedSharding(strategy.mesh, jax.P(None, "model"))
  params = grouped.make_params()
  params["w"] = jax.device_put(params["w"], sharding)
  groups = ((0, 2), (3, 1))
  state = grouped.create(strategy, fs.CrossShard("sum", groups), params=params)
  step = strategy.jit(grouped.train_step)
  x = strategy.shard_batch(grouped.X)
  new, _ = step(state, x)
  assert new.params["w"].sharding.spec == jax.P(None, "model")
  assert_reduced(new.params, strategy, groups, "sum")
  found = grouped.collectives(step.lower(state, x).compile(), strategy)
  # Others are within a replica. A half of w, and b: whole, or a half too.
  ((kind, nbytes, size),) = [c for c in found if c[1] >= 4 * 10]
  assert (kind, size) == ("all-reduce", 2)
  assert nbytes in (4 * (10 + 4), 4 * (10 + 2))


def test_steps_that_reduce_nothing(strategy):
  wrapper = fs.CrossShard("sum")

  def by_hand(state, x):
    _, grads = state.value_and_grad(grouped.loss_fn, x)
    grads = fs.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads, skip_gradients_aggregation=True)

  x = strategy.shard_batch(grouped.X)
  new = strategy.run(by_hand, args=(grouped.create(strategy, wrapper), x))
  assert_reduced(new.params, strategy, None, "mean")
  # One replica.
  one = fs.Strategy(devices=jax.devices()[:1])
  for groups in (None, ((0,),)):
    state = grouped.create(one, fs.CrossShard("sum", groups))
    new, _ = one.run(grouped.train_step, args=(state, grouped.X))
    assert_reduced(new.params, one, groups, "sum")


def test_outside_run_warns_and_does_not_reduce():
  state = grouped.create(
    None, fs.CrossShard("sum", grouped.HALVES), fs.LossScale(2.0)
  )
  step = jax.jit(grouped.train_step)
  with pytest.warns(UserWarning, match="outside of Strategy.run") as record:
    new, _ = step(state, grouped.X)
  assert len(record) == 1
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    step(new, grouped.X)  # compiled: nothing is said again
  (grads,) = grouped.gradients_of(1)
  wanted = jax.tree.map(lambda p, g: p - g, grouped.make_params(), grads)
  tree_equality.assert_trees_close(new.params, wanted)


def test_groups_that_diverge_warn(strategy, capsys):
  message = r"2 groups of 4 .* replica 0, \(0, 2, 4, 6\)"
  with pytest.warns(UserWarning, match=message):
    state = grouped.create(strategy, fs.CrossShard("mean", grouped.HALVES))
  x = strategy.shard_batch(2 * grouped.X)
  with pytest.warns(UserWarning, match=message):
    strategy.run(grouped.train_step, args=(state, x))
  assert re.search(message, strategy.describe(state).note)
  assert re.search(message, capsys.readouterr().out.splitlines()[-1])
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for groups in (None, (range(8),)):
      state = grouped.create(strategy, fs.CrossShard("mean", groups))
      strategy.run(grouped.train_step, args=(state, x))
      assert strategy.describe(state).note is None


@pytest.mark.parametrize(
  ("groups", "outside"), [(None, True), (None, False), (grouped.HALVES, False)]
)
def test_overflow_on_one_replica_skips_on_all(strategy, groups, outside):
  """In either order of CrossShard and LossScale."""
  cross = fs.CrossShard("mean", groups)
  scale = fs.LossScale(fs.DynamicLossScale(2.0**4, growth_interval=2))
  state = grouped.create(
    strategy, *((scale, cross) if outside else (cross, scale))
  )
  step = strategy.jit(grouped.train_step)
  good, bad = strategy.shard_batch(grouped.X), grouped.X.copy()
  bad[11] = np.inf  # of replica 5
  new, _ = step(state, strategy.shard_batch(bad))
  for key, before in grouped.make_params().items():
    for held in grouped.on_each(new.params[key]):
      np.testing.assert_array_equal(held, before)
  found = [grouped.on_each(x) for x in new.wrapper_states["loss_scale"]]
  assert np.array_equal(found, np.repeat([[8.0], [0], [1], [1]], 8, axis=1))
  assert int(new.step) == 0
  new, _ = step(new, good)
  assert_reduced(new.params, strategy, groups, "mean")

  found = grouped.collectives(step.lower(state, good).compile(), strategy)
  # The flag is a collective of its own unless reduced gradients carry it.
  flag = [] if groups is None and not outside else [4]
  sizes = sorted(nbytes for _, nbytes, _ in found)
  assert sizes == [*flag, grouped.GRADIENT_BYTES]
  assert {kind for kind, *_ in found} == {"all-reduce"}


def test_collections_statistics_and_parameters_without_a_gradient(strategy):
  fp8 = "_overwrite_with_gradient"
  params = {
    "params": {"w": np.ones(2, np.float32), "frozen": np.ones(2, np.float32)},
    fp8: {"scale": np.zeros((), np.float32)},
  }
  state = grouped.create(
    strategy,
    fs.CrossShard("sum", grouped.HALVES),
    tx=optax.chain(grouped.SGD, optax.contrib.reduce_on_plateau()),
    params=params,
    batch_stats={"mean": np.zeros(2), "count": np.int32(0)},
  )

  def step(state, x):
    i = fs.get_replica_context().replica_id_in_sync_group
    grads = {
      "params": {"w": x[0, :2], "frozen": None},
      fp8: {"scale": i.astype(jnp.float32)},
    }
    stats = {"mean": x[0, :2], "count": i + 7}
    return state.apply_gradients(grads=grads, batch_stats=stats, value=x[0, 0])

  new = strategy.run(step, args=(state, strategy.shard_batch(grouped.X)))
  given = new.params, new.batch_stats, new.opt_state[1].best_value
  for i in range(8):
    params, stats, best = jax.tree.map(
      lambda x, i=i: grouped.on_each(x)[i], given
    )
    # The first row of each replica of the group.
    firsts = grouped.X[::2, :2][list(group_of(i, grouped.HALVES))]
    np.testing.assert_allclose(params["params"]["w"], 1 - firsts.sum(0), 1e-5)
    means = [*stats["mean"], best]
    np.testing.assert_allclose(means, firsts.mean(0)[[0, 1, 0]], 1e-5)
    assert params["params"]["frozen"].tolist() == [1, 1]
    # The largest statistic, and the count of the first replica.
    assert (params[fp8]["scale"], stats["count"]) == (6 + i % 2, 7 + i % 2)
