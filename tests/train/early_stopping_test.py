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
    mesh={"replica": 1},
  )
  return tiny.config(**{**values, **fields})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
  """A run that a hook has interrupted, and that then ended early.

  Returns its workdir and final state, and the calls and the error of the hook.
  """
  workdir = tmp_path_factory.mktemp("stopped")
  calls = []

  def hook(step, state, metrics):
    calls.append((step, int(state.step), metrics))
    if step == 4:
      raise KeyError("a mistake of the user")

  with pytest.raises(hooks_lib.HookError) as e:
    train.train_and_evaluate(make_config(), str(workdir), hooks=[hook])
  # The checkpoint of that step is there.
  assert os.listdir(workdir / "checkpoints") == ["4"]
  state = train.train_and_evaluate(make_config(), str(workdir), hooks=[hook])
  return workdir, state, calls, str(e.value)


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
  rule = {"metric": "eval_loss", **rule}
  config = config_lib.check(tiny.config(early_stopping=rule))
  stopping = early_stopping.EarlyStopping(config.early_stopping)
  for step, value in enumerate(values, start=1):
    stopping.update(step, {rule["metric"]: value})
  assert stopping.stopped_step == stopped_step
  assert stopping.best_step == best_step


def test_a_run_that_ends_early_has_its_last_row_and_checkpoint(stopped):
  """It counts the evaluations from before the interruption."""
  workdir, state, _, _ = stopped
  assert int(state.step) == 6
  rows = tiny.rows(workdir)
  assert [row["step"] for row in rows] == [2, 3, 4, 6]
  assert {"train_loss", "eval_loss", "learning_rate"} < set(rows[-1])
  assert set(os.listdir(workdir / "checkpoints")) == {"4", "6"}


def test_a_hook_gets_each_row_and_its_error_names_it(stopped):
  workdir, _, calls, error = stopped
  # A run that continues does not call it again for the restored step.
  assert [call[:2] for call in calls] == [(2, 2), (3, 3), (4, 4), (6, 6)]
  for row, (_, _, metrics) in zip(tiny.rows(workdir), calls, strict=True):
    given = {k: v for k, v in row.items() if v is not None and k != "step"}
    assert metrics == given
    assert all(type(value) is float for value in metrics.values())
  for fact in ("stopped.<locals>.hook", "step 4", "a mistake of the user"):
    assert fact in error


@pytest.mark.slow
def test_a_run_that_ended_early_counts_as_finished(stopped, tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  workdir, state, _, _ = stopped
  copy = str(tmp_path / "copy")
  shutil.copytree(workdir, copy)
  again = train.train_and_evaluate(make_config(), copy)
  jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
  for fact in ("nothing to train", "step 6", "eval_loss"):
    assert fact in caplog.text

  rule = {"metric": "eval_loss", "patience": 2, "min_delta": 100.0}
  config = make_config(early_stopping=rule, resume="extend")
  assert int(train.train_and_evaluate(config, copy).step) == 8
  assert "stopped early at step 8" in caplog.text
  with open(os.path.join(copy, "config.json")) as f:
    assert json.load(f)["early_stopping"]["patience"] == 2
