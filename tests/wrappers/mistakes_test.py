"""Mistakes in wrappers and with them: the message names what to write."""

import agn_problem
import grouped
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states

import flaxshard as fs
from flaxshard.wrappers import from_config

SGD = optax.sgd(1.0)
STORE = fs.Store()
TWO = agn_problem.strategy_of(2)
CROSS, SUM = fs.CrossShard(), fs.Accumulate(2)
OWN_SUM = fs.Accumulate(2, per_replica=True)


def groups(*assignment):
  return fs.CrossShard("mean", assignment)


FOUR = groups((0, 1), (2, 3))


def dynamic(**kwargs):
  return fs.DynamicLossScale(**kwargs)


def create(*wrappers, **kwargs):
  return quadratic_states.create(wrappers, **kwargs)


def config(*entries):
  return from_config(entries)


def create_per_replica_statistics():
  stats = TWO.distribute_values_from_function(lambda _: {"mean": np.zeros(3)})
  create(fs.AGN(4), batch_stats=stats)


def agn_outside_of_run():
  state = agn_problem.create(TWO, fs.AGN(2), SGD)
  jax.jit(agn_problem.step)(state, agn_problem.targets_of_replica(0))


def agn_of_one_replica_in_run():
  state = agn_problem.create(None, fs.AGN(2, commit="mean"), SGD)
  TWO.run(agn_problem.step, (state, agn_problem.targets_of(TWO)))


def groups_of_four_in_run_of_two():
  stats = {"mean": np.zeros(5, np.float32)}
  state = grouped.create(None, FOUR, batch_stats=stats)
  TWO.run(grouped.train_step, (state, TWO.shard_batch(grouped.X)))


def loss_fn(params):
  return sum((p.astype("float32") ** 2).sum() for p in params.values())


def scale(step, rule="dynamic"):
  params = {"w": jnp.ones(3, jnp.float16), "b": jnp.ones(2)}
  return step(create(fs.LossScale(rule), params=params))


def unscale_twice(state):
  return state.unscale_gradients(state.value_and_grad(loss_fn)[1])


def scale_in_value_and_grad(state):
  return state.value_and_grad(lambda p: state.scale_loss(loss_fn(p)))


def scale_in_minimize(state):
  return state.minimize(lambda p: state.scale_loss(loss_fn(p)))


def update_with(grads=1.0, **extra):
  opt = fs.wrap(optax.contrib.reduce_on_plateau())
  params = {"w": jnp.ones(2)}
  grads = {"w": params["w"] * grads}
  return opt.update(grads, opt.init(params), params, **extra)


MISTAKES = [
  (lambda: fs.Accumulate(0), ValueError, "Accumulate: steps"),
  (lambda: fs.EMA(1.0), ValueError, "EMA: decay must be"),
  (lambda: fs.EMA(np.nan), ValueError, "EMA: decay must be"),
  (lambda: fs.EMA("0.9"), ValueError, "EMA: decay must be"),
  (lambda: fs.EMA(0.9, debias="False"), ValueError, "debias .*'False'"),
  # CrossShard.
  (lambda: fs.CrossShard("max"), ValueError, "'max'"),
  (lambda: groups(), ValueError, r"group_assignment=\(\)"),
  (lambda: groups((0, 1), (2,)), ValueError, r"\(2,\)\) must be"),
  (lambda: groups((0, 1), (2, 4)), ValueError, r"\(2, 4\)\) must be"),
  (lambda: groups(0, 1), TypeError, r"group_assignment=\(0, 1\)"),
  (lambda: groups((0, 1.0)), TypeError, "group_assignment="),
  # LossScale.
  (lambda: fs.LossScale(0), ValueError, "LossScale: .*0"),
  (lambda: fs.LossScale(None), TypeError, "LossScale: scale .*None"),
  (lambda: fs.LossScale("dynamci"), ValueError, "Did you mean 'dynamic'"),
  (lambda: fs.LossScale(policy=jnp.float16), TypeError, "Policy: .*float16"),
  # 1e-40 is a subnormal float32.
  (lambda: fs.FixedLossScale(1e-40), ValueError, "FixedLossScale: .*1e-40"),
  (lambda: dynamic(initial_scale="8"), TypeError, "initial_scale .*'8'"),
  (lambda: dynamic(initial_scale=0.5), ValueError, "min_scale=1.0 .*0.5"),
  (lambda: dynamic(max_scale=4.0), ValueError, "max_scale=4.0"),
  (lambda: dynamic(growth_interval=0), ValueError, "growth_interval .*0"),
  (lambda: dynamic(hysteresis=0), ValueError, "hysteresis .*0"),
  # Both are 1 in float32.
  (lambda: dynamic(growth_factor=1 + 1e-9), ValueError, "growth_factor"),
  (lambda: dynamic(backoff_factor=1 - 1e-9), ValueError, "backoff_factor"),
  (lambda: dynamic(backoff_factor=1e-40), ValueError, "backoff_factor"),
  # AGN.
  (lambda: fs.AGN(0), ValueError, "AGN: communication_period"),
  (lambda: fs.AGN(commit="max"), ValueError, "'sequential', 'mean', 'sum'"),
  (lambda: fs.AGN(commit_delta="no"), TypeError, "AGN: commit_delta"),
  (lambda: fs.AGN(outer_tx=optax.sgd), TypeError, "AGN: outer_tx"),
  (lambda: fs.AGN(outer_tx=SGD, share_step_count=True), ValueError, "outer_tx"),
  (lambda: fs.AGN(transport=STORE, share_step_count=True), ValueError, "store"),
  (lambda: fs.AGN(transport="grpc"), ValueError, "'compiled', 'store'"),
  # Together with a period of 10.
  (lambda: fs.AGN(transport=fs.Store(11)), ValueError, "fragments .* 11"),
  (lambda: fs.AGN(transport=fs.Store(delay=10)), ValueError, "delay .* 10"),
  (lambda: fs.AGN(transport=fs.Store(quorum=2)), ValueError, "quorum=2"),
  (lambda: fs.Store(0), ValueError, "Store: fragments must be at least 1"),
  (lambda: fs.Store(1.5), TypeError, "Store: fragments"),
  (lambda: fs.Store(delay=-1), ValueError, "Store: delay"),
  (lambda: fs.Store(blend=1.0), ValueError, "Store: blend"),
  (lambda: fs.Store(grace=-1.0), ValueError, "Store: grace"),
  (lambda: fs.Store(deadline=0), ValueError, "Store: deadline"),
  (lambda: fs.Store(commit_dtype="int2"), ValueError, "'int4'"),
  # Wrappers of a state.
  (lambda: quadratic_states.create(fs.EMA()), TypeError, "wrappers .*EMA"),
  (lambda: quadratic_states.create({fs.EMA()}), TypeError, "must be a list"),
  (lambda: create(fs.EMA(), fs.LossScale), TypeError, r"wrappers\[1\].*LossSc"),
  (lambda: create(dynamic()), TypeError, r"wrappers\[0\].*LossScale\("),
  (lambda: create("ema"), TypeError, r"wrappers\[0\].*'ema'"),
  (lambda: create(fs.EMA(0.5), fs.EMA()), ValueError, r"wrappers\[1\].* twice"),
  (lambda: fs.wrap(SGD, [fs.AGN(2), fs.EMA()]), ValueError, "put 'ema' first"),
  (lambda: fs.wrap(SGD, [fs.AGN(transport=STORE)]), ValueError, "TrainState"),
  (lambda: fs.wrap(SGD).init(np.array(2**31)), ValueError, "int64.*214748"),
  (lambda: fs.wrap(optax.sgd), TypeError, r"tx .* Call it: sgd\(1e-3\)"),
  # What may stand inside of another one.
  (lambda: create(fs.AGN(), CROSS), ValueError, "put 'cross_shard' first"),
  (lambda: create(fs.AGN(), SUM), ValueError, "put 'accumulate' first"),
  (lambda: create(CROSS, OWN_SUM), ValueError, "put 'accumulate' first"),
  (lambda: create(SUM, fs.LossScale()), ValueError, "put 'loss_scale' first"),
  (lambda: create(SUM, CROSS), ValueError, "'accum.* needs per_replica=True"),
  (lambda: create(SUM, fs.AGN()), ValueError, "'agn'.* per_replica=True"),
  # Replicas.
  (lambda: create(FOUR, strategy=TWO), ValueError, "the 2 replicas, 0 to 1"),
  (groups_of_four_in_run_of_two, ValueError, "the 2 replicas, 0 to 1"),
  (create_per_replica_statistics, TypeError, "'batch_stats'.*PerReplica"),
  (agn_outside_of_run, ValueError, "'agn'.* 2 replicas"),
  (agn_of_one_replica_in_run, ValueError, r"agn/local_params/b.*\(1, 3\)"),
  # Scaled and unscaled once.
  (lambda: scale(unscale_twice), ValueError, "unscale_gradients: .* already"),
  (lambda: scale(jax.jit(unscale_twice)), ValueError, "unscale_gradients: "),
  (lambda: scale(scale_in_minimize), ValueError, "scale_loss: .* themselves"),
  (lambda: scale(jax.jit(scale_in_minimize)), ValueError, "scale_loss: "),
  (lambda: scale(scale_in_value_and_grad), ValueError, "scale_loss: "),
  (lambda: scale(unscale_twice, 8.0), ValueError, "unscale_gradients: "),
  # An update without a TrainState.
  (lambda: update_with(valeu=2.0), TypeError, "'valeu' .* mean 'value'"),
  (lambda: update_with(jnp.ones((3, 1))), ValueError, "match .* w: shape"),
  # Configs.
  (lambda: config("los_scale"), ValueError, r"wrappers\[0\].*'loss_scale'"),
  (lambda: config("ema", ("ema", {"a": 8})), ValueError, r"wrappers\[1\].*'a'"),
  (lambda: config(("ema", {"decay": 2})), ValueError, r"wrappers\[0\].*2"),
  (lambda: config(("loss_scale", {"scale": {"type": "a"}})), ValueError, "'a'"),
  (lambda: config(("loss_scale", {"scale": {}})), TypeError, "dynamic.*fixed"),
  (lambda: from_config("loss_scale"), TypeError, "wrappers must be a sequence"),
  (lambda: config(3), TypeError, r"wrappers\[0\]"),
  (lambda: config(("loss_scale", 8)), TypeError, r"wrappers\[0\]"),
  (lambda: config("fractions:Fraction"), TypeError, r"wrappers\[0\]"),
  (lambda: config("ema", "ema"), ValueError, "'ema' is given twice"),
]


@pytest.mark.filterwarnings("ignore:CrossShard")
@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_mistakes(call, error, words):
  with pytest.raises(error, match=words):
    call()
