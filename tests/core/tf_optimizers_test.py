"""FTRL and proximal optimizers; sparse/tensorflow_parity_test.py has values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxshard.core import tf_optimizers

ALL = [
  tf_optimizers.adagrad_da,
  tf_optimizers.ftrl,
  tf_optimizers.proximal_adagrad,
  tf_optimizers.proximal_gradient_descent,
]
PARAMS = {"kernel": jnp.array([[1.0, -2.0]]), "bias": jnp.array([0.0])}
GRADS = {"kernel": jnp.array([[0.5, 0.25]]), "bias": jnp.array([0.125])}


def step(tx, params=PARAMS, grads=GRADS):
  updates, state = tx.update(grads, tx.init(params), params)
  return optax.apply_updates(params, updates), state


def values(tree):
  return {name: x.ravel().tolist() for name, x in tree.items()}


def test_l1_gives_exact_zeros():
  @jax.jit
  def steps(params):
    return [
      step(optimizer(0.1, l1_regularization_strength=1e3), params)[0]
      for optimizer in ALL
    ]

  zeros = {"kernel": [0.0, 0.0], "bias": [0.0]}
  assert [values(params) for params in steps(PARAMS)] == [zeros] * len(ALL)


@pytest.mark.parametrize("optimizer", ALL)
def test_dtypes_are_those_of_the_parameters(optimizer):
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  tx = optimizer(optax.constant_schedule(0.1))
  first = jax.eval_shape(tx.init, params)
  updates, state = jax.eval_shape(tx.update, GRADS, first, params)
  assert {x.dtype for x in jax.tree.leaves(updates)} == {
    jnp.dtype(jnp.bfloat16)
  }
  assert state == first
  floats = [x for x in jax.tree.leaves(state) if x.dtype != jnp.int32]
  assert {x.dtype for x in floats} <= {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("optimizer", ALL)
def test_integers_stay(optimizer):
  params = {"count": jnp.array([3])}
  # TrainState gives optimizers a zero gradient for them.
  new, _ = step(optimizer(0.1), params, {"count": jnp.zeros(1)})
  assert values(new) == {"count": [3]} and new["count"].dtype == jnp.int32


def test_ftrl_skips_a_step_with_learning_rate_zero():
  tx = tf_optimizers.ftrl(optax.linear_schedule(0.0, 0.5, 1))

  @jax.jit
  def steps(params):
    skipped, state = step(tx, params)
    updates, _ = tx.update(GRADS, state, skipped)
    # The next step is the first one of a run without warmup.
    wanted, _ = step(tf_optimizers.ftrl(0.5), params)
    new = optax.apply_updates(skipped, updates)
    return tx.init(params), skipped, state, new, wanted

  first, skipped, state, new, wanted = steps(PARAMS)
  assert values(skipped) == values(PARAMS)
  assert values(state.accum) == values(first.accum)
  assert values(state.linear) == values(first.linear)
  for name in new:
    np.testing.assert_allclose(new[name], wanted[name], rtol=1e-6)


@pytest.mark.parametrize(
  ("optimizer", "name", "value", "error"),
  [
    ("ftrl", "learning_rate_power", 0.5, ValueError),
    ("ftrl", "learning_rate_power", "1", TypeError),
    ("adagrad_da", "initial_gradient_squared_accumulator_value", 0, ValueError),
    ("proximal_adagrad", "initial_accumulator_value", 0, ValueError),
  ],
)
def test_mistakes(optimizer, name, value, error):
  function = getattr(tf_optimizers, optimizer)
  with pytest.raises(error, match=name):
    function(**{"learning_rate": 0.1, name: value})


def test_inject_hyperparams():
  def steps(params, transform):
    return [
      step(transform(optimizer)(0.1, l1_regularization_strength=0.25), params)
      for optimizer in ALL
    ]

  @jax.jit
  def injected_and_plain(params):
    injected = steps(params, optax.inject_hyperparams)
    return injected, steps(params, lambda optimizer: optimizer)

  for (got, _), (want, _) in zip(*injected_and_plain(PARAMS), strict=True):
    for name in want:
      np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
