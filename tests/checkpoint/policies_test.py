"""Which checkpoints are kept."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import flaxshard as fs
from flaxshard import checkpoint
from flaxshard import train
from flaxshard.checkpoint import policies


def create(value=1.0):
  return fs.TrainState.create(
    apply_fn=None, params={"w": jnp.full(3, float(value))}, tx=optax.sgd(0.1)
  )


@pytest.fixture
def path(tmp_path):
  return tmp_path / "checkpoints"


def steps_on_disk(path):
  return sorted(int(p.name) for p in path.iterdir() if p.name.isdigit())


def save_all(path, scores, name="accuracy", **kwargs):
  """Saves a step for each score, all in one process."""
  with checkpoint.Checkpointer(path, **kwargs) as checkpointer:
    for step, score in scores.items():
      metrics = None if score == "none given" else {name: score}
      checkpointer.save(step, create(step), metrics=metrics)


SCORES = {1: 0.5, 2: 0.9, 3: 0.7, 4: 0.8, 5: 0.6}


@pytest.mark.parametrize(
  "kwargs, kept",
  [
    (dict(max_to_keep=1), [2, 5]),
    (dict(max_to_keep=2), [2, 4, 5]),
    (dict(max_to_keep=1, keep_best=2), [2, 4, 5]),
    (dict(max_to_keep=1, best_mode="min"), [1, 5]),
    (dict(max_to_keep=1, keep_every=3), [2, 3, 5]),
    (dict(max_to_keep=None), [1, 2, 3, 4, 5]),
  ],
)
def test_the_best_are_kept_and_the_newest(path, kwargs, kept):
  save_all(path, SCORES, best_metric="accuracy", **kwargs)
  assert steps_on_disk(path) == kept
  with checkpoint.Checkpointer(path, best_metric="accuracy") as checkpointer:
    assert checkpointer.best_step() == max(kept, key=SCORES.get)
    restored = checkpointer.restore(create(), checkpointer.best_step())
  best = max(kept, key=SCORES.get)
  np.testing.assert_array_equal(restored.params["w"], np.full(3, best))


def test_keep_every_without_a_metric(path):
  save_all(path, SCORES, max_to_keep=1, keep_every=2)
  assert steps_on_disk(path) == [2, 4, 5]


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize(
  "bad", [float("nan"), float("inf"), -float("inf"), None, "none given"]
)
def test_what_is_no_number_deletes_no_best_one(path, mode, bad):
  scores = {1: 0.5, 2: bad, 3: 0.5, 4: bad, 5: bad}
  kwargs = dict(max_to_keep=1, best_metric="accuracy", best_mode=mode)
  save_all(path, scores, **kwargs)
  # Of equal ones, the later.
  assert steps_on_disk(path) == [3, 5]
  with checkpoint.Checkpointer(path, **kwargs) as checkpointer:
    assert checkpointer.best_step() == 3


def test_the_newest_is_kept_where_it_is_the_worst(path):
  save_all(path, {1: 9, 2: 8, 3: 1}, max_to_keep=1, best_metric="accuracy")
  assert steps_on_disk(path) == [1, 3]


def test_metrics_are_known_after_a_restart(path):
  for step, score in SCORES.items():
    save_all(path, {step: score}, max_to_keep=1, best_metric="accuracy")
  assert steps_on_disk(path) == [2, 5]


def test_metrics_on_disk(path):
  metrics = {
    "loss": jnp.float32(0.25),
    "nan": np.float64("nan"),
    "count": 3,
    "none": None,
  }
  with checkpoint.Checkpointer(path) as checkpointer:
    # They are saved though nothing is chosen by them yet.
    checkpointer.save(7, create(), metrics=metrics)
    checkpointer.wait()
    assert checkpointer.best_step() is None
  written = json.loads((path / "7" / "metrics" / "metrics").read_text())
  assert written == {"loss": 0.25, "nan": None, "count": 3, "none": None}
  with checkpoint.Checkpointer(path, best_metric="nan") as checkpointer:
    assert checkpointer.best_step() is None


@pytest.mark.parametrize("broken", [b"", b"{\xff", b"[1]"])
def test_damaged_metrics(path, broken):
  """Orbax's manager cannot be made of them; the step before is restored."""
  kwargs = dict(max_to_keep=2, best_metric="accuracy")
  save_all(path, {1: 0.5, 2: 0.9}, **kwargs)
  file = path / "2" / "metrics" / "metrics"
  file.write_bytes(broken)
  with checkpoint.Checkpointer(path, **kwargs) as checkpointer:
    assert list(checkpointer.all_steps()) == [1]
    assert checkpointer.best_step() == 1
    np.testing.assert_array_equal(
      checkpointer.restore(create()).params["w"], np.full(3, 1)
    )
    with pytest.raises(ValueError, match=f"{file} has"):
      checkpointer.restore(create(), 2)
    checkpointer.save(2, create(2), metrics={"accuracy": 0.7})
    assert checkpointer.best_step() == 2
  assert (path / "2.damaged" / "metrics" / "metrics").read_bytes() == broken


@pytest.mark.parametrize("bad", ["high", [1.0], np.ones(2), 1j])
def test_a_metric_that_is_no_number(path, bad):
  with checkpoint.Checkpointer(path) as checkpointer:
    with pytest.raises(TypeError, match=r"^metrics\['a'\] must be a number"):
      checkpointer.save(1, create(), metrics={"a": bad})
    with pytest.raises(TypeError, match=r"^metrics must be a dict of numbers"):
      checkpointer.save(1, create(), metrics=[0.5])
  assert steps_on_disk(path) == []


@pytest.mark.parametrize(
  "kwargs, message",
  [
    (dict(max_to_keep=0), "max_to_keep must be at least 1, or None, got 0"),
    (dict(keep_every=0), "keep_every must be at least 1, or None, got 0"),
    (dict(keep_every=2.0), "keep_every must be at least 1, or None, got 2.0"),
    (dict(keep_every=2), "keep_every=2 says .* max_to_keep=None keeps all"),
    (
      dict(best_metric="a", keep_best=0),
      "keep_best must be at least 1, got 0",
    ),
    (dict(best_mode="min"), "best_mode='min' need best_metric"),
    (dict(keep_best=2), "keep_best=2 .* need best_metric"),
    (
      dict(best_metric="a", best_mode="most"),
      "best_mode must be 'max' or 'min', got 'most'",
    ),
    (dict(best_metric=""), "best_metric must be the name .*, got ''"),
  ],
)
def test_bad_arguments(path, kwargs, message):
  with pytest.raises(ValueError, match=message):
    checkpoint.Checkpointer(path, **kwargs)
  assert not path.exists()


def test_ranks():
  order = [None, {}, {"a": float("nan")}, {"a": 1}, {"a": 2.5}]
  ranks = [policies.rank(metrics, "a", "max") for metrics in order]
  assert ranks == [-np.inf, -np.inf, -np.inf, 1.0, 2.5]
  assert policies.rank({"a": 2.5}, "a", "min") == -2.5


def test_the_loop_keeps_the_best_and_saves_by_the_clock(tmp_path, monkeypatch):
  """The clock asks for every step that is logged."""
  config = tiny.config(
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
