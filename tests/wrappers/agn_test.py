"""AGN beside a plain restatement, its arguments, and what it says."""

import warnings

import agn_reference as reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
# Sizes that eight parts divide, do not divide, and are more than.
PARAMS = {
  "w": RNG.normal(size=(5, 16)).astype(np.float32),
  "b": RNG.normal(size=3).astype(np.float32),
  "s": np.float32(0.5),
  "t": RNG.normal(size=(2, 3, 9)).astype(np.float32),
}
SCALES = {k: RNG.uniform(0.5, 2.0, p.shape) for k, p in PARAMS.items()}
TARGETS = {k: RNG.normal(size=(8, *p.shape)) for k, p in PARAMS.items()}

OPTIMIZERS = {
  "sgd": (optax.sgd(0.1), reference.SGD(0.1)),
  "momentum": (
    optax.sgd(0.05, momentum=0.9, nesterov=True),
    reference.SGD(0.05, 0.9, True),
  ),
  "adam": (optax.adam(0.05), reference.Adam(0.05)),
  "clipped": (
    optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    reference.Clipped(1.0, reference.SGD(0.1)),
  ),
}


def strategy_of(replicas):
  return fs.Strategy(devices=jax.devices()[:replicas])


def create(strategy, wrapper, tx, params=PARAMS, wrappers=()):
  return fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=tx,
    wrappers=[*wrappers, wrapper],
    strategy=strategy,
  )


def loss_fn(params, targets):
  return sum(
    (0.5 * SCALES[k].astype(np.float32) * (p - targets[k]) ** 2).sum()
    for k, p in params.items()
  )


def step(state, targets):
  return state.minimize(loss_fn, targets)


def grad_fn(i, params):
  return {
    k: SCALES[k] * (p - TARGETS[k][i].astype(np.float32))
    for k, p in params.items()
  }


def targets_of(strategy):
  return strategy.distribute_values_from_function(
    lambda context: {
      k: t[context.replica_id_in_sync_group].astype(np.float32)
      for k, t in TARGETS.items()
    }
  )


def assert_same(state, wanted, rtol=2e-5, atol=2e-5):
  own = state.wrapper_states["agn"]
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
  for k in wanted.center:
    close(state.params[k], wanted.center[k])
    for i, (local, accum) in enumerate(
      zip(wanted.local, wanted.accum, strict=True)
    ):
      close(own.local_params[k][i], local[k])
      close(own.grad_accum[k][i], accum[k])
  assert int(own.local_step) == int(state.step) == wanted.step
  assert int(own.commits) == wanted.step // wanted.period


def compare(wrapper, tx, opt, *, replicas=8, steps=7, outer=None):
  strategy = strategy_of(replicas)
  state = create(strategy, wrapper, tx)
  wanted = reference.AGN(
    PARAMS,
    opt,
    replicas,
    wrapper.communication_period,
    wrapper.commit,
    outer,
    wrapper.commit_delta,
  )
  run = strategy.jit(step, donate_argnums=0)
  targets = targets_of(strategy)
  for _ in range(steps):
    state, _ = run(state, targets)
    wanted.take(grad_fn)
    assert_same(state, wanted)
  return state


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize(
  ("name", "commit"),
  [
    *((name, "sequential") for name in OPTIMIZERS),
    ("momentum", "mean"),
    ("adam", "mean"),
    ("sgd", "sum"),
    ("clipped", "sum"),
  ],
)
def test_every_step_on_eight_replicas(name, commit):
  compare(fs.AGN(3, commit=commit), *OPTIMIZERS[name])


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_other_numbers_of_replicas(replicas):
  compare(fs.AGN(2), *OPTIMIZERS["adam"], replicas=replicas, steps=5)


def test_a_commit_at_every_step_is_data_parallelism():
  strategy = strategy_of(4)
  targets = targets_of(strategy_of(4))
  tx = OPTIMIZERS["adam"][0]
  state = create(strategy, fs.AGN(1, commit="mean"), tx)
  plain = fs.TrainState.create(
    apply_fn=None, params=PARAMS, tx=tx, strategy=strategy
  )
  for _ in range(3):
    state, _ = strategy.run(step, (state, targets))
    plain, _ = strategy.run(step, (plain, targets))
  for k in PARAMS:
    np.testing.assert_allclose(state.params[k], plain.params[k], rtol=1e-5)


def test_local_sgd_is_the_mean_of_the_replicas():
  outer = (optax.sgd(1.0), reference.SGD(1.0))
  wrapper = fs.AGN(3, commit="mean", commit_delta=True, outer_tx=outer[0])
  state = compare(wrapper, *OPTIMIZERS["adam"], outer=outer[1], steps=6)
  # What `tx` would have for the center has not moved.
  assert int(state.opt_state[0].count) == 0
  # And in words: after a commit the center is the mean of where they were.
  replicas = [{k: p for k, p in PARAMS.items()} for _ in range(8)]
  opt = reference.Adam(0.05)
  slots = [opt.init(PARAMS) for _ in range(8)]
  for _ in range(2):
    for _ in range(3):
      for i in range(8):
        replicas[i], slots[i] = opt.apply(
          replicas[i], slots[i], grad_fn(i, replicas[i])
        )
    mean = {k: np.mean([r[k] for r in replicas], 0) for k in PARAMS}
    replicas = [dict(mean) for _ in range(8)]
  for k in PARAMS:
    np.testing.assert_allclose(state.params[k], mean[k], rtol=1e-4, atol=1e-5)


def test_diloco():
  outer = (
    optax.sgd(0.7, momentum=0.9, nesterov=True),
    reference.SGD(0.7, 0.9, True),
  )
  wrapper = fs.AGN(4, commit="mean", commit_delta=True, outer_tx=outer[0])
  state = compare(wrapper, *OPTIMIZERS["adam"], outer=outer[1], steps=13)
  trace = state.wrapper_states["agn"].outer_opt_state[0].trace
  assert jax.tree.structure(trace) == jax.tree.structure(PARAMS)
  assert trace["w"].sharding.is_fully_replicated


@pytest.mark.parametrize("delta", [False, True])
def test_an_outer_optimizer_and_commits_in_turn(delta):
  outer = (optax.adam(0.02), reference.Adam(0.02))
  wrapper = fs.AGN(6, commit_delta=delta, outer_tx=outer[0])
  compare(wrapper, *OPTIMIZERS["momentum"], outer=outer[1])


def test_deltas_with_the_inner_optimizer():
  wrapper = fs.AGN(3, commit="sum", commit_delta=True)
  compare(wrapper, *OPTIMIZERS["sgd"])


def test_schedules_count_local_steps_and_commits():
  rates = [0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
  schedule = lambda count: jnp.array(rates)[jnp.minimum(count, 5)]
  wanted = reference.Adam(lambda count: rates[min(count, 5)])
  wrapper = fs.AGN(2, commit="mean")
  state = compare(wrapper, optax.adam(schedule), wanted, replicas=2, steps=6)
  own = state.wrapper_states["agn"].local_opt_state
  assert np.asarray(own[1].count).tolist() == [6, 6]
  assert int(state.opt_state[1].count) == 3


def test_a_shared_step_count():
  strategy = strategy_of(2)
  wrapper = fs.AGN(2, share_step_count=True)
  state = create(strategy, wrapper, optax.adam(0.1))
  run = strategy.jit(step)
  counts = []
  for _ in range(4):
    state, _ = run(state, targets_of(strategy_of(2)))
    own = state.wrapper_states["agn"].local_opt_state[0].count
    counts.append((*np.asarray(own).tolist(), int(state.opt_state[0].count)))
  assert counts == [(1, 1, 0), (3, 3, 3), (4, 4, 3), (6, 6, 6)]


# Outside of `run`.


def test_without_a_strategy_there_is_one_replica():
  wanted = reference.AGN(PARAMS, OPTIMIZERS["adam"][1], 1, 3, "sequential")
  state = create(None, fs.AGN(3), OPTIMIZERS["adam"][0])
  targets = {k: t[0].astype(np.float32) for k, t in TARGETS.items()}
  jitted = jax.jit(step, donate_argnums=0)
  for _ in range(4):
    state, _ = jitted(state, targets)
    wanted.take(grad_fn)
    assert_same(state, wanted)


def test_several_replicas_step_in_run():
  state = create(strategy_of(2), fs.AGN(2), optax.sgd(0.1))
  targets = {k: t[0] for k, t in TARGETS.items()}
  with pytest.raises(
    ValueError, match=r"wrapper_states\[agn/local_params/b\] is of 2 replicas"
  ):
    jax.jit(step)(state, targets)


def test_a_state_of_one_replica_in_run():
  state = create(None, fs.AGN(2, commit="mean"), optax.sgd(0.1))
  with pytest.raises(
    ValueError,
    match=r"wrapper_states/agn/local_params/b, which create_train_state\(\.\.\."
    r", strategy=\.\.\.\) makes .* the 2 replicas .* got shape \(1, 3\)",
  ):
    strategy_of(2).run(step, (state, targets_of(strategy_of(2))))


# Arguments.


@pytest.mark.parametrize(
  ("kwargs", "error", "match"),
  [
    ({"communication_period": 0}, ValueError, "at least 1, got 0"),
    ({"communication_period": -3}, ValueError, "at least 1, got -3"),
    ({"communication_period": 2**31}, ValueError, "got 2147483648"),
    ({"communication_period": 2.0}, TypeError, "period .* got 2.0"),
    ({"communication_period": True}, TypeError, "period .* got True"),
    ({"commit": "max"}, ValueError, "'max'; allowed: 'sequential', 'mean'"),
    ({"commit": None}, ValueError, "commit=None; allowed"),
    ({"share_step_count": 1}, TypeError, "share_step_count must be a bool"),
    ({"commit_delta": "no"}, TypeError, "commit_delta must be a bool, got 'n"),
    ({"outer_tx": 0.7}, TypeError, "GradientTransformation or None, got 0.7"),
    (
      {"outer_tx": optax.sgd(1.0), "share_step_count": True},
      ValueError,
      "share_step_count=True shares the count of one optimizer",
    ),
  ],
)
def test_arguments_that_cannot_be(kwargs, error, match):
  with pytest.raises(error, match=match):
    fs.AGN(**kwargs)


def test_numpy_periods_are_numbers():
  assert fs.AGN(np.int64(4)) == fs.AGN(4)
  assert hash(fs.AGN(np.int64(4))) == hash(fs.AGN(4))


def test_nothing_inside_may_reduce():
  with pytest.raises(
    ValueError, match=r"'cross_shard' reduces gradients .* 'agn'"
  ):
    create(None, fs.CrossShard(), optax.sgd(0.1), wrappers=[fs.AGN()])
  create(None, fs.AGN(), optax.sgd(0.1), wrappers=[fs.CrossShard()])


@pytest.mark.parametrize(
  ("wrapper", "replicas", "warns"),
  [
    (fs.AGN(5), 8, True),  # 0.64 * 8 = 5.12
    (fs.AGN(6), 8, False),
    (fs.AGN(1), 2, True),
    (fs.AGN(2), 3, False),
    (fs.AGN(1), 1, False),
    (fs.AGN(1, commit="mean"), 8, False),
    (fs.AGN(1, commit="sum"), 8, False),
  ],
)
def test_commits_that_are_too_frequent(wrapper, replicas, warns):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    create(strategy_of(replicas), wrapper, optax.sgd(0.1))
  told = [str(w.message) for w in caught if "AGN" in str(w.message)]
  assert len(told) == warns
  if warns:
    period = wrapper.communication_period
    assert f"communication_period={period} is short" in told[0]
    assert f"0.64 * {replicas} = {0.64 * replicas:.1f} local steps" in told[0]


def test_it_warns_in_run_too():
  strategy = strategy_of(2)
  with pytest.warns(UserWarning, match="communication_period=1 is short"):
    state = create(strategy, fs.AGN(1), optax.sgd(0.1))
  with pytest.warns(UserWarning, match="communication_period=1 is short"):
    strategy.run(step, (state, targets_of(strategy)))
