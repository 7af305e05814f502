"""The training loop, end to end on tiny runs."""

import json
import logging
import os
import pathlib
import shutil
import signal
import sys

from flax import nnx
import jax
import numpy as np
import pytest
import tiny

from flaxshard import data
from flaxshard import train
from flaxshard.train import metrics as metrics_lib


def _assert_same(a, b) -> None:
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)
  assert jax.tree.structure(a) == jax.tree.structure(b)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """A run of eight steps, for others to be compared with."""
  workdir = str(tmp_path_factory.mktemp("undisturbed"))
  config = tiny.config(writer="tensorboard")
  return workdir, train.train_and_evaluate(config, workdir)


def test_workdir_after_a_run(undisturbed) -> None:
  workdir, state = undisturbed
  rows = tiny.rows(workdir)
  assert [r["step"] for r in rows] == [2, 4, 6, 8]
  assert set(rows[0]) == {
    "step",
    "train_loss",
    "train_accuracy",
    "learning_rate",
    "loss_scale",
    "skipped_steps",
    "steps_per_second",
  }
  assert {"eval_loss", "eval_accuracy"} < set(rows[1])
  assert rows[-1]["loss_scale"] == 2.0**15
  assert rows[-1]["learning_rate"] == pytest.approx(1e-2)
  assert 0 < rows[-1]["train_loss"] < rows[0]["train_loss"] < 3
  assert int(state.step) == 8
  names = set(os.listdir(workdir))
  assert {"checkpoints", "config.json", "training.png"} < names
  assert any(name.startswith("events.out") for name in names)
  assert sorted(os.listdir(os.path.join(workdir, "checkpoints"))) == ["4", "8"]
  with open(os.path.join(workdir, "config.json")) as f:
    assert json.load(f)["model"]["name"] == "cnn"


def test_a_finished_run_is_not_trained_again(undisturbed, caplog) -> None:
  workdir, state = undisturbed
  before = tiny.rows(workdir)
  with caplog.at_level(logging.INFO, "flaxshard"):
    again = train.train_and_evaluate(tiny.config(), workdir)
  _assert_same(again.params, state.params)
  assert tiny.rows(workdir) == before
  assert "nothing to train" in caplog.text


def test_interrupted_and_resumed_is_bit_for_bit_the_same(
  undisturbed, tmp_path, monkeypatch, caplog
) -> None:
  reference, state = undisturbed
  workdir = str(tmp_path)
  caplog.set_level(logging.INFO, "flaxshard")
  with monkeypatch.context() as patch:
    tiny.stop_at(patch, 5, signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
      train.train_and_evaluate(tiny.config(), workdir)
  assert stopped.value.code == 128 + signal.SIGTERM
  assert "SIGTERM: saved step 5" in caplog.text
  assert "the same command goes on from there" in caplog.text

  resumed = train.train_and_evaluate(tiny.config(), workdir)
  assert "resuming from step 5" in caplog.text
  _assert_same(resumed.params, state.params)
  _assert_same(resumed.opt_state, state.opt_state)
  _assert_same(resumed.wrapper_states, state.wrapper_states)
  assert [r["step"] for r in tiny.rows(workdir)] == [2, 4, 5, 6, 8]
  assert tiny.untimed_rows(workdir)[-1] == tiny.untimed_rows(reference)[-1]


def test_killed_between_checkpoints_trains_nothing_twice(
  undisturbed, tmp_path, monkeypatch
) -> None:
  """Rows after the last checkpoint are written anew, the data continues."""
  reference, state = undisturbed
  workdir = str(tmp_path)
  original = metrics_lib.MetricsFile.write

  def write(self, step, values):
    original(self, step, values)
    if step == 6:
      raise KeyboardInterrupt  # the row is there, the checkpoint is of step 4

  with monkeypatch.context() as patch:
    patch.setattr(metrics_lib.MetricsFile, "write", write)
    with pytest.raises(KeyboardInterrupt):
      train.train_and_evaluate(tiny.config(), workdir)
  assert [r["step"] for r in tiny.rows(workdir)] == [2, 4, 6]
  resumed = train.train_and_evaluate(tiny.config(), workdir)
  _assert_same(resumed.params, state.params)
  assert tiny.untimed_rows(workdir) == tiny.untimed_rows(reference)


def test_skipped_steps_are_counted_and_not_averaged(tmp_path) -> None:
  """A scale that overflows float16 at once: steps are skipped, then go on."""
  rule = {"type": "dynamic", "initial_scale": 2.0**30}
  config = tiny.config(wrappers=(("loss_scale", {"scale": rule}),))
  state = train.train_and_evaluate(config, str(tmp_path))
  rows = tiny.rows(str(tmp_path))
  skipped = rows[-1]["skipped_steps"]
  assert skipped >= 4
  assert int(state.step) == 8 - skipped
  assert rows[-1]["loss_scale"] == 2.0 ** (30 - skipped)
  # No step of the first rows was applied, so there is no loss to average.
  assert rows[0]["train_loss"] is None
  assert rows[0]["skipped_steps"] == 2


def spoiled() -> data.Splits:
  """Digits of which training example 0 is infinite."""
  splits = data.digits()
  inputs = np.array(splits.train.inputs[:64])
  inputs[0] = np.inf
  return data.Splits(
    data.Arrays(inputs, splits.train.labels[:64]), splits.eval, 10
  )


@pytest.fixture
def importable(monkeypatch):
  """Makes the factories here nameable in configs."""
  monkeypatch.setitem(
    sys.modules, "train_test_factories", sys.modules[__name__]
  )
  return "train_test_factories:"


def test_a_nonfinite_loss_stops_with_step_and_paths(
  importable, tmp_path, caplog
) -> None:
  config = tiny.config(
    data={"name": importable + "spoiled"}, wrappers=(), precision="float32"
  )
  with pytest.raises(FloatingPointError) as stopped:
    train.train_and_evaluate(config, str(tmp_path))
  message = str(stopped.value)
  assert message.startswith("step ")
  # Batches of 16 of 64 examples: the bad one is in the first four.
  assert int(message.split()[1].rstrip(":")) <= 4
  assert "conv0/kernel" in message
  # No checkpoint holds the spoiled parameters.
  steps = os.listdir(os.path.join(tmp_path, "checkpoints"))
  assert "8" not in steps
  config.on_nonfinite = "continue"
  with caplog.at_level(logging.WARNING, "flaxshard"):
    train.train_and_evaluate(config, str(tmp_path / "on"))
  assert "the loss is not finite" in caplog.text
  assert [r["step"] for r in tiny.rows(str(tmp_path / "on"))] == [2, 4, 6, 8]


class TinyNNX(nnx.Module):
  """An NNX model with statistics and a random stream."""

  def __init__(self, *, num_classes, policy, rngs, width: int = 8):
    dtype = policy.compute_dtype
    self.hidden = nnx.Linear(64, width, dtype=dtype, rngs=rngs)
    self.norm = nnx.BatchNorm(width, rngs=rngs)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)
    self.out = nnx.Linear(width, num_classes, dtype=dtype, rngs=rngs)

  def __call__(self, x):
    x = x.reshape(x.shape[0], -1)
    return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def test_nnx_model_trains_and_resumes(
  importable, tmp_path, monkeypatch
) -> None:
  config = tiny.config(model={"name": importable + "TinyNNX", "width": 16})
  state = train.train_and_evaluate(config, str(tmp_path / "a"))
  assert int(state.rngs["dropout"]["rngs"]["count"]) == 8
  assert np.abs(state.batch_stats["norm"]["mean"]).max() > 0
  with monkeypatch.context() as patch:
    tiny.stop_at(patch, 3, signal.SIGINT)
    with pytest.raises(SystemExit):
      train.train_and_evaluate(config, str(tmp_path / "b"))
  resumed = train.train_and_evaluate(config, str(tmp_path / "b"))
  _assert_same(resumed.params, state.params)
  _assert_same(resumed.batch_stats, state.batch_stats)


def test_a_checkpoint_of_another_model_is_refused_and_kept(
  undisturbed,
) -> None:
  workdir, _ = undisturbed
  before = {
    f: f.read_bytes() for f in pathlib.Path(workdir).rglob("*") if f.is_file()
  }
  config = tiny.config(model={"name": "cnn", "features": (5,), "dense": 8})
  with pytest.raises(ValueError, match=r"params/conv0/bias: shape \(4,\)"):
    train.train_and_evaluate(config, workdir)
  after = {
    f: f.read_bytes() for f in pathlib.Path(workdir).rglob("*") if f.is_file()
  }
  assert after == before


@pytest.mark.parametrize("field, value", [("batch_size", 32), ("seed", 1)])
def test_another_data_order_cannot_be_continued(
  undisturbed, field, value
) -> None:
  workdir, _ = undisturbed
  with pytest.raises(ValueError, match=f"config.{field}={value}, but"):
    train.train_and_evaluate(tiny.config(**{field: value}), workdir)


def test_profile_and_progress_bar(tmp_path, monkeypatch, capsys) -> None:
  """A trace of the steps asked for; a bar on a terminal and none in a pipe."""
  config = tiny.config(profile_steps=(2, 3), num_train_steps=4)
  monkeypatch.setattr(
    type(sys.stderr), "isatty", lambda self: True, raising=False
  )
  train.train_and_evaluate(config, str(tmp_path / "a"))
  assert "4/4" in capsys.readouterr().err
  traces = list((tmp_path / "a" / "profile").rglob("*.xplane.pb"))
  assert len(traces) == 1
  monkeypatch.setattr(
    type(sys.stderr), "isatty", lambda self: False, raising=False
  )
  config = tiny.config(num_train_steps=4, profile_steps=(4, 9))
  train.train_and_evaluate(config, str(tmp_path / "b"))
  assert "/4" not in capsys.readouterr().err
  # The run ended inside the stretch: its trace is written all the same.
  assert len(list((tmp_path / "b" / "profile").rglob("*.xplane.pb"))) == 1


def test_a_signal_in_the_last_step_loses_no_evaluation(
  tmp_path, monkeypatch
) -> None:
  with monkeypatch.context() as patch:
    tiny.stop_at(patch, 4, signal.SIGTERM)
    config = tiny.config(num_train_steps=4, eval_every_steps=100)
    train.train_and_evaluate(config, str(tmp_path))
  assert "eval_accuracy" in tiny.rows(str(tmp_path))[-1]


def test_broken_leftovers_of_a_run(undisturbed, tmp_path) -> None:
  """A damaged config.json is named; damaged rows are left out."""
  workdir, _ = undisturbed
  copy = str(tmp_path / "copy")
  shutil.copytree(workdir, copy)
  with open(os.path.join(copy, "metrics.jsonl"), "ab") as f:
    f.write(b'5\n{}\n{"step": null}\n\xff\n{"step": 8')
  train.train_and_evaluate(tiny.config(), copy)
  with open(os.path.join(copy, "config.json"), "w"):
    pass
  with pytest.raises(ValueError, match=r"config.json is broken"):
    train.train_and_evaluate(tiny.config(), copy)
