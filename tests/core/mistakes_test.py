"""Mistakes in arguments of all kinds: the message names what is allowed."""

import pathlib

import numpy as np
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard import train
from flaxshard.core import optimizer
from flaxshard.core import registry

SGD = optax.sgd(0.1)
PARAMS = {"encoder": {"w": np.ones((3, 2))}, "head": {"w": np.ones(2)}}
FROZEN = fs.freeze(SGD, ["encoder"])
URL = "hdfs://host/run"
BUCKET = pathlib.Path("gs://b/run")


def power(base, exponent=2):
  if exponent == 0:
    raise ValueError("exponent must not be 0.")


def number(**arguments):
  return 0.1


NUMBER = f"{__name__}:number"


def call(config):
  return registry.call("config.f", config, {"power": power}, base=5)


def lookup(name):
  return registry.lookup("x", name, {})


def named(name, **arguments):
  return optimizer.named(name, **{"learning_rate": 0.1, **arguments})


def create(schedule="constant", **arguments):
  return optimizer.create(
    {
      "optimizer": {"name": "sgd", **arguments},
      "schedule": {"name": schedule},
      "learning_rate": 0.5,
      "num_train_steps": 9,
      "accumulate_steps": 1,
    }
  )


def init(tx):
  return fs.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


def freeze(*patterns):
  return init(fs.freeze(SGD, patterns))


def rates(*factors):
  return init(fs.scale_learning_rates(SGD, factors))


def slices(indices, values, shape=(3, 2)):
  return fs.IndexedSlices(indices, np.ones(values, np.float32), shape)


ROWS = slices([0], (1, 2), (4, 2))


def apply_rows(rows):
  return init(SGD).apply_gradients(grads=PARAMS | {"encoder": {"w": rows}})


MISTAKES = [
  # Names, and arguments of what they name.
  (lambda: lookup("no_such_module:f"), ValueError, "x 'no_such_module'"),
  (lambda: lookup("math:sqr"), ValueError, "x 'math' 'sqr' mean 'sqrt'"),
  (lambda: call("power"), TypeError, "config.f 'power'"),
  (lambda: call({"exponent": 3}), ValueError, "config.f 'name'"),
  (lambda: call({"name": "power", "base": 1}), ValueError, "'base'"),
  (lambda: call({"name": "power", "exponet": 1}), ValueError, "'exponent'"),
  (lambda: call({"name": "math:pi"}), TypeError, "config.f ('math:pi') 3.14"),
  # The function does not name the field of the config.
  (lambda: call({"name": "power", "exponent": 0}), ValueError, "'power'): exp"),
  # Optimizers and schedules.
  (lambda: named("adamm"), ValueError, "optimizer 'adam'"),
  (lambda: create(NUMBER), TypeError, "config.schedule 0.1"),
  (lambda: create(name=NUMBER), TypeError, "config.optimizer 0.1"),
  (lambda: named("adam", b1="x"), TypeError, "optimizer.b1 'x'"),
  (lambda: named("adam", b1=-1), ValueError, "optimizer.b1 -1"),
  (lambda: named("ftrl", learning_rate_power=0.5), ValueError, "power 0.5"),
  (lambda: fs.optimizers.ftrl(1, learning_rate_power="1"), TypeError, "power"),
  (lambda: fs.optimizers.adagrad_da(1, 0), ValueError, "initial_gradient_sq"),
  (lambda: fs.optimizers.ftrl(-0.1), ValueError, "learning_rate -0.1"),
  (lambda: fs.optimizers.ftrl(1, 0, -1.0), ValueError, "initial_accu -1.0"),
  (lambda: fs.optimizers.proximal_adagrad(1, 1, -1), ValueError, "l1_regula"),
  (lambda: create("cosin"), ValueError, "config.schedule cosine"),
  (lambda: create(learning_rate=1), ValueError, "got 1 config.learning_rate"),
  # Patterns.
  (lambda: freeze("^encodr/"), ValueError, "patterns[0]='^encodr/' 'encoder'"),
  (lambda: freeze("encoder", "encoder/w"), ValueError, "[1]='encoder/w'"),
  (lambda: fs.freeze(SGD, "^head/"), ValueError, "patterns '^head/'"),
  (lambda: fs.freeze(optax.sgd, ["w"]), TypeError, "freeze: tx sgd(1e-3)"),
  (lambda: rates(("haed", 2.0)), ValueError, "factors[0]='haed' 'head'"),
  (lambda: rates(("head", 0.0)), ValueError, "factors[0] above got 0"),
  (lambda: fs.scale_learning_rates(FROZEN, [("w", 2)]), ValueError, "freeze l"),
  # Rows.
  (lambda: slices([0.5], (1, 2)), TypeError, "integers, got float"),
  (lambda: slices([[0]], (1, 2)), ValueError, "[1, 1] [1, 2]"),
  (lambda: slices(np.array([2**32]), (1, 2)), ValueError, "4294967296 int32"),
  (lambda: slices([0], (1, 3)), ValueError, "(3, 2) [1, 3]"),
  (lambda: slices([0], 1, ()), ValueError, "at least one dimension, got ()"),
  (lambda: apply_rows(ROWS), ValueError, "encoder/w: shape (4, 2) (3, 2)"),
  # Files that cannot be reached.
  (lambda: fs.Checkpointer(URL), ValueError, URL),
  (lambda: fs.Checkpointer("s3://bucket/run"), ValueError, "s3://bucket/run"),
  (lambda: fs.Checkpointer(BUCKET), ValueError, "'gs:/b/run' gs://"),
  (lambda: fs.checkpoint.restore(URL, init(SGD)), ValueError, URL),
  (lambda: fs.checkpoint.init_from(PARAMS, URL), ValueError, URL),
  (lambda: train.train_and_evaluate(tiny.config(), URL), ValueError, URL),
  (lambda: fs.load(URL), ValueError, URL),
]


@pytest.mark.parametrize(("call", "error", "facts"), MISTAKES)
def test_mistakes(call, error, facts):
  with pytest.raises(error) as e:
    call()
  assert all(fact in str(e.value) for fact in facts.split())
  assert str(e.value).count("config.f") <= 1
