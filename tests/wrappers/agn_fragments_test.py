"""AGN with fragments, delay and blend: values, and what they share."""

import agn_problem
import agn_reference
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.wrappers import agn_schedule

OPTIMIZERS = agn_problem.OPTIMIZERS
PARAMS = agn_problem.PARAMS


def train(strategy, wrapper, tx, steps, wrappers=()):
  state = agn_problem.create(strategy, wrapper, tx, wrappers=wrappers)
  run = strategy.jit(agn_problem.step, donate_argnums=0)
  for _ in range(steps):
    state, _ = run(state, agn_problem.targets_of(strategy))
  return state


def leaves(state):
  """Returns the numbers of a state without those of fragments."""
  agn = state.wrapper_states["agn"]
  agn = agn._replace(fragment_counts={}, sent=())
  return jax.device_get((state.params, state.opt_state, agn))


def test_the_reference_divides_as_the_wrapper_does():
  for fragments, numbers in agn_problem.FRAGMENTS.items():
    tree = jax.tree.map(jnp.asarray, PARAMS)
    assert agn_schedule.fragments_by_path(tree, fragments) == numbers


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize(
  ("name", "kwargs"),
  [
    ("adam", {"commit": "sequential"}),
    pytest.param("clipped", {"commit": "sequential"}, marks=pytest.mark.slow),
    pytest.param("momentum", {"commit": "mean"}, marks=pytest.mark.slow),
    ("clipped", {"commit": "sum", "share_step_count": False}),
    pytest.param(
      "adam", {"commit": "mean", "commit_dtype": "int8"}, marks=pytest.mark.slow
    ),
    pytest.param(
      "adam",
      {"commit": "mean", "share_step_count": True},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_fragments_without_an_offset_equal_the_plain_commit(name, kwargs):
  strategy = agn_problem.strategy_of(4)
  tx = OPTIMIZERS[name][0]
  plain = train(strategy, fs.AGN(3, **kwargs), tx, 7)
  together = train(
    strategy, fs.AGN(3, fragments=3, fragment_offset=0, **kwargs), tx, 7
  )
  assert together.wrapper_states["agn"].fragment_counts == {}
  jax.tree.map(np.testing.assert_array_equal, leaves(together), leaves(plain))


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize(
  ("name", "wrapper"),
  [
    ("adam", fs.AGN(3, "mean", fragments=3)),
    pytest.param(
      "adam", fs.AGN(4, "sequential", fragments=2), marks=pytest.mark.slow
    ),
    ("clipped", fs.AGN(4, "sequential", fragments=2, fragment_offset=1)),
    pytest.param(
      "momentum",
      fs.AGN(3, "sum", fragments=2, fragment_offset=0, delay=1),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      "adam",
      fs.AGN(4, "mean", fragments=3, delay=3, blend=0.25),
      marks=pytest.mark.slow,
    ),
    ("adam", fs.AGN(4, "sequential", fragments=3, delay=2, blend=0.5)),
    ("sgd", fs.AGN(3, "sequential", delay=1)),
    pytest.param("sgd", fs.AGN(2, "mean", blend=0.75), marks=pytest.mark.slow),
    pytest.param(
      "sgd",
      fs.AGN(3, "mean", fragments=3, commit_delta=True, delay=2),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_every_step_equals_the_reference(name, wrapper):
  agn_problem.compare(wrapper, *OPTIMIZERS[name], replicas=3, steps=9)


def test_streaming_diloco_equals_the_reference():
  wrapper = fs.AGN(
    4,
    "mean",
    commit_delta=True,
    outer_tx=optax.adam(0.05),
    fragments=2,
    delay=1,
    blend=0.5,
  )
  outer = agn_reference.Adam(0.05)
  agn_problem.compare(wrapper, *OPTIMIZERS["adam"], outer=outer, replicas=2)


def test_each_fragment_has_step_counts_of_its_own():
  strategy = agn_problem.strategy_of(2)
  rates = jnp.array([1.0, 0.5, 0.25, 0.125])
  tx = optax.sgd(lambda count: rates[count])
  wrapper = fs.AGN(4, "mean", fragments=2, outer_tx=tx, commit_delta=True)
  state = agn_problem.create(strategy, wrapper, optax.sgd(0.0))
  run = strategy.jit(agn_problem.step)
  lags = []
  for _ in range(8):
    state, _ = run(state, agn_problem.targets_of(strategy))
    agn = state.wrapper_states["agn"]
    count = int(agn.outer_opt_state[1].count)
    lags.append((count, *np.asarray(agn.fragment_counts["1-count"]).tolist()))
  assert lags == [
    *[(0, 0, 0), (1, 0, 1), (1, 0, 1), (1, 0, 0)],
    *[(1, 0, 0), (2, 0, 1), (2, 0, 1), (2, 0, 0)],
  ]
  assert int(state.wrapper_states["agn"].commits) == 4


def test_an_outer_optimizer_that_counts_updates_counts_those_of_a_fragment():
  # Every second commit of each fragment is applied, with the mean of two.
  strategy = agn_problem.strategy_of(2)
  outer = optax.MultiSteps(optax.sgd(0.5), 2)
  wrapper = fs.AGN(4, "mean", fragments=2, outer_tx=outer)
  state = agn_problem.create(strategy, wrapper, optax.sgd(0.0))
  run = strategy.jit(agn_problem.step)
  grads = [agn_problem.grad_fn(i, PARAMS) for i in range(2)]
  mean = {k: (grads[0][k] + grads[1][k]) / 2 for k in PARAMS}
  for step in range(1, 9):
    state, _ = run(state, agn_problem.targets_of(strategy))
    for k, number in agn_problem.FRAGMENTS[2].items():
      # The first commit of fragment 0 has the gradients of two steps.
      scale = 0.0
      if step >= (6, 8)[number]:
        scale = 0.5 * ((0.5 + 1) / 2 if number == 0 else 1)
      wanted = PARAMS[k] - scale * mean[k]
      np.testing.assert_allclose(state.params[k], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_one_replica_without_a_strategy():
  wrapper = fs.AGN(4, "sequential", fragments=2, delay=1, blend=0.5)
  wanted = agn_reference.AGN(
    PARAMS,
    OPTIMIZERS["adam"][1],
    1,
    4,
    "sequential",
    groups=agn_problem.groups_of(wrapper),
    delay=1,
    blend=0.5,
  )
  state = agn_problem.create(None, wrapper, OPTIMIZERS["adam"][0])
  targets = {k: t[0].astype(np.float32) for k, t in agn_problem.TARGETS.items()}
  jitted = jax.jit(agn_problem.step)
  for i in range(6):
    # The first steps run eagerly.
    state, _ = (agn_problem.step if i < 3 else jitted)(state, targets)
    wanted.take(agn_problem.grad_fn)
    agn_problem.assert_close(state, wanted)


def test_share_step_count_advances_at_the_commit_of_each_fragment():
  strategy = agn_problem.strategy_of(2)
  wrapper = fs.AGN(4, "mean", share_step_count=True, fragments=2)
  state = train(strategy, wrapper, optax.adam(0.1), 4)
  local = state.wrapper_states["agn"].local_opt_state[0].count
  assert np.asarray(local).tolist() == [6, 6]
  assert int(state.opt_state[0].count) == 6
  assert state.wrapper_states["agn"].fragment_counts == {}


@pytest.mark.slow
def test_skipped_steps_delay_commits_and_arrivals():
  strategy = agn_problem.strategy_of(2)
  wrapper = fs.AGN(3, "mean", fragments=3, delay=2, blend=0.5)
  tx = OPTIMIZERS["adam"][0]
  plain = train(strategy, wrapper, tx, 8)
  scaled = fs.LossScale("dynamic")

  def step(state, targets, scale):
    return state.minimize(
      lambda p, t: scale * agn_problem.loss_fn(p, t), targets
    )

  state = agn_problem.create(strategy, wrapper, tx, wrappers=[scaled])
  run = strategy.jit(step)
  for scale in (1, np.nan, 1, 1, np.inf, np.nan, 1, 1, 1, np.nan, 1, 1):
    state, _ = run(state, agn_problem.targets_of(strategy), np.float32(scale))
  assert int(state.wrapper_states["agn"].local_step) == 8
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    leaves(state),
    leaves(plain),
  )


def test_pending_counts_the_steps_of_each_fragment():
  wrapper = fs.AGN(4, "mean", fragments=2)
  state = agn_problem.create(
    agn_problem.strategy_of(1), wrapper, optax.sgd(0.1)
  ).wrapper_states["agn"]
  pending = lambda step, w=wrapper: w.pending(
    state._replace(local_step=jnp.int32(step))
  )
  assert pending(0) is None
  assert "the last 1 local steps" in pending(1)
  assert "the last 2, 0 local steps" in pending(4)
  assert "for fragment 0 to 1" in pending(4)
  assert "the last 3, 1 local steps" in pending(9)
  together = fs.AGN(4, "mean", fragments=2, fragment_offset=0)
  assert pending(4, together) is None
  assert "the last 3 local steps" in pending(7, together)


def test_too_many_fragments_raise_when_the_state_is_created():
  with pytest.raises(ValueError, match=r"fragments=5 must be at most .* 4"):
    agn_problem.create(None, fs.AGN(8, fragments=5), optax.sgd(0.1))
  frozen = fs.freeze(optax.sgd(0.1), ["^w$"])
  with pytest.raises(ValueError, match=r"fragments=4 must be at most .* 3"):
    agn_problem.create(None, fs.AGN(8, fragments=4), frozen)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize("commit", ["sequential", "sum"])
def test_frozen_parameters_stay(commit):
  strategy = agn_problem.strategy_of(2)
  tx = fs.freeze(optax.adam(0.1), ["^t$"])
  wrapper = fs.AGN(2, commit, fragments=2, delay=1, blend=0.5)
  state = train(strategy, wrapper, tx, 5)
  np.testing.assert_array_equal(state.params["t"], PARAMS["t"])
  for k in ("w", "b", "s"):
    assert np.abs(state.params[k] - PARAMS[k]).max() > 0.05


@pytest.mark.parametrize(
  "fragments", [pytest.param(1, marks=pytest.mark.slow), 3]
)
def test_nothing_is_lost_in_int8(fragments):
  # With a rate of 1 and plain SGD, center and accumulators hold the sum of all
  # gradients, whatever was cut off.
  strategy = agn_problem.strategy_of(4)
  wrapper = fs.AGN(3, "sum", fragments=fragments, commit_dtype="int8", delay=1)
  total = {k: np.zeros_like(p) for k, p in PARAMS.items()}

  def step(state, targets):
    _, grads = state.value_and_grad(agn_problem.loss_fn, targets)
    return state.apply_gradients(grads=grads), grads

  state = agn_problem.create(strategy, wrapper, optax.sgd(2.0**-6))
  run = strategy.jit(step)
  for _ in range(10):
    state, grads = run(state, agn_problem.targets_of(strategy))
    total = jax.tree.map(lambda t, g: t + np.sum(g.value, 0), total, grads)
  for k, t in total.items():
    center = (PARAMS[k] - np.asarray(state.params[k])) * 2.0**6 * 3
    waiting = np.sum(state.wrapper_states["agn"].grad_accum[k], 0)
    np.testing.assert_allclose(center + waiting, t, rtol=1e-4, atol=2e-3)


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize("commit", ["sequential", "mean"])
def test_statistics_are_committed_with_the_last_fragment(commit):
  strategy = agn_problem.strategy_of(2)
  ones = {"a": np.ones(8, np.float32), "b": np.ones(8, np.float32)}
  params = {"params": ones, OVERWRITE_WITH_GRADIENT: {"s": np.float32(0)}}
  wrapper = fs.AGN(2, commit, fragments=2, delay=1, blend=0.5)
  state = agn_problem.create(strategy, wrapper, optax.sgd(0.125), params)

  def step(state, x):
    def loss_fn(params):
      return x[0] * sum(p.sum() for p in params["params"].values())

    loss, grads = state.value_and_grad(loss_fn)
    grads = {**grads, OVERWRITE_WITH_GRADIENT: {"s": x[0]}}
    return state.apply_gradients(grads=grads), loss

  run = strategy.jit(step)
  seen = []
  for i in range(1, 4):
    x = strategy.shard_batch(np.array([1, 3], np.float32) * i)
    state, _ = run(state, x)
    agn = state.wrapper_states["agn"]
    local = agn.local_params[OVERWRITE_WITH_GRADIENT]["s"]
    center = state.params[OVERWRITE_WITH_GRADIENT]["s"]
    seen.append((float(center), *np.asarray(local).tolist()))
  if commit == "mean":
    # The largest of both; it arrives whole after the third step.
    assert seen == [(0, 1, 3), (6, 2, 6), (6, 6, 6)]
  else:
    assert seen == [(0, 1, 3), (6, 2, 6), (6, 2, 6)]
