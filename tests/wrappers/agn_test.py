"""AGN beside a NumPy reference; its arguments, errors and warnings."""

import functools
import warnings

import agn_reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
# Sizes that eight divides, does not divide, and sizes below eight.
PARAMS = {
  "w": RNG.normal(size=(5, 16)).astype(np.float32),
  "b": RNG.normal(size=3).astype(np.float32),
  "s": np.float32(0.5),
  "t": RNG.normal(size=(2, 3, 9)).astype(np.float32),
}
SCALES = {k: RNG.uniform(0.5, 2.0, p.shape) for k, p in PARAMS.items()}
TARGETS = {k: RNG.normal(size=(8, *p.shape)) for k, p in PARAMS.items()}

OPTIMIZERS = {
  "sgd": (optax.sgd(0.1), agn_reference.SGD(0.1)),
  "momentum": (
    optax.sgd(0.05, momentum=0.9, nesterov=True),
    agn_reference.SGD(0.05, 0.9, True),
  ),
  "adam": (optax.adam(0.05), agn_reference.Adam(0.05)),
  "clipped": (
    optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    agn_reference.Clipped(1.0, agn_reference.SGD(0.1)),
  ),
}


@functools.cache
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


@functools.cache
def targets_of(strategy):
  return strategy.distribute_values_from_function(
    lambda context: {
      k: t[context.replica_id_in_sync_group].astype(np.float32)
      for k, t in TARGETS.items()
    }
  )


def assert_close(state, wanted, rtol=2e-5, atol=2e-5):
  # Indexing an array on several devices runs a program each time.
  state = jax.device_get(state)
  agn = state.wrapper_states["agn"]
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
  for k in wanted.center:
    close(state.params[k], wanted.center[k])
    for i, (local, accum) in enumerate(
      zip(wanted.local, wanted.accum, strict=True)
    ):
      close(agn.local_params[k][i], local[k])
      close(agn.grad_accum[k][i], accum[k])
  assert int(agn.local_step) == int(state.step) == wanted.step
  assert int(agn.commits) == wanted.step // wanted.period


def compare(wrapper, tx, opt, *, replicas=8, steps=7, outer=None):
  strategy = strategy_of(replicas)
  state = create(strategy, wrapper, tx)
  wanted = agn_reference.AGN(
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
    assert_close(state, wanted)
  return state


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize(
  ("name", "commit"),
  [
    ("momentum", "sequential"),
    ("clipped", "sequential"),
    ("clipped", "sum"),
  ],
)
def test_every_step_equals_the_reference_on_eight_replicas(name, commit):
  compare(fs.AGN(3, commit=commit), *OPTIMIZERS[name])


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_step_equals_the_reference_on_few_replicas(replicas):
  compare(fs.AGN(2), *OPTIMIZERS["adam"], replicas=replicas, steps=5)


def test_a_mean_commit_at_every_step_equals_data_parallelism():
  strategy = strategy_of(4)
  targets = targets_of(strategy)
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


def test_local_sgd_averages_the_local_parameters():
  wrapper = fs.AGN(3, commit="mean", commit_delta=True, outer_tx=optax.sgd(1.0))
  state = compare(
    wrapper, *OPTIMIZERS["adam"], outer=agn_reference.SGD(1.0), steps=6
  )
  # The state of `tx` for the center is not used.
  assert int(state.opt_state[0].count) == 0
  replicas = [dict(PARAMS) for _ in range(8)]
  opt = agn_reference.Adam(0.05)
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


def test_diloco_uses_an_outer_optimizer_with_momentum():
  wrapper = fs.AGN(
    4,
    commit="mean",
    commit_delta=True,
    outer_tx=optax.sgd(0.7, momentum=0.9, nesterov=True),
  )
  outer = agn_reference.SGD(0.7, 0.9, True)
  state = compare(
    wrapper, *OPTIMIZERS["adam"], outer=outer, replicas=3, steps=9
  )
  trace = state.wrapper_states["agn"].outer_opt_state[0].trace
  assert jax.tree.structure(trace) == jax.tree.structure(PARAMS)
  assert trace["w"].sharding.is_fully_replicated


@pytest.mark.parametrize("delta", [False, True])
def test_an_outer_optimizer_with_sequential_commits(delta):
  wrapper = fs.AGN(3, commit_delta=delta, outer_tx=optax.adam(0.02))
  outer = agn_reference.Adam(0.02)
  compare(wrapper, *OPTIMIZERS["momentum"], outer=outer, replicas=3)


def test_deltas_with_the_inner_optimizer():
  wrapper = fs.AGN(3, commit="sum", commit_delta=True)
  compare(wrapper, *OPTIMIZERS["sgd"], replicas=2, steps=4)


def test_schedules_count_local_steps_and_commits():
  rates = [0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
  schedule = lambda count: jnp.array(rates)[jnp.minimum(count, 5)]
  wanted = agn_reference.Adam(lambda count: rates[min(count, 5)])
  wrapper = fs.AGN(2, commit="mean")
  state = compare(wrapper, optax.adam(schedule), wanted, replicas=2, steps=6)
  local = state.wrapper_states["agn"].local_opt_state
  assert np.asarray(local[1].count).tolist() == [6, 6]
  assert int(state.opt_state[1].count) == 3


def test_share_step_count_advances_period_plus_one_per_period():
  strategy = strategy_of(2)
  state = create(strategy, fs.AGN(2, share_step_count=True), optax.adam(0.1))
  run = strategy.jit(step)
  counts = []
  for _ in range(4):
    state, _ = run(state, targets_of(strategy))
    local = state.wrapper_states["agn"].local_opt_state[0].count
    counts.append((*np.asarray(local).tolist(), int(state.opt_state[0].count)))
  assert counts == [(1, 1, 0), (3, 3, 3), (4, 4, 3), (6, 6, 6)]


# Outside of `Strategy.run`.


def test_one_replica_without_a_strategy():
  wanted = agn_reference.AGN(PARAMS, OPTIMIZERS["adam"][1], 1, 3, "sequential")
  state = create(None, fs.AGN(3), OPTIMIZERS["adam"][0])
  targets = {k: t[0].astype(np.float32) for k, t in TARGETS.items()}
  jitted = jax.jit(step, donate_argnums=0)
  for _ in range(4):
    state, _ = jitted(state, targets)
    wanted.take(grad_fn)
    assert_close(state, wanted)


def test_a_step_of_several_replicas_outside_of_run_raises():
  state = create(strategy_of(2), fs.AGN(2), optax.sgd(0.1))
  targets = {k: t[0] for k, t in TARGETS.items()}
  with pytest.raises(ValueError, match=r"\[agn/local_params/b\].*2 replicas"):
    jax.jit(step)(state, targets)


def test_a_state_of_one_replica_in_run_raises():
  state = create(None, fs.AGN(2, commit="mean"), optax.sgd(0.1))
  strategy = strategy_of(2)
  with pytest.raises(ValueError) as e:
    strategy.run(step, (state, targets_of(strategy)))
  for fact in ("agn/local_params/b", "strategy=", "2 replicas", "(1, 3)"):
    assert fact in str(e.value)


# Arguments.


@pytest.mark.parametrize(
  ("kwargs", "error", "fact"),
  [
    ({"communication_period": 0}, ValueError, "communication_period"),
    ({"commit": "max"}, ValueError, "'sequential', 'mean', 'sum'"),
    ({"share_step_count": 1}, TypeError, "share_step_count"),
    ({"commit_delta": "no"}, TypeError, "commit_delta"),
    ({"outer_tx": 0.7}, TypeError, "outer_tx"),
    ({"outer_tx": optax.sgd}, TypeError, "Call it, as in sgd(1.0)."),
    (
      {"outer_tx": optax.sgd(1.0), "share_step_count": True},
      ValueError,
      "share_step_count=True",
    ),
  ],
)
def test_invalid_arguments_raise(kwargs, error, fact):
  with pytest.raises(error) as e:
    fs.AGN(**kwargs)
  assert "AGN: " in str(e.value) and fact in str(e.value)


def test_a_numpy_period_becomes_an_int():
  assert type(fs.AGN(np.int64(4)).communication_period) is int
  assert fs.AGN(np.int64(4)) == fs.AGN(4)
  assert hash(fs.AGN(np.int64(4))) == hash(fs.AGN(4))


def test_an_outer_optimizer_may_be_multi_steps():
  fs.AGN(4, outer_tx=optax.MultiSteps(optax.sgd(1.0), 2))


def test_a_reducing_wrapper_inside_raises():
  with pytest.raises(ValueError, match=r"'cross_shard'.*'agn'"):
    create(None, fs.CrossShard(), optax.sgd(0.1), wrappers=[fs.AGN()])
  create(None, fs.AGN(), optax.sgd(0.1), wrappers=[fs.CrossShard()])


@pytest.mark.parametrize(
  ("wrapper", "replicas", "warns"),
  [
    (fs.AGN(5), 8, True),  # below 0.64 * 8 = 5.12
    (fs.AGN(6), 8, False),
    (fs.AGN(1, commit="mean"), 8, False),
  ],
)
def test_too_frequent_sequential_commits_warn(wrapper, replicas, warns):
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    wrapper.check_replicas(replicas)
  messages = [str(w.message) for w in caught]
  assert len(messages) == warns
  if warns:
    period = wrapper.communication_period
    assert f"communication_period={period}" in messages[0]
    assert f"{0.64 * replicas:.1f} local steps" in messages[0]


def test_creating_and_running_a_state_warn():
  strategy = strategy_of(2)
  with pytest.warns(UserWarning, match="communication_period=1"):
    state = create(strategy, fs.AGN(1), optax.sgd(0.1))
  with pytest.warns(UserWarning, match="communication_period=1"):
    strategy.run(step, (state, targets_of(strategy)))
