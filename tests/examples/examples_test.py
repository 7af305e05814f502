"""The example configs reach the results that their docstrings state."""

import json
import types

from clu import metrics as clu_metrics
import jax
import numpy as np
import pytest
import tree_equality

from flaxshard import train
from flaxshard.examples import ddpm
from flaxshard.examples import ppo
from flaxshard.examples import recsys
from flaxshard.examples import regression
from flaxshard.examples import simclr
from flaxshard.train.config import files


def read_config(name, **changes):
  config = files.read(name)
  # One device: eight virtual ones take several times as long.
  config.update({"writer": "none", "mesh": {"replica": 1}, **changes})
  return config


def run(config, workdir, **kwargs):
  state = train.train_and_evaluate(config, str(workdir), **kwargs)
  row = {}
  for line in (workdir / "metrics.jsonl").read_text().splitlines():
    row |= json.loads(line)
  return state, row


@pytest.mark.slow
def test_vae_is_far_better_than_independent_pixels(tmp_path):
  _, row = run(read_config("vae"), tmp_path)
  assert row["eval_loss"] == pytest.approx(18.8, abs=0.6)
  # Those would cost 25.3 nats.
  assert row["eval_nll"] < row["eval_loss"]
  total = row["eval_reconstruction"] + row["eval_kl"]
  assert row["eval_loss"] == pytest.approx(total, rel=1e-5)


@pytest.mark.slow
def test_simclr_separates_digits_without_labels(tmp_path):
  config = read_config("simclr", num_train_steps=150, eval_every_steps=1000)
  _, row = run(config, tmp_path)
  # As it was initialized, the encoder has less than 0.8.
  assert row["eval_knn_accuracy"] > 0.93


@pytest.mark.slow
def test_ddpm_draws_digits(tmp_path):
  config = read_config("ddpm", num_train_steps=400, eval_every_steps=1000)
  _, row = run(config, tmp_path)
  # A normal distribution with the covariance of the images has 0.46.
  assert row["eval_precision"] > 0.6
  assert row["eval_recall"] > 0.35


@pytest.mark.slow
def test_regression_is_more_likely_than_least_squares(tmp_path):
  _, row = run(read_config("regression"), tmp_path)
  splits = regression.Task().load_data()
  (x, y), (x_eval, y_eval) = (
    (
      np.stack([[*e["measurements"], 1.0] for e in examples]),
      np.stack([e["target"] for e in examples]),
    )
    for examples in (splits.train, splits.eval)
  )
  weights = np.linalg.lstsq(x, y)[0]
  variance = np.square(y - x @ weights).mean()
  errors = np.square(y_eval - x_eval @ weights)
  nats = (np.log(2 * np.pi * variance) + errors / variance).mean() / 2
  assert nats == pytest.approx(1.249, abs=1e-3)
  assert row["eval_loss"] < nats - 0.03
  r2 = 1 - errors.mean() / y_eval.var()
  assert r2 == pytest.approx(0.463, abs=1e-3)
  assert row["eval_r2"] > r2 - 0.03


@pytest.mark.slow
def test_ppo_balances_the_pole(tmp_path):
  _, row = run(read_config("ppo"), tmp_path)
  assert row["eval_mean_return"] > 475


@pytest.mark.slow
def test_recsys_recommends_better_than_popularity(tmp_path):
  size = {"num_users": 10_000, "num_items": 5_000, "num_genres": 200}
  config = read_config("recsys", num_train_steps=300, eval_every_steps=1000)
  config.task.update(size)
  config.schedule.warmup_steps = 25
  _, row = run(config, tmp_path)
  baselines = recsys.Task(**size).baselines()
  popular, oracle = (
    baselines[name]["recall_at_100"] for name in ("popularity", "oracle")
  )
  assert popular < 0.7 * oracle
  assert row["eval_recall_at_100"] > (popular + oracle) / 2
  assert row["eval_recall_at_100"] < 1.05 * oracle


# An NNX model, and a checkpoint between two rollouts of PPO.
SMALL = {
  "ddpm": {"model": {"width": 16, "depth": 1, "dropout": 0.1}},
  "ppo": {
    "model": {"hidden": (8,)},
    "task": {"num_envs": 2, "rollout_length": 32, "epochs": 1},
  },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_an_example_resumes_to_the_same_bits_in_float16(name, tmp_path):
  fields = {
    "batch_size": 32,
    "num_train_steps": 4,
    "checkpoint_every_steps": 2,
    "log_every_steps": 2,
    "precision": "mixed_float16",
  }
  config = read_config(name, **fields, **SMALL[name])
  state, row = run(config, tmp_path / "whole")
  assert row["loss_scale"] > 1
  assert np.isfinite(row["train_loss"])

  def stop(step, state, metrics):
    if step == 2:
      raise InterruptedError

  with pytest.raises(RuntimeError, match="step 2"):
    run(config, tmp_path / "parts", hooks=[stop])
  resumed, _ = run(config, tmp_path / "parts")
  tree_equality.assert_trees_equal(
    jax.tree.leaves(state), jax.tree.leaves(resumed)
  )


def test_ppo_refuses_a_batch_size_that_does_not_divide_a_rollout():
  stream = types.SimpleNamespace(batch_size=5)
  with pytest.raises(ValueError, match=r"batch_size=5 .* = 4096"):
    next(ppo.Task().train_batches(stream))


@pytest.mark.slow
def test_carts_fall_over_without_a_policy():
  state = ppo.reset(jax.random.key(0), 16)
  ends = np.full(16, 0)
  for i in range(1, 101):
    # Always to the right.
    state, done = ppo.step(state, np.ones(16, int))
    ends = np.where((ends == 0) & np.asarray(done), i, ends)
  # As in Gymnasium's CartPole-v1: 8 to 11 steps.
  assert ends.min() >= 7
  assert ends.max() <= 12


def test_coverage_of_points():
  reference = np.array([[0.0], [1.0], [2.0], [10.0]])
  # The reach with k=1 is 1, 1, 1 and 8.
  assert ddpm.covered(np.array([[-1.0], [-1.5]]), reference, k=1) == 0.5
  assert ddpm.covered(reference, reference, k=1) == 1.0
  assert ddpm.covered(np.array([[30.0]]), reference, k=1) == 0.0


def test_r2_over_batches():
  target = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
  error = np.array([0.5, 0.5, -0.5, 9.0], np.float32)
  mask = np.array([True, True, True, False])
  total = clu_metrics.Collection.create(r2=regression.R2).empty()
  for rows in (slice(0, 2), slice(2, 4)):
    batch = {"target": target[rows], "error": error[rows], "mask": mask[rows]}
    total = total.merge(type(total).single_from_model_output(**batch))
  # The mean of 1, 2, 3 has squared errors of 2/3.
  expected = 1 - 0.25 / (2 / 3)
  assert total.compute()["r2"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_augmented_views_differ_and_keep_the_shape():
  images = jax.random.uniform(jax.random.key(0), (3, 8, 8, 1))
  views = [simclr.augment(jax.random.key(i), images) for i in (1, 1, 2)]
  assert views[0].shape == images.shape
  np.testing.assert_array_equal(views[0], views[1])
  assert np.abs(views[0] - views[2]).mean() > 0.05


def test_choices_have_the_probabilities_of_the_world():
  world = recsys.World(num_users=2, num_items=6, num_genres=3, seed=0)
  choices = world.choices(20_000)
  np.testing.assert_array_equal(choices, world.choices(20_000))
  assert choices.shape == (2, 20_000)
  counts = np.stack([np.bincount(x, minlength=6) for x in choices])
  wanted = np.exp(world.log_probabilities(np.arange(2)))
  np.testing.assert_allclose(wanted.sum(axis=1), 1, rtol=1e-5)
  # Four standard deviations of a count.
  np.testing.assert_allclose(counts / 20_000, wanted, atol=0.015)
  other = recsys.World(num_users=2, num_items=6, num_genres=3, seed=1)
  assert (choices != other.choices(20_000)).any()


def test_rank_of_the_held_out_choice():
  scores = np.array([[5.0, 4.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
  # Items 0 and 1 were chosen before; item 2 and then item 0 is held out.
  batch = {"choices": np.array([[0, 1, 2], [1, 1, 0]])}
  ranks = recsys.ranks_of(scores, batch)
  np.testing.assert_array_equal(ranks, [0, 2])
  assert recsys.recall(np.array([0, 9, 10, 99])) == {
    "recall_at_10": 0.5,
    "recall_at_100": 1.0,
  }
