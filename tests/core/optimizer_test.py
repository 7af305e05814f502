"""Optimizers and schedules of configs, and those that optax lacks.

sparse/tensorflow_parity_test.py has values of FTRL and the proximal ones.
"""

import math

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.core import optimizer
from flaxshard.core import registry

PARAMS = {
  "kernel": np.array([[1.0, -2.0], [0.5, 4.0]], np.float32),
  "bias": np.array([3.0, -1.0], np.float32),
}
GRADS = {
  "kernel": np.array([[1.0, 2.0], [0.0, -2.0]], np.float32),
  "bias": np.array([4.0, 0.0], np.float32),
}  # of norm 5


def create(config=None, **fields):
  defaults = {
    "optimizer": config or {"name": "sgd"},
    "schedule": {"name": "constant"},
    "learning_rate": 0.5,
    "num_train_steps": 100,
    "accumulate_steps": 1,
    "freeze": (),
    "learning_rates": (),
  }
  return optimizer.create({**defaults, **fields})


def updates(tx, steps, params=PARAMS, grads=GRADS):
  """Returns the last of several updates with equal gradients and parameters."""
  state = tx.init(params)
  for _ in range(steps):
    update, state = tx.update(grads, state, params)
  return update


def step(tx, params=PARAMS, grads=GRADS):
  updates, state = tx.update(grads, tx.init(params), params)
  return optax.apply_updates(params, updates), state


def assert_close(got, wanted):
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for name, value in wanted.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-6)


# -- Of configs.


@pytest.mark.parametrize(
  ("arguments", "steps", "rate", "clip"),
  [
    ({}, 1, 0.5, 1.0),
    ({"momentum": 0.9}, 2, 0.95, 1.0),
    # Gradients are clipped, the weight decay is not.
    ({"clip_by_global_norm": 2.0}, 1, 0.5, 0.4),
    ({"clip_by_global_norm": 5.5}, 1, 0.5, 1.0),
  ],
)
def test_sgd_decays_arrays_of_two_dimensions_only(arguments, steps, rate, clip):
  tx, _ = create({"name": "sgd", "weight_decay": 0.1, **arguments})
  kernel = clip * GRADS["kernel"] + 0.1 * PARAMS["kernel"]
  wanted = {"kernel": -rate * kernel, "bias": -rate * clip * GRADS["bias"]}
  assert_close(updates(tx, steps), wanted)


OPTAX = ("adadelta", "adafactor", "adagrad", "adam", "adamw", "lamb", "lion")


@pytest.mark.parametrize(
  ("name", "arguments"),
  [
    *((name, {}) for name in (*OPTAX, "rmsprop", "sgd")),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adamw", {"mu_dtype": "bfloat16"}),
  ],
)
def test_optimizers_of_optax(name, arguments):
  tx, schedule = create({"name": name, **arguments})
  wanted = getattr(optax, name)(schedule, **arguments)
  ours, theirs = (
    str(jax.make_jaxpr(lambda *args, x=x: updates(x, 2, *args))(PARAMS, GRADS))
    for x in (tx, wanted)
  )
  assert ours == theirs
  # Checkpoints hold the optimizer state, so its tree must be optax's too.
  ours, theirs = (jax.tree.structure(x.init(PARAMS)) for x in (tx, wanted))
  assert ours == theirs


@pytest.mark.parametrize(
  ("warmup_steps", "num_train_steps", "steps", "rates"),
  [
    (0, 100, (0, 25, 50, 100, 1000), (0.5, 0.25 + 0.125**0.5 / 2, 0.25, 0, 0)),
    (20, 120, (0, 5, 20, 70, 120, 1000), (0, 0.125, 0.5, 0.25, 0, 0)),
    # The run ends during the warmup.
    (20, 10, (0, 10), (0, 0.25)),
  ],
)
def test_cosine_schedule(warmup_steps, num_train_steps, steps, rates):
  _, schedule = create(
    schedule={"name": "cosine", "warmup_steps": warmup_steps},
    num_train_steps=num_train_steps,
  )
  values = [float(schedule(jnp.int32(i))) for i in steps]
  np.testing.assert_allclose(values, rates, atol=1e-7)


def by_type(learning_rate, flag):
  return optax.sgd(learning_rate if flag is True else -learning_rate)


def test_equal_arguments_of_other_types_give_other_optimizers():
  name = f"{__name__}:by_type"
  first, *others = (
    optimizer.named(name, learning_rate=0.5, flag=flag) for flag in (True, 1, 1)
  )
  assert others[0] is others[1]
  assert updates(first, 1)["bias"].tolist() == [-2.0, 0.0]
  assert updates(others[0], 1)["bias"].tolist() == [2.0, 0.0]


def power(base, exponent):
  return base, exponent


def test_named_functions_get_plain_values():
  functions = {"power": power, "sqrt": "math:sqrt"}
  config = ml_collections.ConfigDict({"name": "power", "exponent": [1, [2]]})
  assert registry.call("f", config, functions, base=5) == (5, (1, (2,)))
  assert config.to_dict() == {"name": "power", "exponent": [1, [2]]}
  for name in ("sqrt", "math:sqrt"):
    assert registry.lookup("f", name, functions) is math.sqrt


# -- `fs.optimizers`.

TENSORFLOW = [
  fs.optimizers.adagrad_da,
  fs.optimizers.ftrl,
  fs.optimizers.proximal_adagrad,
  fs.optimizers.proximal_gradient_descent,
]


@pytest.mark.parametrize("function", TENSORFLOW)
def test_l1_and_the_learning_rate_of_inject_hyperparams(function):
  @jax.jit
  def steps(params):
    return [
      step(wrap(function)(0.1, l1_regularization_strength=l1), params)[0]
      for wrap in (lambda function: function, optax.inject_hyperparams)
      for l1 in (1e3, 0.25)
    ]

  zeros, wanted, _, injected = steps(PARAMS)
  assert not any(x.any() for x in zeros.values())
  assert_close(injected, wanted)


@pytest.mark.parametrize("function", TENSORFLOW)
def test_dtypes_are_those_of_the_parameters_and_integers_stay(function):
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  tx = function(optax.constant_schedule(0.1))
  first = jax.eval_shape(tx.init, params)
  updates, state = jax.eval_shape(tx.update, GRADS, first, params)
  assert state == first
  dtypes = {x.dtype.name for x in jax.tree.leaves((updates, state))}
  assert dtypes <= {"bfloat16", "int32"}
  # TrainState gives optimizers a zero gradient for integers.
  new, _ = step(tx, {"count": jnp.array([3])}, {"count": jnp.zeros(1)})
  assert new["count"].tolist() == [3] and new["count"].dtype == jnp.int32


def test_ftrl_skips_a_step_with_learning_rate_zero():
  tx = fs.optimizers.ftrl(optax.linear_schedule(0.0, 0.5, 1))
  skipped, state = step(tx)
  first = tx.init(PARAMS)
  assert_close(skipped, PARAMS)
  assert_close(state.accum, first.accum)
  assert_close(state.linear, first.linear)
  # The next step is the first one of a run without warmup.
  updates, _ = tx.update(GRADS, state, skipped)
  wanted, _ = step(fs.optimizers.ftrl(0.5))
  assert_close(optax.apply_updates(skipped, updates), wanted)
