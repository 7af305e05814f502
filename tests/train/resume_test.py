"""A workdir of another config, or of other data."""

import logging

import jax
import pytest
import tiny

from flaxshard import data
from flaxshard import train
from flaxshard.train import config as config_lib
from flaxshard.train import resume

_THIS = "resume_test_factories"
_SHAPES = data.Shapes({"inputs": jax.ShapeDtypeStruct((8, 8, 1), "float32")})


@pytest.fixture(scope="module", autouse=True)
def importable():
  """Lets configs name the data of this file; draws no plots."""
  with tiny.importable(_THIS, __name__):
    yield


def digits() -> data.Splits:
  """Returns `NUM_EXAMPLES` digits."""
  splits = data.digits()
  train_examples = data.Arrays(
    splits.train.inputs[:NUM_EXAMPLES], splits.train.labels[:NUM_EXAMPLES]
  )
  return data.Splits(train_examples, splits.eval, 10)


NUM_EXAMPLES = 128


def make_config(**fields):
  fields = {"num_train_steps": 4, "log_every_steps": 4, **fields}
  return tiny.config(data={"name": f"{_THIS}:digits"}, **fields)


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    (
      {"learning_rate": 0.5},
      ("config.learning_rate: 0.01 -> 0.5", "config.num_train_steps above 4"),
    ),
    (
      {"num_train_steps": 2, "resume": "extend"},
      ("config.num_train_steps: 4 -> 2", "above 4"),
    ),
  ],
)
def test_a_finished_workdir_with_a_changed_config_raises(
  tmp_path, fields, facts
):
  workdir = str(tmp_path)
  resume.write(config_lib.check(make_config()), workdir, 128, _SHAPES)
  config = config_lib.check(make_config(**fields))
  changes = resume.check_data(config, workdir, 128)
  with pytest.raises(ValueError) as e:
    resume.check_changes(config, workdir, changes, 4)
  for fact in (workdir, "another workdir", "config.resume='extend'", *facts):
    assert fact in str(e.value), str(e.value)


@pytest.mark.slow
def test_a_finished_workdir_trains_again_only_to_extend_it(
  tmp_path, caplog, monkeypatch
):
  workdir = str(tmp_path)
  train.train_and_evaluate(make_config(), workdir)
  config = make_config(num_train_steps=6)

  def fail(lowered):
    raise AssertionError("compiled")

  with monkeypatch.context() as patch:
    patch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(ValueError, match="num_train_steps: 4 -> 6"):
      train.train_and_evaluate(config, workdir)
    # Other rows, files and checkpoints would not change the state.
    same = make_config(log_every_steps=1, max_to_keep=2, on_nonfinite="stop")
    caplog.clear()
    assert int(train.train_and_evaluate(same, workdir).step) == 4
  (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
  assert record.getMessage().startswith("nothing to train: step 4")

  config.resume = "extend"
  assert int(train.train_and_evaluate(config, workdir).step) == 6
  assert "config.num_train_steps: 4 -> 6" in caplog.text


def test_another_number_of_examples_under_the_same_config_raises(tmp_path):
  config = config_lib.check(make_config())
  resume.write(config, str(tmp_path), 128, _SHAPES)
  assert resume.check_data(config, str(tmp_path), 128)[:2] == ((), 4)
  with pytest.raises(ValueError) as e:
    resume.check_data(config, str(tmp_path), 96)
  for fact in ("config.data=", "96 training", "128", str(tmp_path)):
    assert fact in str(e.value), str(e.value)


def test_a_config_changed_before_the_end_warns_with_old_and_new(
  tmp_path, caplog
):
  resume.write(config_lib.check(make_config()), str(tmp_path), 128, _SHAPES)
  fields = {"learning_rate": 0.5, "num_train_steps": 6, "writer": "none"}
  config = config_lib.check(make_config(**fields))
  changes = resume.check_data(config, str(tmp_path), 128)
  assert not caplog.records
  resume.check_changes(config, str(tmp_path), changes, 2)
  (record,) = caplog.records
  assert record.levelno == logging.WARNING
  for fact in (
    "step 2",
    "config.learning_rate: 0.01 -> 0.5",
    "config.num_train_steps: 4 -> 6",
  ):
    assert fact in record.getMessage()
  assert "writer" not in record.getMessage()
