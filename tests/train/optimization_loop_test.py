"""Runs that accumulate, freeze, scale learning rates and average parameters."""

import jax
import numpy as np
import optax
import pytest
import tiny
import tree_equality

from flaxshard import train


def config(**fields):
  values = dict(wrappers=(), precision="float32", mesh={"replica": 2})
  return tiny.config(**{**values, **fields})


def close(a, b):
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Returns a function that runs a config once: its state and rows."""
  done = {}

  def run(**fields):
    key = repr(sorted(fields.items()))
    if key not in done:
      workdir = str(tmp_path_factory.mktemp("run"))
      state = train.train_and_evaluate(config(**fields), workdir)
      done[key] = state, tiny.rows(workdir)
    return done[key]

  with tiny.importable("optimization_loop_test", __name__):
    yield run


COSINE = {"name": "cosine", "warmup_steps": 1}
# One run for all comparisons.
PLAIN = dict(num_train_steps=4, log_every_steps=1, schedule=COSINE)


@pytest.mark.slow
def test_accumulated_batches_equal_large_ones_and_averages_are_evaluated(runs):
  large, large_rows = runs(**PLAIN)
  small, rows = runs(
    batch_size=8,
    accumulate_steps=2,
    schedule=COSINE,
    wrappers=(("ema", {"decay": 0.75, "debias": False}),),
  )
  assert int(small.step) == int(large.step) == 4
  close(small.params, large.params)
  # A row for each update. The rates are those of the updates.
  assert [row["step"] for row in rows] == [2, 4, 6, 8]
  assert [row["learning_rate"] for row in rows] == [
    row["learning_rate"] for row in large_rows
  ]
  expected = optax.warmup_cosine_decay_schedule(0.0, 0.01, 1, 4)
  for i, row in enumerate(rows):
    np.testing.assert_allclose(row["learning_rate"], expected(i))
  # Metrics have the batches that were only added.
  close(
    [row["train_loss"] for row in rows],
    [row["train_loss"] for row in large_rows],
  )
  assert not np.isclose(
    rows[-1]["eval_loss"], large_rows[-1]["eval_loss"], rtol=1e-3
  )
  assert int(small.wrapper_states["ema"].num_updates) == 4


@pytest.mark.slow
def test_resume_within_an_accumulation_is_bit_equal(tmp_path):
  fields = dict(
    accumulate_steps=3,
    wrappers=(
      ("loss_scale", {"scale": "dynamic"}),
      ("ema", {"decay": 0.5}),
    ),
    precision="mixed_float16",
    optimizer={"name": "adam"},
  )
  whole = train.train_and_evaluate(config(**fields), str(tmp_path / "whole"))
  workdir = str(tmp_path / "parts")
  part = train.train_and_evaluate(config(**fields, num_train_steps=4), workdir)
  assert int(part.wrapper_states["accumulate"].num_batches) == 1
  resumed = train.train_and_evaluate(config(**fields, resume="extend"), workdir)
  tree_equality.assert_trees_equal(
    jax.tree.leaves(resumed), jax.tree.leaves(whole)
  )
  assert int(whole.wrapper_states["ema"].num_updates) == int(whole.step) == 2


@pytest.mark.slow
def test_frozen_parameters_and_rates_by_pattern(runs):
  state, rows = runs(
    num_train_steps=4,
    freeze=("^dense/",),
    learning_rates=(("bias$", 4.0),),
    optimizer={"name": "sgd", "momentum": 0.9},
  )
  plain, _ = runs(**PLAIN)
  paths = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)
  ]
  assert all("dense" not in path for path in paths)
  assert any("head" in path for path in paths)
  assert rows[-1]["learning_rate"] == pytest.approx(0.01)
  assert rows[-1]["learning_rate/bias$"] == pytest.approx(0.04)
  # The bias of a layer starts at zeros.
  assert not np.any(np.asarray(state.params["dense"]["bias"]))
  assert np.any(np.asarray(plain.params["dense"]["bias"]))
  assert np.any(np.asarray(state.params["head"]["bias"]))
