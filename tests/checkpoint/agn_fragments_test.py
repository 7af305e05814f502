"""Checkpoints of AGN with fragments and delay: resume, and other settings."""

import agn_problem
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import checkpoint

TX = optax.adam(0.05)
PLAIN = fs.AGN(4, "mean")
FRAGMENTS = fs.AGN(4, "mean", fragments=2)
DELAYED = fs.AGN(4, "mean", fragments=2, delay=3, blend=0.5)
SEQUENTIAL = fs.AGN(4, fragments=3, fragment_offset=1, delay=2)


def step(state, targets):
  loss, grads = state.value_and_grad(agn_problem.loss_fn, targets)
  stats = {
    "mean": 0.5 * state.batch_stats["mean"] + targets["b"],
    "steps": state.batch_stats["steps"] + 1,
  }
  return state.apply_gradients(grads=grads, batch_stats=stats), loss


def create(replicas, *wrappers, tx=TX):
  return fs.TrainState.create(
    apply_fn=None,
    params=agn_problem.PARAMS,
    tx=tx,
    wrappers=wrappers,
    strategy=agn_problem.strategy_of(replicas),
    batch_stats={"mean": np.zeros(3, np.float32), "steps": np.int32(0)},
  )


def train(state, replicas, steps):
  strategy = agn_problem.strategy_of(replicas)
  run = strategy.jit(step)
  for _ in range(steps):
    state, _ = run(state, agn_problem.targets_of(strategy))
  return state


def save_and_restore(path, state, into):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(1, state)
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(into)


def agn(state):
  return state.wrapper_states["agn"]


def assert_equal(given, wanted):
  assert jax.tree.structure(given) == jax.tree.structure(wanted)
  jax.tree.map(np.testing.assert_array_equal, given, wanted)


@pytest.mark.parametrize(
  "wrapper", [DELAYED, pytest.param(SEQUENTIAL, marks=pytest.mark.slow)]
)
def test_resuming_in_mid_period_is_exact(tmp_path, wrapper):
  state = train(create(2, wrapper), 2, 6)
  if wrapper.delay:
    arrives = np.concatenate([
      np.asarray(x)
      for name, x in agn(state).sent.items()
      if name.startswith("arrives")
    ])  # fmt: skip
    assert (arrives > 6).any()
  restored = save_and_restore(tmp_path, state, create(2, wrapper))
  assert_equal(restored, state)
  assert_equal(train(restored, 2, 4), train(state, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [DELAYED, SEQUENTIAL])
def test_another_number_of_replicas_begins_at_the_center(tmp_path, wrapper):
  state = train(create(2, wrapper), 2, 6)
  restored = save_and_restore(tmp_path, state, create(3, wrapper))
  own = agn(restored)
  assert (int(own.local_step), int(own.commits)) == (4, int(agn(state).commits))
  assert_equal(own.fragment_counts, agn(state).fragment_counts)
  for name, x in own.sent.items():
    if name.startswith("arrives"):
      assert np.asarray(x).tolist() == [0] * wrapper.fragments
  for k, p in restored.params.items():
    np.testing.assert_array_equal(p, state.params[k])
    for i in range(3):
      np.testing.assert_array_equal(own.local_params[k][i], p)
      if "params" in own.sent:
        np.testing.assert_array_equal(own.sent["params"][k][i], p)
  new = train(restored, 3, 8)
  assert int(agn(new).commits) > int(own.commits)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(new.params))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("saved", "wanted"),
  [
    (PLAIN, FRAGMENTS),
    (PLAIN, DELAYED),
    (DELAYED, PLAIN),
    (DELAYED, FRAGMENTS),
    (DELAYED, fs.AGN(4, "mean", fragments=3, delay=1)),
    (DELAYED, fs.AGN(4, fragments=2, delay=1)),
    (SEQUENTIAL, DELAYED),
  ],
)
@pytest.mark.filterwarnings("ignore:AGN. communication_period")
def test_other_settings_go_on_from_the_same_parameters(tmp_path, saved, wanted):
  state = train(create(2, saved), 2, 6)
  restored = save_and_restore(tmp_path, state, create(2, wanted))
  old, new = agn(state), agn(restored)
  for field in ("local_params", "local_opt_state", "grad_accum", "collections"):
    assert_equal(getattr(new, field), getattr(old, field))
  assert_equal(restored.opt_state, state.opt_state)
  assert int(new.local_step) == 6
  if wanted.fragments != saved.fragments:
    # All fragments have the counts of the center.
    assert not any(map(np.any, new.fragment_counts.values()))
  later = train(restored, 2, 6)
  # What was not on its way did not arrive.
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(later))
  own = agn(later)
  for k in agn_problem.PARAMS:
    assert np.abs(own.local_params[k]).min() > 0
  assert int(own.local_step) == 12


@pytest.mark.slow
def test_a_plain_checkpoint_goes_on_with_its_step_counts(tmp_path):
  rates = [0.25, 0.125, 0.0625, 0.5, 1.0]
  outer = optax.sgd(lambda count: jnp.array(rates)[count])
  make = lambda **kwargs: fs.AGN(
    2, "mean", commit_delta=True, outer_tx=outer, **kwargs
  )
  state = train(create(1, make(), tx=optax.sgd(0.1)), 1, 4)
  into = create(1, make(fragments=2), tx=optax.sgd(0.1))
  restored = save_and_restore(tmp_path, state, into)
  names = [k for k, n in agn_problem.FRAGMENTS[2].items() if n == 0]
  new = train(restored, 1, 1)
  params = jax.tree.map(lambda p: np.asarray(p[0]), agn(state).local_params)
  grads = agn_problem.grad_fn(0, params)
  assert int(agn(new).outer_opt_state[1].count) == 3
  assert np.asarray(agn(new).fragment_counts["1-count"]).tolist() == [0, 1]
  for k in names:
    # The third commit, of one local step.
    wanted = state.params[k] - 0.0625 * 0.1 * grads[k]
    np.testing.assert_allclose(new.params[k], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_center_is_restored_without_the_wrapper(tmp_path):
  state = train(create(2, DELAYED), 2, 7)
  restored = save_and_restore(tmp_path, state, create(2))
  assert_equal(restored.params, state.params)
  assert_equal(restored.opt_state, state.opt_state)
  assert_equal(restored.batch_stats, state.batch_stats)
  # And a new wrapper starts from it.
  again = save_and_restore(tmp_path / "plain", restored, create(2, DELAYED))
  assert_equal(again.params, state.params)
  assert np.asarray(agn(again).sent["arrives"]).tolist() == [0, 0]
  assert int(agn(train(again, 2, 4)).commits) == 2
