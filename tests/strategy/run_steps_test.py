"""Strategy.run_steps: the same results as a Python loop over run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from regression import batch
from regression import create
from regression import loss_fn
from regression import sharded
from regression import train_step
from regression import X
from regression import Y
from tree_equality import assert_trees_close

import flaxshard as fs

STRATEGY = fs.Strategy()
DYNAMIC = (fs.LossScale("dynamic"),)


@pytest.fixture(scope="module")
def batches():
  return [sharded(STRATEGY, i) for i in range(3)]


def with_outputs(state, batch):
  state, loss = state.minimize(loss_fn, batch)
  number = fs.get_replica_context().replica_id_in_sync_group
  return state, {
    "loss": loss,
    "count": number + 1,
    "positive": loss > 0,
    "key": jax.random.fold_in(jax.random.key(0), number),
    "number": 1.5,
    "row": batch["x"][0],
  }


def in_python(state, batches):
  for one in batches:
    state, outputs = STRATEGY.run(with_outputs, args=(state, one))
  return state, outputs


@pytest.fixture(scope="module")
def wanted(batches):
  return in_python(create(STRATEGY, DYNAMIC), batches)


def test_each_output_has_its_own_reduction(batches, wanted):
  reduce = {
    "loss": "mean",
    "count": "sum",
    "positive": "sum",
    "key": None,
    "number": "sum",
    "row": None,
  }
  state, outputs = STRATEGY.run_steps(
    with_outputs, create(STRATEGY, DYNAMIC), batches, reduce=reduce
  )
  assert_trees_close(state, wanted[0], 0, 1e-7)
  mean = float(STRATEGY.reduce("mean", wanted[1]["loss"]))
  np.testing.assert_allclose(float(outputs["loss"]), mean, rtol=1e-6)
  sums = [float(outputs[k]) for k in ("count", "positive", "number")]
  assert sums == [36, 8, 12]
  rows = X[2].reshape(8, 2, 8)[:, 0]
  np.testing.assert_array_equal(np.asarray(outputs["row"]), rows)
  key = jax.random.key_data(outputs["key"].value)
  np.testing.assert_array_equal(
    key, jax.random.key_data(wanted[1]["key"].value)
  )


def test_per_replica_batches():
  # As many steps as replicas: sizes do not show which dimension is which.
  steps = 8

  def own(i):
    return STRATEGY.distribute_values_from_function(
      lambda context: jnp.full(2, 10.0 * i + context.replica_id_in_sync_group)
    )

  def step(state, x):
    count = jax.lax.pmax(x[0], "replica").astype(jnp.int32)
    return state.replace(step=10 * state.step + count // 10), x[1]

  state, last = STRATEGY.run_steps(
    step, create(STRATEGY), [own(i) for i in range(steps)]
  )
  assert str(int(state.step)) == "1234567"[: steps - 1]
  wanted = 10.0 * (steps - 1) + np.arange(8)
  np.testing.assert_array_equal(np.asarray(last), wanted)


def test_step_in_the_middle_is_skipped():
  batches = [sharded(STRATEGY, i, bad=9 if i == 1 else None) for i in range(3)]
  state, _ = STRATEGY.run_steps(
    train_step, create(STRATEGY, DYNAMIC), batches, reduce="mean"
  )
  alone, step = create(), jax.jit(train_step)
  for i in (0, 2):
    alone, _ = step(alone, batch(i))
  assert_trees_close(state.params, alone.params, 1e-4, 1e-5)
  scale = state.wrapper_states["loss_scale"]
  assert (int(state.step), int(scale.skipped_steps)) == (2, 1)
  assert float(scale.scale) == 2.0**14


def test_donated_state_is_deleted(batches):
  state = create(STRATEGY)
  kept, _ = STRATEGY.run_steps(train_step, state, batches)
  assert not state.params["w1"].is_deleted()
  new, _ = STRATEGY.run_steps(train_step, state, batches, donate_state=True)
  assert_trees_close(new, kept, 0, 0)
  assert all(x.is_deleted() for x in jax.tree.leaves(state))


def changes_a_shape(state, batch):
  return state.replace(params={**state.params, "w1": state.params["w2"]})


SHORTER = {**batch(1), "y": Y[1][:8]}


@pytest.mark.parametrize(
  ("arguments", "error", "facts"),
  [
    ({"batches": []}, ValueError, r"batches.*\[\]"),
    ({"batches": {"x": X[:0]}}, ValueError, "batches"),
    ({"batches": ["a"]}, TypeError, "argument 1/0 must be an array"),
    ({"batches": {"x": X, "y": Y[:2]}}, ValueError, r"\[\(2,\), \(3,\)\]"),
    ({"batches": [batch(0), SHORTER]}, ValueError, "same shape"),
    # One batch in place of several: its examples are no steps.
    (
      {"batches": sharded(STRATEGY, 0)},
      ValueError,
      r"batches\[x\] .*\(16, 8\).* list",
    ),
    ({"reduce": "max"}, ValueError, "reduce .*'max'"),
    ({"reduce": {"a": "sum"}}, ValueError, "Expected dict"),
    ({"step": lambda s, b: None}, TypeError, "carry input and carry output"),
    ({"step": changes_a_shape}, TypeError, r"carry.*params\['w1'\]"),
  ],
)
def test_mistakes(batches, arguments, error, facts):
  given = {"step": train_step, "batches": batches, **arguments}
  step, batches = given.pop("step"), given.pop("batches")
  with pytest.raises(error, match=facts):
    STRATEGY.run_steps(step, create(STRATEGY), batches, **given)
