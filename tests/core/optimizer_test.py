"""Optimizers and schedules by name."""

import jax
import jax.numpy as jnp
import ml_collections
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


def create(optimizer_config=None, schedule=None, **fields):
  config = {
    "optimizer": optimizer_config or {"name": "sgd"},
    "schedule": schedule or {"name": "constant"},
    "learning_rate": 0.5,
    "num_train_steps": 100,
    **fields,
  }
  return optimizer.create(config)


def updates(tx, steps=1, grads=GRADS):
  """Returns the last of some updates with the same gradients and parameters."""
  state = tx.init(PARAMS)
  for _ in range(steps):
    update, state = tx.update(grads, state, PARAMS)
  return update


def assert_close(given, wanted, rtol=1e-6):
  assert jax.tree.structure(given) == jax.tree.structure(wanted)
  for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=rtol)


def times(factor, tree):
  return jax.tree.map(lambda x: factor * x, tree)


# Optimizers.


def test_sgd():
  tx, _ = create()
  assert_close(updates(tx), times(-0.5, GRADS))
  assert_close(updates(tx, steps=3), times(-0.5, GRADS))


def test_sgd_momentum():
  tx, _ = create({"name": "sgd", "momentum": 0.9})
  assert_close(updates(tx), times(-0.5, GRADS))
  assert_close(updates(tx, steps=2), times(-0.5 * 1.9, GRADS))
  assert_close(updates(tx, steps=3), times(-0.5 * (1 + 0.9 * 1.9), GRADS))


def test_sgd_nesterov():
  tx, _ = create({"name": "sgd", "momentum": 0.9, "nesterov": True})
  assert_close(updates(tx), times(-0.5 * 1.9, GRADS))
  assert_close(updates(tx, steps=2), times(-0.5 * (1 + 0.9 * 1.9), GRADS))


def test_sgd_decays_matrices_and_nothing_else():
  tx, _ = create({"name": "sgd", "weight_decay": 0.1})
  wanted = {
    "kernel": -0.5 * (GRADS["kernel"] + 0.1 * PARAMS["kernel"]),
    "bias": -0.5 * GRADS["bias"],
  }
  assert_close(updates(tx), wanted)


def test_sgd_decay_goes_through_momentum():
  tx, _ = create({"name": "sgd", "weight_decay": 0.1, "momentum": 0.9})
  wanted = {
    "kernel": -0.95 * (GRADS["kernel"] + 0.1 * PARAMS["kernel"]),
    "bias": -0.95 * GRADS["bias"],
  }
  assert_close(updates(tx, steps=2), wanted)


def test_clip_by_global_norm():
  tx, _ = create({"name": "sgd", "clip_by_global_norm": 2.0})
  assert_close(updates(tx), times(-0.5 * 2 / 5, GRADS))
  tx, _ = create({"name": "sgd", "clip_by_global_norm": 5.5})
  assert_close(updates(tx), times(-0.5, GRADS))


def test_gradients_are_clipped_and_not_their_decay():
  tx, _ = create(
    {"name": "sgd", "clip_by_global_norm": 2.0, "weight_decay": 0.1}
  )
  wanted = {
    "kernel": -0.5 * (0.4 * GRADS["kernel"] + 0.1 * PARAMS["kernel"]),
    "bias": -0.5 * 0.4 * GRADS["bias"],
  }
  assert_close(updates(tx), wanted)


@pytest.mark.parametrize(
  "name",
  ["adafactor", "adam", "adamw", "lamb", "lion", "rmsprop"],
)
def test_the_optimizers_of_optax(name):
  tx, _ = create({"name": name})
  wanted = getattr(optax, name)(0.5)
  # The same state too: that is what checkpoints hold.
  assert_close(updates(tx, steps=2), updates(wanted, steps=2))


def test_arguments_go_to_optax():
  arguments = {"b1": 0.5, "b2": 0.75, "eps": 1e-3, "weight_decay": 0.25}
  config = ml_collections.ConfigDict(
    {
      "optimizer": {"name": "adamw", **arguments},
      "schedule": {"name": "constant"},
      "learning_rate": 0.5,
      "num_train_steps": 100,
    }
  )
  tx, _ = optimizer.create(config)
  wanted = optax.adamw(0.5, **arguments)
  assert_close(updates(tx, steps=3), updates(wanted, steps=3))
  # The config is left as it was.
  assert config.optimizer.to_dict() == {"name": "adamw", **arguments}


# Schedules.


def test_constant():
  _, schedule = create()
  assert [float(schedule(i)) for i in (0, 1, 99, 1000)] == [0.5] * 4


def at(schedule, *steps):
  return [float(schedule(jnp.int32(i))) for i in steps]


def test_cosine():
  _, schedule = create(schedule={"name": "cosine"})
  np.testing.assert_allclose(
    at(schedule, 0, 25, 50, 75, 100, 1000),
    [0.5, 0.25 + 0.25 * np.sqrt(0.5), 0.25, 0.25 - 0.25 * np.sqrt(0.5), 0, 0],
    atol=1e-7,
  )


def test_cosine_after_a_linear_warmup():
  _, schedule = create(
    schedule={"name": "cosine", "warmup_steps": 20}, num_train_steps=120
  )
  np.testing.assert_allclose(
    at(schedule, 0, 5, 10, 20, 70, 120, 1000),
    [0, 0.125, 0.25, 0.5, 0.25, 0, 0],
    atol=1e-7,
  )


def test_a_run_may_be_shorter_than_its_warmup():
  _, schedule = create(
    schedule={"name": "cosine", "warmup_steps": 20}, num_train_steps=10
  )
  np.testing.assert_allclose(at(schedule, 0, 10), [0, 0.25], atol=1e-7)


def test_the_schedule_is_the_optimizers():
  tx, _ = create(
    schedule={"name": "cosine", "warmup_steps": 4}, num_train_steps=8
  )
  assert_close(updates(tx, steps=1), times(-0.0, GRADS))
  assert_close(updates(tx, steps=3), times(-0.25, GRADS))
  assert_close(updates(tx, steps=5), times(-0.5, GRADS))


# One's own, and errors.


@pytest.fixture
def own_module(tmp_path, monkeypatch):
  (tmp_path / "flaxshard_own_optimizer.py").write_text(
    """
import optax

def signs(learning_rate, times=1.0):
  return optax.chain(
    optax.scale_by_sign(), optax.scale(times),
    optax.scale_by_learning_rate(learning_rate))

def linear(learning_rate, num_train_steps, end):
  return optax.linear_schedule(learning_rate, end, num_train_steps)
"""
  )
  monkeypatch.syspath_prepend(str(tmp_path))
  return "flaxshard_own_optimizer"


def test_ones_own(own_module):
  tx, schedule = create(
    {"name": f"{own_module}:signs", "times": 3.0, "clip_by_global_norm": 1.0},
    {"name": f"{own_module}:linear", "end": 0.25},
  )
  assert at(schedule, 0, 50, 100) == [0.5, 0.375, 0.25]
  assert_close(
    updates(tx), jax.tree.map(lambda g: -0.5 * 3.0 * jnp.sign(g), GRADS)
  )


def test_unknown_names():
  with pytest.raises(ValueError) as e:
    create({"name": "adamm"})
  message = str(e.value)
  assert message.startswith("config.optimizer.name: unknown name 'adamm'")
  assert "adafactor, adam, adamw, lamb, lion, rmsprop, sgd" in message
  assert "'package.module:attribute'" in message
  assert "Did you mean 'adam'" in message
  with pytest.raises(ValueError) as e:
    create(schedule={"name": "cosin"})
  message = str(e.value)
  assert message.startswith("config.schedule.name: unknown name 'cosin'")
  assert "constant, cosine" in message
  assert message.endswith("Did you mean 'cosine'?")


@pytest.mark.parametrize(
  ("field", "config", "key", "takes"),
  [
    ("optimizer", {"name": "sgd", "momentun": 0.9}, "momentun", "'momentum'?"),
    (
      "optimizer",
      {"name": "adam", "weight_decay": 1},
      "weight_decay",
      "b1, b2",
    ),
    # The learning rate has a field of its own.
    (
      "optimizer",
      {"name": "sgd", "learning_rate": 1},
      "learning_rate",
      "moment",
    ),
    ("schedule", {"name": "cosine", "warmup": 3}, "warmup", "'warmup_steps'?"),
    ("schedule", {"name": "constant", "end": 3}, "end", "takes none"),
  ],
)
def test_unknown_arguments(field, config, key, takes):
  with pytest.raises(ValueError) as e:
    if field == "optimizer":
      create(config)
    else:
      create(schedule=config)
  message = str(e.value)
  assert message.startswith(f"config.{field} ('{config['name']}'): ")
  assert f"unknown argument {key!r}" in message
  assert takes in message


def test_a_missing_argument(own_module):
  with pytest.raises(TypeError, match=r"config\.schedule .*'end'"):
    create(schedule={"name": f"{own_module}:linear"})
