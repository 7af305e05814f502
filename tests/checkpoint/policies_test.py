"""Policies that choose which checkpoints to keep."""

import json
import types

import checkpoint_states as states
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from flaxshard import checkpoint
from flaxshard import train
from flaxshard.checkpoint import keep


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def steps_on_disk(path):
  return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit())


def save_all(path, scores, **kwargs):
  """Saves a step for each score, all in one process."""
  with checkpoint.Checkpointer(
    path, best_metric="accuracy", **kwargs
  ) as checkpointer:
    for step, score in scores.items():
      metrics = {"accuracy": score}
      checkpointer.save(step, states.weights(step), metrics=metrics)


def preserved(metrics, **kwargs):
  """Returns the steps that a policy keeps, given the metrics of all steps."""
  infos = [
    types.SimpleNamespace(step=step, metrics=m) for step, m in metrics.items()
  ]
  kept = keep.Keep(**kwargs).should_preserve(infos, context=None)
  return [i.step for i, k in zip(infos, kept, strict=True) if k]


SCORES = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8, 5: 0.6}


def test_best_newest_and_multiples_are_kept():
  metrics = {step: {"a": score} for step, score in SCORES.items()}
  for kwargs, kept in (
    (dict(keep_best=2), [2, 4, 5]),
    (dict(best_mode="min"), [1, 5]),
    (dict(keep_every=3), [2, 3, 5]),
  ):
    assert preserved(metrics, max_to_keep=1, best_metric="a", **kwargs) == kept


def test_missing_metric_is_worse_than_any_number():
  for mode in ("max", "min"):
    kwargs = dict(max_to_keep=1, best_metric="a", best_mode=mode)
    for missing in (None, {}, {"a": None}):
      metrics = {1: {"a": 0.5}, 2: missing, 3: {"a": 0.5}, 4: missing}
      # Of equal ones, the later is kept.
      assert preserved({**metrics, 5: missing}, **kwargs) == [3, 5]


def test_metrics_are_read_after_a_restart(path):
  save_all(path, {1: float("nan"), 2: 0.9}, max_to_keep=1)
  save_all(path, {3: 0.7, 4: float("inf")}, max_to_keep=1)
  # The best, the newest finite and the newest one.
  assert steps_on_disk(path) == [2, 3, 4]
  for mode, best in (("max", 2), ("min", 3)):
    with checkpoint.Checkpointer(
      path, best_metric="accuracy", best_mode=mode
    ) as checkpointer:
      assert checkpointer.best_step() == best
      restored = checkpointer.restore(states.weights(), best)
    np.testing.assert_array_equal(restored.params["w"], np.full(3, best))


def test_nonfinite_metrics_delete_no_finite_ones():
  nan = float("nan")
  for best_metric in (None, "a"):
    kwargs = dict(max_to_keep=3, best_metric=best_metric)
    good = {step: {"a": 1.0, "b": step} for step in (1, 2, 3)}
    for value in (nan, float("inf"), None):
      bad = {step: {"a": value, "b": 1.0} for step in (4, 5, 6, 7)}
      assert preserved(good | bad, **kwargs) == [1, 2, 3, 5, 6, 7]
    # Without metrics, nobody knows whether a checkpoint is good.
    unknown = dict.fromkeys((4, 5, 6, 7))
    assert preserved(good | unknown, **kwargs) == [3, 5, 6, 7]
    unknown = {step: {} for step in (4, 5, 6)}
    assert preserved(good | unknown, **kwargs) == [3, 4, 5, 6]
    # Where no value has ever been finite, the newest are kept.
    never = {step: {"a": 1.0, "b": nan} for step in (1, 2, 3, 4)}
    assert preserved(never, **kwargs) == [2, 3, 4]


def test_nonfinite_metrics_are_null_on_disk(path):
  metrics = {
    "loss": jnp.float32(0.25),
    "nan": np.float64("nan"),
    "count": 3,
    "none": None,
  }
  # They are saved even though no metric ranks the checkpoints yet.
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(7, states.weights(), metrics=metrics)
    assert checkpointer.best_step() is None
  written = json.loads((path / "7" / "metrics" / "metrics").read_text())
  assert written == {"loss": 0.25, "nan": None, "count": 3, "none": None}
  with checkpoint.Checkpointer(path, best_metric="nan") as checkpointer:
    assert checkpointer.best_step() is None


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("metrics/metrics", "{"),
    ("metrics/metrics", "[1]"),
    ("_CHECKPOINT_METADATA", ""),
  ],
)
def test_step_with_damaged_metadata_is_passed_over(path, name, content):
  # Orbax's own manager cannot be created then, and does not name the file.
  save_all(path, {1: 0.5, 2: 0.9}, max_to_keep=2)
  (path / "2" / name).write_text(content)
  with checkpoint.Checkpointer(
    path, max_to_keep=2, best_metric="accuracy"
  ) as checkpointer:
    restored = checkpointer.restore(states.weights())
    np.testing.assert_array_equal(restored.params["w"], np.full(3, 1))
    assert checkpointer.restored_step == checkpointer.best_step() == 1
    with pytest.raises(ValueError, match=f"{path}/2/{name}"):
      checkpointer.restore(states.weights(), 2)
    checkpointer.save(2, states.weights(2), metrics={"accuracy": 0.7})
    assert checkpointer.best_step() == 2
  assert (path / "2.damaged" / name).read_text() == content


@pytest.mark.slow
def test_loop_keeps_the_best_and_saves_by_the_clock(tmp_path, monkeypatch):
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
  saved = []
  original = checkpoint.Checkpointer.save

  def save(self, step, state, data=None, metrics=None):
    saved.append((step, metrics.get("eval_loss")))
    return original(self, step, state, data, metrics)

  monkeypatch.setattr(checkpoint.Checkpointer, "save", save)
  train.train_and_evaluate(config, str(tmp_path))
  assert [step for step, _ in saved] == [1, 2, 3, 4, 5, 6]
  losses = {step: loss for step, loss in saved if loss is not None}
  assert set(losses) == {2, 4, 6}
  best = min(losses, key=losses.get)
  assert steps_on_disk(tmp_path / "checkpoints") == sorted({best, 4, 5, 6})
