"""A workdir of another config, or of other data."""

import pathlib
import types

import pytest
import tiny

from flaxshard.train import config as config_lib
from flaxshard.train import same_run


def make_config(**fields):
  return tiny.config(**{"num_train_steps": 4, **fields})


@pytest.fixture
def workdir(tmp_path):
  """A workdir of 128 examples and four steps."""
  config = config_lib.check(make_config())
  (tmp_path / "config.json").write_text(config.to_json())
  (tmp_path / "data.json").write_text('{"num_train_examples": 128}')
  return str(tmp_path)


def check(workdir, latest_step, num_examples=128, **fields):
  setup = types.SimpleNamespace(
    config=config_lib.check(make_config(**fields)),
    num_train_examples=num_examples,
  )
  same_run.check_earlier_run(setup, workdir, latest_step)


@pytest.mark.parametrize(
  ("arguments", "facts"),
  [
    (
      {"learning_rate": 0.5},
      (
        "config.learning_rate: 0.01 -> 0.5",
        "config.num_train_steps above 4",
        "config.resume='extend'",
      ),
    ),
    (
      {"num_train_steps": 2, "resume": "extend"},
      ("config.num_train_steps: 4 -> 2", "above 4"),
    ),
    ({"num_train_steps": 6}, ("config.num_train_steps: 4 -> 6", "=extend")),
    # Another number of examples under the same config.
    ({"num_examples": 96}, ("the number of training examples=96", "128")),
    ({"seed": 1}, ("config.seed=1", "with 0")),
  ],
)
def test_a_finished_workdir_with_a_change_raises(workdir, arguments, facts):
  with pytest.raises(ValueError) as e:
    check(workdir, 4, **arguments)
  for fact in (workdir, "another workdir", *facts):
    assert fact in str(e.value), str(e.value)


def test_a_run_continues_without_the_files_that_are_compared(workdir, caplog):
  pathlib.Path(workdir, "data.json").unlink()
  check(workdir, 2, num_examples=96)
  assert not caplog.records
  pathlib.Path(workdir, "config.json").unlink()
  check(workdir, 2, seed=1)
  assert "config.json is missing" in caplog.text


def test_a_config_changed_before_the_end_warns_with_old_and_new(
  workdir, caplog
):
  check(workdir, 4, writer="tensorboard", max_to_keep=2)
  assert not caplog.records
  check(workdir, 2, learning_rate=0.5, num_train_steps=6, writer="none")
  (message,) = caplog.messages
  for fact in (
    "step 2",
    "config.learning_rate: 0.01 -> 0.5",
    "config.num_train_steps: 4 -> 6",
  ):
    assert fact in message
  assert "writer" not in message
