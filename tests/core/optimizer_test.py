"""Optimizers and schedules in configs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxshard.core import optimizer

PARAMS = {
  "kernel": jnp.array([[1.0, -2.0], [0.5, 4.0]]),
  "bias": jnp.array([3.0, -1.0]),
}
GRADS = {
  "kernel": jnp.array([[1.0, 2.0], [0.0, -2.0]]),
  "bias": jnp.array([4.0, 0.0]),
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


def program(tx):
  """Returns the program of two updates, as text."""
  return str(jax.make_jaxpr(lambda *args: updates(tx, 2, *args))(PARAMS, GRADS))


# Optimizers.


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
  wanted = {
    "kernel": -rate * (clip * GRADS["kernel"] + 0.1 * PARAMS["kernel"]),
    "bias": -rate * clip * GRADS["bias"],
  }
  new = updates(tx, steps)
  assert jax.tree.structure(new) == jax.tree.structure(wanted)
  for name, value in wanted.items():
    np.testing.assert_allclose(new[name], value, rtol=1e-6)


@pytest.mark.parametrize(
  "config",
  [
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9, "nesterov": True},
    *({"name": name} for name in ("adadelta", "adafactor", "adagrad", "adam")),
    *({"name": name} for name in ("lamb", "lion", "rmsprop")),
  ],
)
def test_optimizers_of_optax(config):
  tx, schedule = create(config)
  arguments = {k: v for k, v in config.items() if k != "name"}
  wanted = getattr(optax, config["name"])(schedule, **arguments)
  assert program(tx) == program(wanted)
  # Checkpoints hold the optimizer state, so its tree must be optax's too.
  assert jax.tree.structure(tx.init(PARAMS)) == jax.tree.structure(
    wanted.init(PARAMS)
  )


# Schedules.


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


# Custom functions and errors.


@pytest.mark.parametrize(
  ("field", "config", "error", "facts"),
  [
    # core/registry_test.py has the other mistakes.
    ("optimizer", {"name": "adamm"}, ValueError, ["'adam'"]),
    ("schedule", {"name": "cosin"}, ValueError, ["constant, cosine"]),
    ("optimizer", {"name": "adam", "b1": "x"}, TypeError, [".b1", "'x'"]),
    ("optimizer", {"name": "adam", "b1": -1}, ValueError, [".b1", "-1"]),
    # The learning rate is a field of the config.
    ("optimizer", {"name": "sgd", "learning_rate": 1}, ValueError, ["got 1"]),
  ],
)
def test_mistakes(field, config, error, facts):
  with pytest.raises(error) as e:
    create(**{field: config})
  for fact in [f"config.{field}", *facts]:
    assert fact in str(e.value)


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
