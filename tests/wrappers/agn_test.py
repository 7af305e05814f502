"""AGN beside a NumPy reference; its arguments, errors and warnings."""

import warnings

import agn_problem
import jax
import optax
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs

NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.mark.filterwarnings("ignore:AGN. communication_period")
@pytest.mark.parametrize(
  ("wrapper", "name", "sizes"),
  [
    (fs.AGN(3), "momentum", {}),
    (fs.AGN(3), "clipped", {}),
    (fs.AGN(3, "sum"), "clipped", {}),
    # The rates of local steps and of commits have counts of their own.
    (fs.AGN(2, "mean"), "schedule", dict(replicas=2, steps=6)),
    (fs.AGN(2), "adam", dict(replicas=1, steps=5)),
    (fs.AGN(3), "adam", dict(replicas=None, steps=4)),
    # Deltas with the inner optimizer.
    (fs.AGN(3, "sum", commit_delta=True), "sgd", dict(replicas=2, steps=4)),
    # Local SGD: the center is the mean of the local parameters.
    (
      fs.AGN(3, "mean", commit_delta=True, outer_tx=optax.sgd(1.0)),
      "adam",
      dict(steps=6),
    ),
    # DiLoCo.
    (
      fs.AGN(4, "mean", commit_delta=True, outer_tx=NESTEROV),
      "adam",
      dict(replicas=3, steps=9),
    ),
    (fs.AGN(3, outer_tx=optax.adam(0.02)), "momentum", dict(replicas=3)),
  ],
)
def test_every_step_equals_the_reference(wrapper, name, sizes):
  tx = agn_problem.OPTIMIZERS[name]
  state = agn_problem.compare(wrapper, tx, **sizes)
  if wrapper.outer_tx is not None:
    # The state of `tx` for the center is not used.
    assert_trees_equal(state.opt_state, tx.init(agn_problem.PARAMS))


def test_a_step_of_several_replicas_outside_of_run_raises():
  state = agn_problem.create(
    agn_problem.strategy_of(2), fs.AGN(2), optax.sgd(0.1)
  )
  targets = agn_problem.targets_of_replica(0)
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
