"""Policies that choose which checkpoints to keep."""

import json
import types

import checkpoint_states as states
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import flaxshard as fs
from flaxshard.checkpoint import keep

NAN = float("nan")


def steps_on_disk(path):
  return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit())


def save_all(path, scores, **kwargs):
  """Saves a step for each score, all in one process."""
  with fs.Checkpointer(path, best_metric="a", **kwargs) as checkpointer:
    for step, score in scores.items():
      checkpointer.save(step, states.weights(step), metrics={"a": score})


def metrics_of(*scores):
  return [{"a": score, "b": 1.0} for score in scores]


GOOD = metrics_of(1.0, 2.0, 3.0)


@pytest.mark.parametrize(
  ("metrics", "kwargs", "kept"),
  [
    (metrics_of(5, 9, 7, 8, 6), dict(keep_best=2), [2, 4, 5]),
    (metrics_of(5, 9, 7, 8, 6), dict(best_mode="min"), [1, 5]),
    (metrics_of(5, 9, 7, 8, 6), dict(keep_every=3), [2, 3, 5]),
    # A missing value is worse than any; of equal ones, the later is kept.
    ([*metrics_of(5, None, 5), None, {}], {}, [3, 5]),
    ([*metrics_of(5, None, 5), None, {}], dict(best_mode="min"), [3, 5]),
    # A non-finite metric replaces no good ones; no metric at all does.
    (GOOD + metrics_of(NAN, NAN, NAN), dict(max_to_keep=2), [2, 3, 5, 6]),
    (GOOD + metrics_of(np.inf, NAN), dict(best_metric=None), [3, 5]),
    ([*GOOD, {}, None], dict(best_metric=None), [3, 5]),
    # Where no value has ever been finite, the newest are kept.
    (metrics_of(NAN, NAN, NAN), dict(max_to_keep=2), [2, 3]),
  ],
)
def test_best_newest_and_multiples_are_kept(metrics, kwargs, kept):
  infos = [
    types.SimpleNamespace(step=i, metrics=m) for i, m in enumerate(metrics, 1)
  ]
  policy = keep.Keep(**{"max_to_keep": 1, "best_metric": "a", **kwargs})
  preserved = policy.should_preserve(infos, context=None)
  assert [i for i, is_kept in enumerate(preserved, 1) if is_kept] == kept


def test_metrics_are_read_after_a_restart(tmp_path):
  save_all(tmp_path, {1: NAN, 2: 0.9}, max_to_keep=1)
  save_all(tmp_path, {3: 0.7, 4: float("inf")}, max_to_keep=1)
  # The best, the newest finite and the newest one.
  assert steps_on_disk(tmp_path) == [2, 3, 4]
  for mode, best in (("max", 2), ("min", 3)):
    with fs.Checkpointer(tmp_path, best_metric="a", best_mode=mode) as reader:
      assert reader.best_step() == best


def test_nonfinite_metrics_are_null_on_disk(tmp_path):
  metrics = {"loss": jnp.float32(0.25), "nan": NAN, "count": 3, "none": None}
  # They are saved even though no metric ranks the checkpoints yet.
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(7, states.weights(), metrics=metrics)
    assert checkpointer.best_step() is None
  written = json.loads((tmp_path / "7" / "metrics" / "metrics").read_text())
  assert written == {"loss": 0.25, "nan": None, "count": 3, "none": None}
  with fs.Checkpointer(tmp_path, best_metric="nan") as checkpointer:
    assert checkpointer.best_step() is None


@pytest.mark.slow
def test_loop_keeps_the_best_and_saves_by_the_clock(tmp_path):
  # Every logged step is due by the clock.
  config = tiny.config(
    model={"name": "normed:Normed"},
    mesh={"replica": 1},
    num_train_steps=6,
    log_every_steps=1,
    eval_every_steps=2,
    checkpoint_every_steps=2,
    checkpoint_every_minutes=1e-9,
    best_metric="eval_loss",
    keep_every_steps=4,
    max_to_keep=2,
  )
  fs.train.train_and_evaluate(config, str(tmp_path))
  rows = tiny.rows(tmp_path)
  losses = {r["step"]: r["eval_loss"] for r in rows if "eval_loss" in r}
  assert sorted(losses) == [2, 4, 6]
  best = min(losses, key=losses.get)
  assert steps_on_disk(tmp_path / "checkpoints") == sorted({best, 4, 5, 6})
