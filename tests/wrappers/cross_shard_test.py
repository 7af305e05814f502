"""CrossShard: reduced values, collectives, other wrappers, and mistakes."""

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
  ("name", "reduction"),
  [
    ("all", "sum"),
    ("one group, reordered", "mean"),
    ("strided", "mean"),
    ("interleaved", "sum"),
    ("reordered", "mean"),
    ("irregular", "sum"),
    ("alone", "mean"),
  ],
)
def test_reduced_values_and_collectives(strategy, name, reduction) -> None:
  """Values as in NumPy; one collective with the bytes of the gradients."""
  groups = grouped.GROUPINGS[name]
  state = grouped.create(strategy, fs.CrossShard(reduction, groups))
  step = strategy.jit(grouped.train_step)
  x = strategy.shard_batch(grouped.X)
  new, _ = step(state, x)
  local = grouped.local_gradients()
  combine = {"mean": np.mean, "sum": np.sum}[reduction]
  for key, before in grouped.make_params().items():
    for i, held in enumerate(grouped.on_each(new.params[key])):
      grads = [local[j][key] for j in grouped.group_of(i, groups)]
      wanted = before - combine(grads, axis=0)
      np.testing.assert_allclose(held, wanted, rtol=1e-5, atol=1e-6)
  assert int(new.step) == 1

  found = grouped.collectives(step.lower(state, x).compile(), strategy)
  size = len(groups[0]) if groups else 8
  assert found == [("all-reduce", grouped.GRADIENT_BYTES, size)]


def test_skip_gradients_aggregation_reduces_nothing(strategy) -> None:
  state = grouped.create(strategy, fs.CrossShard("sum"))

  def step(state, x):
    _, grads = state.value_and_grad(grouped.loss_fn, x)
    grads = fs.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads, skip_gradients_aggregation=True)

  x = strategy.shard_batch(grouped.X)
  new = strategy.run(step, args=(state, x))
  wanted, _ = strategy.run(
    grouped.train_step,
    args=(grouped.create(strategy, fs.CrossShard("mean")), x),
  )
  tree_equality.assert_trees_close(new.params, wanted.params)


def test_one_replica_is_not_reduced() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:1])
  for groups in (None, ((0,),)):
    state = grouped.create(strategy, fs.CrossShard("sum", groups))
    new, _ = strategy.run(grouped.train_step, args=(state, grouped.X))
    tree_equality.assert_trees_close(
      new.params,
      grouped.trained(grouped.make_params(), [grouped.X], optax.sgd(1.0)),
    )


def test_outside_run_warns_and_does_not_reduce() -> None:
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
  tree_equality.assert_trees_close(
    new.params,
    grouped.trained(grouped.make_params(), [grouped.X], optax.sgd(1.0)),
  )


@pytest.mark.parametrize(
  ("arguments", "error", "fact"),
  [
    (("max",), ValueError, "'max'"),
    (("mean", ()), ValueError, r"group_assignment=\(\)"),
    (("mean", ((0, 1), ())), ValueError, r"\(\)\) must be"),
    (("mean", ((0, 1), (2,))), ValueError, r"\(2,\)\) must be"),
    (("mean", ((0, 1), (1, 2))), ValueError, r"\(1, 2\)\) must be"),
    (("mean", ((0, 1), (2, 4))), ValueError, r"\(2, 4\)\) must be"),
    (("mean", 3), TypeError, "group_assignment=3"),
    (("mean", ("01", "23")), TypeError, "group_assignment="),
    (("mean", ((0, 1.0), (2, 3))), TypeError, "group_assignment="),
  ],
)
def test_mistakes(arguments, error, fact) -> None:
  with pytest.raises(error, match=fact):
    fs.CrossShard(*arguments)


def test_groups_of_another_number_of_replicas_raise(strategy) -> None:
  wrapper = fs.CrossShard("mean", ((0, 1), (2, 3)))
  message = "the 8 replicas, 0 to 7"
  with pytest.raises(ValueError, match=message):
    grouped.create(strategy, wrapper)
  state = grouped.create(
    None, wrapper, batch_stats={"m": np.zeros(5, np.float32)}
  )
  with pytest.raises(ValueError, match=message):
    strategy.run(
      grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
    )


def test_groups_become_tuples_of_int() -> None:
  wanted = fs.CrossShard("mean", grouped.HALVES)
  lists = [list(group) for group in grouped.HALVES]
  for groups in (lists, np.array(lists), [np.array(g) for g in lists]):
    wrapper = fs.CrossShard("mean", groups)
    assert wrapper == wanted and hash(wrapper) == hash(wanted)
    assert {type(i) for g in wrapper.group_assignment for i in g} == {int}


def test_groups_that_diverge_warn(strategy, capsys) -> None:
  message = r"2 groups of 4 .* replica 0, \(0, 2, 4, 6\)"
  with pytest.warns(UserWarning, match=message):
    state = grouped.create(strategy, fs.CrossShard("mean", grouped.HALVES))
  with pytest.warns(UserWarning, match=message):
    strategy.run(
      grouped.train_step, args=(state, strategy.shard_batch(2 * grouped.X))
    )
  description = strategy.describe(state)
  assert re.search(message, capsys.readouterr().out.splitlines()[-1])
  assert re.search(message, description.note)

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for groups in (None, grouped.GROUPINGS["one group, reordered"]):
      state = grouped.create(strategy, fs.CrossShard("mean", groups))
      strategy.run(
        grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
      )
      assert strategy.describe(state).note is None


# With other wrappers, collections and logical devices.


@pytest.mark.parametrize(
  ("groups", "outside"), [(None, True), (None, False), (grouped.HALVES, False)]
)
def test_overflow_on_one_replica_skips_on_all(
  strategy, groups, outside
) -> None:
  """In either order of CrossShard and LossScale."""
  cross = fs.CrossShard("mean", groups)
  scale = fs.LossScale(fs.DynamicLossScale(2.0**4, growth_interval=2))
  wrappers = (scale, cross) if outside else (cross, scale)
  state = grouped.create(strategy, *wrappers)
  bare = grouped.create(strategy, cross)
  step = strategy.jit(grouped.train_step)
  good = strategy.shard_batch(grouped.X)
  bad = grouped.X.copy()
  bad[11] = np.inf  # of replica 5

  new, _ = step(state, strategy.shard_batch(bad))
  for key, before in grouped.make_params().items():
    for held in grouped.on_each(new.params[key]):
      np.testing.assert_array_equal(held, before)
  found = [grouped.on_each(x) for x in new.wrapper_states["loss_scale"]]
  assert np.array_equal(found, np.repeat([[8.0], [0], [1], [1]], 8, axis=1))
  assert int(new.step) == 0

  new, _ = step(new, good)
  wanted, _ = step(bare, good)
  for key in new.params:
    tree_equality.assert_trees_close(
      grouped.on_each(new.params[key]), grouped.on_each(wanted.params[key])
    )

  found = grouped.collectives(step.lower(state, good).compile(), strategy)
  sizes = sorted(nbytes for _, nbytes, _ in found)
  # The flag is a collective of its own unless reduced gradients carry it.
  flag = [] if groups is None and not outside else [4]
  assert sizes == [*flag, grouped.GRADIENT_BYTES]
  assert {kind for kind, *_ in found} == {"all-reduce"}


@pytest.mark.slow
def test_replicas_with_two_logical_devices() -> None:
  groups = ((0, 2), (3, 1))
  strategy = fs.Strategy(mesh_shape={"replica": 4, "model": 2})
  put = lambda x, *spec: jax.device_put(
    x, jax.NamedSharding(strategy.mesh, jax.P(*spec))
  )
  w = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4)
  b = np.ones(4, np.float32)
  params = {"w": put(w, None, "model"), "b": put(b)}
  state = grouped.create(strategy, fs.CrossShard("sum", groups), params=params)
  step = strategy.jit(grouped.train_step)
  x = strategy.shard_batch(grouped.X)
  new, _ = step(state, x)
  assert new.params["w"].sharding.spec == jax.P(None, "model")
  for shard in new.params["w"].addressable_shards:
    replica = int(np.argwhere(strategy.mesh.devices == shard.device)[0][0])
    group = next(g for g in groups if replica in g)
    grads = [
      jax.grad(grouped.loss_fn)({"w": w, "b": b}, grouped.X[4 * i : 4 * i + 4])[
        "w"
      ]
      for i in group
    ]
    wanted = (w - sum(grads))[shard.index]
    np.testing.assert_allclose(shard.data, wanted, rtol=1e-5, atol=1e-6)

  found = grouped.collectives(step.lower(state, x).compile(), strategy)
  ((kind, nbytes, size),) = [c for c in found if c[1] >= 4 * 10]
  # A half of w, and the bias: whole, or a half too.
  assert kind == "all-reduce" and nbytes in (4 * (10 + 4), 4 * (10 + 2))
  assert size == 2


def test_collections_statistics_and_parameters_without_a_gradient(
  strategy,
) -> None:
  fp8 = "_overwrite_with_gradient"
  params = {
    "params": {"w": np.ones(2, np.float32), "frozen": np.ones(2, np.float32)},
    fp8: {"scale": np.zeros((), np.float32)},
  }
  state = grouped.create(
    strategy,
    fs.CrossShard("sum", grouped.HALVES),
    params=params,
    batch_stats={"mean": np.zeros(2), "count": np.int32(0)},
  )

  def step(state, x):
    i = fs.get_replica_context().replica_id_in_sync_group
    return state.apply_gradients(
      grads={
        "params": {"w": x[0, :2], "frozen": None},
        fp8: {"scale": i.astype(jnp.float32)},
      },
      batch_stats={"mean": x[0, :2], "count": i + 7},
    )

  new = strategy.run(step, args=(state, strategy.shard_batch(grouped.X)))
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  for i in range(8):
    # The first row of each replica of the group.
    firsts = grouped.X[::2, :2][grouped.group_of(i, grouped.HALVES)]
    params, stats = jax.tree.map(
      lambda x, i=i: grouped.on_each(x)[i], (new.params, new.batch_stats)
    )
    close(params["params"]["w"], 1 - firsts.sum(0))
    assert params["params"]["frozen"].tolist() == [1, 1]
    assert params[fp8]["scale"] == 6 + i % 2  # the largest
    close(stats["mean"], firsts.mean(0))
    assert stats["count"] == 7 + i % 2  # of the first one
