"""Runs of four steps of a CNN and of a transformer, and what they evaluated."""

import numpy as np
import optax
import pytest
import tiny

from flaxshard import data
from flaxshard import train


def digits() -> data.Splits:
  """Returns digits; the 20 held-out ones are not a multiple of a batch."""
  images = data.digits()
  held_out = data.Arrays(images.eval.inputs[:20], images.eval.labels[:20])
  return data.Splits(images.train, held_out, 10)


def tokens() -> data.Splits:
  """Returns windows of 8 from a random walk over 32 tokens; 19 are held out."""
  steps = np.random.default_rng(0).integers(0, 3, 800)
  walk = (np.cumsum(steps) % 32).astype(np.int32)
  return data.Splits(
    data.Windows(walk[:640], 8), data.Windows(walk[640:], 8), 32
  )


IMAGES = {
  "model": {"name": "cnn", "features": (4,), "dense": 8},
  "data": {"name": "tiny_runs:digits"},
}
TEXT = {
  "model": {
    "name": "transformer",
    "max_length": 8,
    "num_layers": 1,
    "num_heads": 2,
    "embed_dim": 16,
    "mlp_dim": 32,
  },
  "data": {"name": "tiny_runs:tokens"},
}


def run(workdir, **fields):
  """Returns the final state and the rows of a run."""
  values = dict(
    **IMAGES,
    mesh={"replica": 2},
    precision="float32",
    wrappers=(),
    # With Adam, a bias of attention would follow rounding errors.
    optimizer={"name": "sgd", "momentum": 0.9},
    num_train_steps=4,
    eval_every_steps=2,
    checkpoint_every_steps=2,
  )
  config = tiny.config(**{**values, **fields})
  state = train.train_and_evaluate(config, str(workdir))
  return state, tiny.untimed_rows(workdir)


def assert_evaluated(row, state, params):
  """Asserts that a row has the loss and the accuracy of some parameters."""
  held_out = digits().eval
  logits = state.apply_fn({"params": params}, held_out.inputs)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, held_out.labels
  )
  accuracy = (np.argmax(logits, -1) == held_out.labels).mean()
  assert row["eval_accuracy"] == pytest.approx(accuracy)
  assert row["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-4)


def assert_same_rows(rows, wanted):
  """Asserts that rows have the values of others, and maybe further ones."""
  for row, wanted_row in zip(rows, wanted, strict=True):
    assert {"train_loss", "learning_rate"} < set(wanted_row)
    shared = {key: row[key] for key in wanted_row}
    assert shared == pytest.approx(wanted_row, rel=1e-4)
  assert {"eval_loss", "eval_accuracy"} < set(wanted[-1])
