"""Early stopping: the rule, and runs that it or a hook ends."""

import json
import logging
import os
import shutil

import jax
import numpy as np
import pytest
import tiny

from flaxshard import train
from flaxshard.train import config as config_lib
from flaxshard.train import early_stopping
from flaxshard.train import hooks as hooks_lib
from flaxshard.train import resume

_THIS = "early_stopping_test_factories"


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Draws no plots."""
  with tiny.importable(_THIS, __name__):
    yield


def make_config(**fields):
  """Returns a config that ends at step 6, the third evaluation of six.

  No loss improves by 100, so only the first evaluation improves.
  """
  rule = {"metric": "eval_loss", "patience": 1, "min_delta": 100.0}
  values = dict(
    num_train_steps=12,
    log_every_steps=3,
    eval_every_steps=2,
    checkpoint_every_steps=4,
    early_stopping=rule,
  )
  return tiny.config(**{**values, **fields})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """A run that ended early: its workdir, final state and calls of a hook."""
  workdir = str(tmp_path_factory.mktemp("stopped"))
  calls = []
  hook = lambda step, state, metrics: calls.append(
    (step, int(state.step), metrics)
  )
  state = train.train_and_evaluate(make_config(), workdir, hooks=[hook])
  return workdir, state, calls


def replay(rule, values):
  return create(rule).replay(enumerate(values, start=1))


def create(rule):
  config = config_lib.check(tiny.config(early_stopping=rule))
  return early_stopping.create(config.early_stopping)


@pytest.mark.parametrize(
  ("rule", "values", "stopped_step", "best_step"),
  [
    ({"patience": 0}, [3.0, 2.0, 2.0], 3, 2),
    ({"patience": 1}, [3.0, 2.0, 2.0, 1.0, 1.5, 2.0], 6, 4),
    ({"patience": 1}, [3.0, 2.0, 2.0, 1.0, 1.5], None, 4),
    ({"patience": 0, "min_delta": 0.5}, [3.0, 2.6], 2, 1),
    ({"patience": 0, "metric": "eval_accuracy"}, [1.0, 2.0, 2.0], 3, 2),
    ({"patience": 0, "mode": "max"}, [1.0, 2.0, 1.5], 3, 2),
    # None stands for a value that is not finite.
    ({"patience": 0}, [None, None, 3.0, None], 4, 3),
    ({"patience": 0}, [2.0, 3.0, 1.0], 2, 3),
  ],
)
def test_the_run_ends_after_patience_evaluations_without_improvement(
  rule, values, stopped_step, best_step
):
  state = replay({"metric": "eval_loss", **rule}, values)
  assert state.stopped_step == stopped_step
  assert state.best_step == best_step


@pytest.mark.parametrize(
  ("rule", "facts"),
  [
    (3, ("config.early_stopping", "metric", "3")),
    ({"metrics": "eval_loss"}, ("metrics", "Did you mean 'metric'?")),
    ({"patience": 1}, ("early_stopping.patience=1", "early_stopping.metric")),
    ({"metric": "train_loss"}, ("'train_loss'", "evaluation")),
    ({"metric": "eval_bleu"}, ("config.early_stopping.mode", "'max'")),
    ({"metric": "eval_loss", "mode": "least"}, ("mode", "'least'")),
    ({"metric": "eval_loss", "patience": -1}, ("patience", "-1")),
    ({"metric": "eval_loss", "min_delta": -0.1}, ("min_delta", "-0.1")),
  ],
)
def test_an_invalid_rule_raises(rule, facts):
  with pytest.raises(ValueError) as e:
    config_lib.check(make_config(early_stopping=rule))
  for fact in facts:
    assert fact in str(e.value), str(e.value)


def test_an_unknown_metric_raises_at_the_first_evaluation():
  state = create({"metric": "eval_los", "mode": "min"})
  with pytest.raises(ValueError, match=r"'eval_los'.*eval_accuracy.*Did you"):
    state.update(1, {"eval_accuracy": 1, "eval_loss": 2})


def test_a_run_that_ends_early_has_its_last_row_and_checkpoint(stopped):
  workdir, state, calls = stopped
  assert int(state.step) == 6
  rows = tiny.rows(workdir)
  assert [row["step"] for row in rows] == [2, 3, 4, 6]
  assert {"train_loss", "eval_loss", "learning_rate"} < set(rows[-1])
  steps = sorted(os.listdir(os.path.join(workdir, "checkpoints")))
  assert steps == ["4", "6"]
  # A hook is called after each row, with its numbers.
  assert [call[:2] for call in calls] == [(2, 2), (3, 3), (4, 4), (6, 6)]
  for row, (step, _, metrics) in zip(rows, calls, strict=True):
    given = {k: v for k, v in row.items() if v is not None and k != "step"}
    assert metrics == given
    assert all(type(value) is float for value in metrics.values())
    assert step == row["step"]


def test_a_run_that_a_hook_interrupted_ends_at_the_same_step(stopped, tmp_path):
  whole_workdir, whole, _ = stopped
  workdir = str(tmp_path)

  def fail(step, state, metrics):
    if step == 4:
      raise KeyError("a mistake of the user")

  with pytest.raises(hooks_lib.HookError) as e:
    train.train_and_evaluate(make_config(), workdir, hooks=[fail])
  for fact in ("fail", "step 4", "a mistake of the user"):
    assert fact in str(e.value), str(e.value)
  # Its step is written and saved.
  assert [row["step"] for row in tiny.rows(workdir)] == [2, 3, 4]
  assert os.listdir(os.path.join(workdir, "checkpoints")) == ["4"]

  state = train.train_and_evaluate(make_config(), workdir)
  jax.tree.map(np.testing.assert_array_equal, state.params, whole.params)
  last, whole_last = tiny.rows(workdir)[-1], tiny.rows(whole_workdir)[-1]
  assert last["step"] == 6
  assert last["eval_loss"] == whole_last["eval_loss"]


def test_a_run_that_ended_early_counts_as_finished(stopped, tmp_path, caplog):
  workdir, state, _ = stopped
  copy = str(tmp_path / "copy")
  shutil.copytree(workdir, copy)
  again = train.train_and_evaluate(make_config(), copy)
  jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
  for fact in ("nothing to train", "step 6", "eval_loss"):
    assert fact in caplog.text

  for fields, facts in (
    ({"learning_rate": 0.5}, ("config.learning_rate", "step 6", "patience")),
    ({"num_train_steps": 14, "resume": "extend"}, ("14", "metric='none'")),
    ({"early_stopping": {}}, ("config.resume='extend'", "step 6")),
  ):
    config = config_lib.check(make_config(**fields))
    changes = resume.check_data(config, copy, None)
    with pytest.raises(ValueError) as e:
      resume.check_changes(config, copy, changes, 6)
    for fact in (copy, *facts):
      assert fact in str(e.value), str(e.value)

  caplog.set_level(logging.INFO, "flaxshard")
  rule = {"metric": "eval_loss", "patience": 2, "min_delta": 100.0}
  config = make_config(early_stopping=rule, resume="extend")
  assert int(train.train_and_evaluate(config, copy).step) == 8
  assert "stopped early at step 8" in caplog.text
  with open(os.path.join(copy, "config.json")) as f:
    assert json.load(f)["early_stopping"]["patience"] == 2


def test_a_run_that_is_too_short_to_end_early_warns(caplog):
  config = config_lib.check(make_config(num_train_steps=5))
  early_stopping.warn_if_too_short(config)
  for fact in ("patience=1", "step 6", "num_train_steps=5"):
    assert fact in caplog.text
