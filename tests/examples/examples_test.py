"""The example configs reach the results that their docstrings state."""

import jax
import numpy as np
import pytest
import tiny
from tree_equality import assert_trees_equal

from flaxshard import train
from flaxshard.examples import recsys
from flaxshard.train.config import files

pytestmark = pytest.mark.slow


def run(workdir, name, hooks=(), **changes):
  """Returns the state and the last values of a run of a config."""
  config = files.read(name)
  # One device: eight virtual ones take several times as long.
  config.update({"writer": "none", "mesh": {"replica": 1}, **changes})
  state = train.train_and_evaluate(config, str(workdir), hooks=hooks)
  last = {k: v for row in tiny.rows(workdir) for k, v in row.items()}
  return state, last


@pytest.mark.parametrize(
  ("name", "steps", "least"),
  [
    # As it was initialized, the encoder has less than 0.8.
    ("simclr", 80, {"eval_knn_accuracy": 0.93}),
    # A normal distribution with the covariance of the images has 0.46.
    ("ddpm", 300, {"eval_precision": 0.6, "eval_recall": 0.35}),
    ("ppo", None, {"eval_mean_return": 475}),
  ],
)
def test_an_example_reaches_its_results(name, steps, least, tmp_path):
  short = {"num_train_steps": steps, "eval_every_steps": 1000} if steps else {}
  _, row = run(tmp_path, name, **short)
  for metric, value in least.items():
    assert row[metric] > value


def test_vae_is_far_better_than_independent_pixels(tmp_path):
  _, row = run(tmp_path, "vae")
  # Those would cost 25.3 nats.
  assert row["eval_loss"] == pytest.approx(18.8, abs=0.6)
  assert row["eval_nll"] < row["eval_loss"]
  total = row["eval_reconstruction"] + row["eval_kl"]
  assert row["eval_loss"] == pytest.approx(total, rel=1e-5)


def test_regression_is_more_likely_than_least_squares(tmp_path):
  _, row = run(tmp_path, "regression")

  # A normal distribution around the line of least squares has 1.249 nats, and
  # the line a coefficient of determination of 0.463.
  assert row["eval_loss"] < 1.249 - 0.03
  assert row["eval_r2"] > 0.463 - 0.03


def test_recsys_recommends_better_than_popularity(tmp_path):
  size = {"num_users": 10_000, "num_items": 5_000, "num_genres": 200}
  _, row = run(
    tmp_path,
    "recsys",
    num_train_steps=150,
    eval_every_steps=1000,
    task=size,
    schedule={"warmup_steps": 25},
  )
  baselines = recsys.Task(**size).baselines()
  popular, oracle = (
    baselines[name]["recall_at_100"] for name in ("popularity", "oracle")
  )
  assert popular < 0.7 * oracle
  assert (popular + oracle) / 2 < row["eval_recall_at_100"] < 1.05 * oracle


# An NNX model, and a checkpoint between two rollouts of PPO.
SMALL = {
  "ddpm": {"model": {"width": 16, "depth": 1, "dropout": 0.1}},
  "ppo": {
    "model": {"hidden": (8,)},
    "task": {"num_envs": 2, "rollout_length": 32, "epochs": 1},
  },
}


@pytest.mark.parametrize("name", SMALL)
def test_an_example_resumes_to_the_same_bits_in_float16(name, tmp_path):
  fields = {
    "batch_size": 32,
    "num_train_steps": 4,
    "checkpoint_every_steps": 2,
    "log_every_steps": 2,
    "precision": "mixed_float16",
    **SMALL[name],
  }
  state, row = run(tmp_path / "whole", name, **fields)
  assert row["loss_scale"] > 1
  assert np.isfinite(row["train_loss"])

  def stop(step, state, metrics):
    if step == 2:
      raise InterruptedError

  with pytest.raises(RuntimeError, match="step 2"):
    run(tmp_path / "parts", name, [stop], **fields)
  resumed, _ = run(tmp_path / "parts", name, **fields)
  assert_trees_equal(*map(jax.tree.leaves, (state, resumed)))
