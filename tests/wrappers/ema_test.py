"""EMA: the average, skipped steps, other wrappers and checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
import tree_equality

import flaxshard as fs

PARAMS = {"w": np.array([1.0, -2.0], np.float32)}
# A new optimizer would be another static field.
SGD = optax.sgd(0.125)
create = functools.partial(quadratic_states.create, tx=SGD, params=PARAMS)


@jax.jit
def step(state, x):
  return state.minimize(lambda p: (p["w"] * x).sum())[0]


def train(wrappers, gradients):
  return functools.reduce(step, gradients, create(wrappers))


@pytest.mark.parametrize(
  ("arguments", "inside"),
  [
    ({}, []),
    ({"warmup": True}, []),
    ({"debias": False}, []),
    ({"debias": False, "warmup": True}, []),
    # The center at each local step.
    ({}, [fs.AGN(2)]),
  ],
)
def test_average_equals_its_definition(arguments, inside):
  wrapper = fs.EMA(0.75, **arguments)
  state = create([wrapper, *inside])
  average = np.zeros(2) if wrapper.debias else np.float64(PARAMS["w"])
  weight = 0.0 if wrapper.debias else 1.0
  for n, x in enumerate([1.0, -3.0, 2.0, 5.0, 0.5]):
    state = step(state, x)
    d = min(0.75, (1 + n) / (10 + n)) if wrapper.warmup else 0.75
    average = d * average + (1 - d) * np.float64(state.params["w"])
    weight = d * weight + (1 - d)
    np.testing.assert_allclose(
      state.eval_params["w"], average / weight, rtol=1e-6
    )
    assert int(state.wrapper_states["ema"].num_updates) == n + 1


def test_without_an_update_the_parameters_are_evaluated():
  state = create([fs.EMA()])
  tree_equality.assert_trees_equal(state.eval_params, state.params)
  pretrained = {"w": jnp.array([3.0, 4.0])}
  state = state.replace(params=pretrained)
  tree_equality.assert_trees_equal(state.eval_params, pretrained)
  in_jit = jax.jit(lambda state: state.eval_params)(state)
  tree_equality.assert_trees_equal(in_jit, pretrained)


@pytest.mark.parametrize(
  ("other", "gradients", "updates"),
  [
    (fs.LossScale("dynamic"), [1.0, 3.0, np.inf, 2.0], [1.0, 3.0, 2.0]),
    (fs.Accumulate(2), [1.0, 3.0, 2.0, 2.0, 5.0], [2.0, 2.0]),
  ],
)
@pytest.mark.parametrize("is_outside", [False, True])
def test_average_is_that_of_the_updates(other, gradients, updates, is_outside):
  wrappers = [fs.EMA(0.5), other] if is_outside else [other, fs.EMA(0.5)]
  state = train(wrappers, gradients)
  wanted = train([fs.EMA(0.5)], updates)
  tree_equality.assert_trees_equal(
    state.wrapper_states["ema"], wanted.wrapper_states["ema"]
  )


def test_average_of_bfloat16_parameters_is_float32():
  params = {"w": jnp.ones(2, jnp.bfloat16), "n": jnp.int32(3)}
  state = create([fs.EMA(0.999, debias=False)], params=params)
  average = state.wrapper_states["ema"].params
  assert average["w"].dtype == jnp.float32 and average["n"] is None
  state = step(state, 1.0)
  average = state.wrapper_states["ema"].params["w"]
  np.testing.assert_allclose(average, 0.999 + 0.001 * 0.875, rtol=1e-6)
  assert state.eval_params["w"].dtype == jnp.bfloat16
  assert int(state.eval_params["n"]) == 3


@pytest.mark.parametrize("debias", [False, True])
def test_average_is_saved_restored_and_optional(tmp_path, debias):
  wrappers = [fs.EMA(0.5, debias=debias)]
  state = train(wrappers, [1.0, 2.0])
  with fs.Checkpointer(tmp_path / "ema") as checkpointer:
    checkpointer.save(2, state)
    restored = checkpointer.restore(create(wrappers))
    plain = checkpointer.restore(create([]))
  tree_equality.assert_trees_equal(restored, state)
  tree_equality.assert_trees_equal(plain.params, state.params)
  with fs.Checkpointer(tmp_path / "plain") as checkpointer:
    checkpointer.save(2, plain)
    fresh = checkpointer.restore(create(wrappers))
  # The average starts at the restored parameters, not at those of `create`.
  tree_equality.assert_trees_equal(fresh.eval_params, state.params)
  new = step(fresh, 3.0)
  before, after = np.asarray(state.params["w"]), np.asarray(new.params["w"])
  expected = after if debias else (before + after) / 2
  np.testing.assert_allclose(new.eval_params["w"], expected, rtol=1e-6)
