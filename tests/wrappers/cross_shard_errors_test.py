"""CrossShard: errors, warnings and configs."""

import re
import warnings

import grouped
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import flaxshard as fs

pytestmark = pytest.mark.filterwarnings("ignore:CrossShard. gradients")


@pytest.fixture(scope="module")
def strategy():
  return fs.Strategy()


@pytest.mark.parametrize(
  "arguments, message",
  [
    (("max",), r"CrossShard: reduction.*'sum'.*'mean'.*'max'"),
    (("mean", ()), r"group_assignment=\(\)"),
    (("mean", ((0, 1), ())), "empty"),
    (("mean", ((0, 1), (2,))), r"sizes are \[2, 1\]"),
    (("mean", ((0, 1), (1, 2))), r"1 is in \(0, 1\) and in \(1, 2\)"),
    (("mean", ((0, -1), (1, 2))), "-1"),
  ],
)
def test_invalid_arguments_raise(arguments, message) -> None:
  with pytest.raises(ValueError, match=message):
    fs.CrossShard(*arguments)


@pytest.mark.parametrize(
  "groups",
  [3, ("01", "23"), ((0, 1.0), (2, 3))],
)
def test_wrong_type_of_groups_raises(groups) -> None:
  with pytest.raises(TypeError, match="group_assignment="):
    fs.CrossShard("mean", groups)


@pytest.mark.parametrize(
  "groups, message",
  [
    (((0, 1), (2, 3)), r"the 8 replicas, 0 to 7, .*; \(4, 5, 6, 7\) in no gr"),
    (((0, 1, 2, 3), (4, 5, 6, 8)), r"; \(7\) in no group, \(8\) no replica\."),
  ],
)
def test_groups_without_a_replica_or_with_an_unknown_one_raise(
  strategy, groups, message
) -> None:
  wrapper = fs.CrossShard("mean", groups)
  with pytest.raises(ValueError, match=message):
    grouped.create(strategy, wrapper)
  state = grouped.create(
    None, wrapper, batch_stats={"m": np.zeros(5, np.float32)}
  )
  with pytest.raises(ValueError, match=message):
    strategy.run(
      grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
    )

  def with_collection(state, x):
    return state.apply_gradients(grads=state.params, batch_stats={"m": x[0]})

  with pytest.raises(ValueError, match=message):
    strategy.run(with_collection, args=(state, strategy.shard_batch(grouped.X)))


def test_groups_become_tuples_of_int() -> None:
  wanted = fs.CrossShard("mean", grouped.HALVES)
  lists = [list(group) for group in grouped.HALVES]
  for groups in (lists, np.array(lists), [np.array(g) for g in lists]):
    wrapper = fs.CrossShard("mean", groups)
    assert wrapper == wanted and hash(wrapper) == hash(wanted)
    assert {type(i) for g in wrapper.group_assignment for i in g} == {int}


def test_configs_round_trip() -> None:
  stack = (fs.CrossShard("sum", grouped.HALVES), fs.LossScale("dynamic"))
  config = fs.wrappers.to_config(stack)
  arguments = {"reduction": "sum", "group_assignment": grouped.HALVES}
  assert config[0] == ("cross_shard", arguments)
  assert fs.wrappers.from_config(config) == stack
  lists = [list(group) for group in grouped.HALVES]
  held = ml_collections.ConfigDict(
    {"wrappers": [("cross_shard", {**arguments, "group_assignment": lists})]}
  )
  assert fs.wrappers.from_config(held.wrappers) == stack[:1]
  assert fs.wrappers.from_config(["cross_shard"]) == (fs.CrossShard(),)
  with pytest.raises(ValueError, match=r"wrappers\[0\] \('cross_shard'\): Cro"):
    fs.wrappers.from_config([("cross_shard", {"reduction": "max"})])


def test_groups_that_diverge_warn(strategy, capsys) -> None:
  message = r"groups \(0, 2, 4, 6\), \(1, 3, 5, 7\), .* replica 0, \(0"
  with pytest.warns(UserWarning, match=message):
    state = grouped.create(strategy, fs.CrossShard("mean", grouped.HALVES))
  with pytest.warns(UserWarning, match=message):
    strategy.run(
      grouped.train_step, args=(state, strategy.shard_batch(2 * grouped.X))
    )
  description = strategy.describe(state)
  assert re.search(message, capsys.readouterr().out.splitlines()[-1])
  assert re.search(message, description._repr_html_())

  many = fs.CrossShard("mean", [[i] for i in range(16)])
  assert "reduced in 16 groups of 1" in many.divergence()

  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for groups in (None, grouped.GROUPINGS["one group, reordered"]):
      state = grouped.create(strategy, fs.CrossShard("mean", groups))
      strategy.run(
        grouped.train_step, args=(state, strategy.shard_batch(grouped.X))
      )
      assert strategy.describe(state).note is None


def test_groups_with_a_parameter_sharded_over_replicas_raise(strategy) -> None:
  split = jax.sharding.NamedSharding(
    strategy.mesh, jax.sharding.PartitionSpec("replica")
  )
  with pytest.warns(UserWarning, match="reduced in groups"):
    state = fs.TrainState.create(
      apply_fn=None,
      params={"w": jax.device_put(jnp.zeros(16), split)},
      tx=optax.sgd(1.0),
      wrappers=[fs.CrossShard("mean", grouped.HALVES)],
      strategy=strategy,
    )
  step = lambda state, x: state.minimize(lambda p: (p["w"] * x.mean()).sum())
  with (
    pytest.warns(UserWarning, match="reduced in groups"),
    pytest.raises(ValueError, match=r"state\[params/w\] is split over 'rep"),
  ):
    strategy.run(step, args=(state, strategy.shard_batch(grouped.X)))


def test_groups_with_agn_do_not_diverge(strategy) -> None:
  wrappers = [fs.CrossShard("mean", grouped.HALVES), fs.AGN(6)]
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    state = fs.TrainState.create(
      apply_fn=None,
      params={"w": jnp.zeros(16)},
      tx=optax.sgd(1.0),
      wrappers=wrappers,
      strategy=strategy,
    )
    assert strategy.describe(state).note is None
