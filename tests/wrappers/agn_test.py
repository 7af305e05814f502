"""AGN beside a NumPy reference; its arguments, errors and warnings."""

import warnings

import agn_problem
import agn_reference
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

MOMENTUM = dict(momentum=0.9, nesterov=True)


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize(
  ("wrapper", "name", "outer", "sizes"),
  [
    (fs.AGN(3), "momentum", None, {}),
    (fs.AGN(3), "clipped", None, {}),
    (fs.AGN(3, "sum"), "clipped", None, {}),
    (fs.AGN(2), "adam", None, dict(replicas=1, steps=5)),
    (fs.AGN(2), "adam", None, dict(replicas=3, steps=5)),
    # Local SGD: the center is the mean of the local parameters.
    (
      fs.AGN(3, "mean", commit_delta=True, outer_tx=optax.sgd(1.0)),
      "adam",
      agn_reference.SGD(1.0),
      dict(steps=6),
    ),
    # DiLoCo.
    (
      fs.AGN(4, "mean", commit_delta=True, outer_tx=optax.sgd(0.7, **MOMENTUM)),
      "adam",
      agn_reference.SGD(0.7, 0.9, True),
      dict(replicas=3, steps=9),
    ),
    (
      fs.AGN(3, outer_tx=optax.adam(0.02)),
      "momentum",
      agn_reference.Adam(0.02),
      dict(replicas=3),
    ),
    (
      fs.AGN(3, commit_delta=True, outer_tx=optax.adam(0.02)),
      "momentum",
      agn_reference.Adam(0.02),
      dict(replicas=3),
    ),
    # Deltas with the inner optimizer.
    (
      fs.AGN(3, "sum", commit_delta=True),
      "sgd",
      None,
      dict(replicas=2, steps=4),
    ),
  ],
)
def test_every_step_equals_the_reference(wrapper, name, outer, sizes):
  state = agn_problem.compare(
    wrapper, *agn_problem.OPTIMIZERS[name], outer=outer, **sizes
  )
  if outer and name == "adam":
    # The state of `tx` for the center is not used.
    assert int(state.opt_state[0].count) == 0


def test_schedules_count_local_steps_and_commits():
  rates = [0.4, 0.3, 0.2, 0.1, 0.05, 0.02]
  schedule = lambda count: jnp.array(rates)[jnp.minimum(count, 5)]
  wanted = agn_reference.Adam(lambda count: rates[min(count, 5)])
  wrapper = fs.AGN(2, commit="mean")
  state = agn_problem.compare(
    wrapper, optax.adam(schedule), wanted, replicas=2, steps=6
  )
  local = state.wrapper_states["agn"].local_opt_state
  assert np.asarray(local[1].count).tolist() == [6, 6]
  assert int(state.opt_state[1].count) == 3


# Outside of `Strategy.run`.


def test_one_replica_without_a_strategy():
  wanted = agn_reference.AGN(
    agn_problem.PARAMS, agn_problem.OPTIMIZERS["adam"][1], 1, 3, "sequential"
  )
  state = agn_problem.create(None, fs.AGN(3), agn_problem.OPTIMIZERS["adam"][0])
  targets = {k: t[0].astype(np.float32) for k, t in agn_problem.TARGETS.items()}
  jitted = jax.jit(agn_problem.step, donate_argnums=0)
  for _ in range(4):
    state, _ = jitted(state, targets)
    wanted.take(agn_problem.grad_fn)
    agn_problem.assert_close(state, wanted)


def test_a_step_of_several_replicas_outside_of_run_raises():
  state = agn_problem.create(
    agn_problem.strategy_of(2), fs.AGN(2), optax.sgd(0.1)
  )
  targets = {k: t[0] for k, t in agn_problem.TARGETS.items()}
  with pytest.raises(ValueError, match=r"'agn'.* 2 replicas"):
    jax.jit(agn_problem.step)(state, targets)


def test_a_state_of_one_replica_in_run_raises():
  state = agn_problem.create(None, fs.AGN(2, commit="mean"), optax.sgd(0.1))
  strategy = agn_problem.strategy_of(2)
  with pytest.raises(ValueError) as e:
    strategy.run(agn_problem.step, (state, agn_problem.targets_of(strategy)))
  for fact in ("agn/local_params/b", "2 replicas", "(1, 3)"):
    assert fact in str(e.value)


# Arguments.


@pytest.mark.parametrize(
  ("call", "error", "fact"),
  [
    (lambda: fs.AGN(0), ValueError, "AGN: communication_period"),
    (lambda: fs.AGN(commit="max"), ValueError, "'sequential', 'mean', 'sum'"),
    (lambda: fs.AGN(share_step_count=1), TypeError, "AGN: share_step_count"),
    (lambda: fs.AGN(commit_delta="no"), TypeError, "AGN: commit_delta"),
    (lambda: fs.AGN(outer_tx=0.7), TypeError, "AGN: outer_tx"),
    (lambda: fs.AGN(outer_tx=optax.sgd), TypeError, "AGN: outer_tx"),
    (
      lambda: fs.AGN(outer_tx=optax.sgd(1.0), share_step_count=True),
      ValueError,
      "share_step_count=True",
    ),
    (lambda: fs.AGN(transport="grpc"), ValueError, "'compiled', 'store'"),
    (
      lambda: fs.AGN(transport="store", share_step_count=True),
      ValueError,
      "share_step_count=True",
    ),
    # Together with a period of 10.
    (lambda: fs.AGN(transport=fs.Store(11)), ValueError, "fragments .* 11"),
    (lambda: fs.AGN(transport=fs.Store(delay=10)), ValueError, "delay .* 10"),
    (lambda: fs.AGN(transport=fs.Store(quorum=2)), ValueError, "quorum=2"),
    (lambda: fs.Store(0), ValueError, "Store: fragments must be at least 1"),
    (lambda: fs.Store(1.5), TypeError, "Store: fragments"),
    (lambda: fs.Store(delay=-1), ValueError, "Store: delay"),
    (lambda: fs.Store(blend=1.0), ValueError, "Store: blend"),
    (lambda: fs.Store(quorum=0), ValueError, "Store: quorum"),
    (lambda: fs.Store(grace=-1.0), ValueError, "Store: grace"),
    (lambda: fs.Store(deadline="1"), TypeError, "Store: deadline"),
    (lambda: fs.Store(commit_dtype="int2"), ValueError, "'int4'"),
  ],
)
def test_mistakes(call, error, fact):
  with pytest.raises(error, match=fact):
    call()


@pytest.mark.parametrize(("period", "warns"), [(5, True), (6, False)])
def test_too_frequent_sequential_commits_warn(period, warns):
  # The least period of 8 replicas is 0.64 * 8 = 5.12.
  strategy = agn_problem.strategy_of(8)
  targets = agn_problem.targets_of(strategy)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    state = agn_problem.create(strategy, fs.AGN(period), optax.sgd(0.1))
    strategy.run(agn_problem.step, (state, targets))
  found = [f"communication_period={period}" in str(w.message) for w in caught]
  assert found == [True, True] * warns
