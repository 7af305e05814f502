"""The training loop on one mesh: files, resuming, skipped and bad steps."""

import gc
import importlib.util
import itertools
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import types

from flax import nnx
import jax
import numpy as np
import pytest
import tiny

from flaxshard import checkpoint
from flaxshard import train
from flaxshard.train import metrics as metrics_lib
from flaxshard.train import report

_DRAW = report.draw


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
  """An uninterrupted run of eight steps: its workdir and final state."""
  workdir = str(tmp_path_factory.mktemp("whole"))
  config = tiny.config(writer="tensorboard")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(report, "draw", _DRAW)
    return workdir, train.train_and_evaluate(config, workdir)


def assert_same(a, b) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert jax.tree.structure(a) == jax.tree.structure(b)


def test_a_run_writes_rows_events_plot_config_and_checkpoints(whole_run):
  workdir, state = whole_run
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


def at_step_3(signum):
  """Makes runs receive a signal in their third step."""
  steps = itertools.count(1)  # the loop asks once per step
  return tiny.stopped_while(lambda: next(steps) >= 3, signum)


def test_interrupted_runs_end_like_an_uninterrupted_one(
  whole_run, tmp_path, monkeypatch, caplog
):
  """A signal, a crash between two checkpoints, and Stop in a notebook."""
  whole_workdir, state = whole_run
  workdir = str(tmp_path)
  caplog.set_level(logging.INFO, "flaxshard")
  with at_step_3(signal.SIGTERM), pytest.raises(SystemExit) as stopped:
    train.train_and_evaluate(tiny.config(), workdir)
  assert stopped.value.code == 128 + signal.SIGTERM
  for fact in ("SIGTERM: saved step 3", workdir, "continues"):
    assert fact in caplog.text
  assert [r["step"] for r in tiny.rows(workdir)] == [2, 3]

  write = metrics_lib.MetricsFile.write

  def write_and_crash(self, step, row):
    write(self, step, row)
    if step == 6:
      raise KeyboardInterrupt  # the row is written, the checkpoint is of step 4

  with monkeypatch.context() as patch:
    patch.setattr(metrics_lib.MetricsFile, "write", write_and_crash)
    with pytest.raises(KeyboardInterrupt):
      train.train_and_evaluate(tiny.config(), workdir)
  assert "resuming from step 3" in caplog.text
  assert [r["step"] for r in tiny.rows(workdir)] == [2, 3, 4, 6]

  with monkeypatch.context() as patch, at_step_3(signal.SIGINT):
    # IPython in a terminal, which the tests do not need to be installed.
    shell = types.SimpleNamespace(config={})
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    patch.setitem(sys.modules, "IPython", ipython)
    part = train.train_and_evaluate(tiny.config(), workdir)
  assert "resuming from step 4" in caplog.text
  assert "SIGINT: saved step 7" in caplog.text
  assert int(part.step) == 7
  assert set(os.listdir(tmp_path / "checkpoints")) == {"3", "4", "7"}

  resumed = train.train_and_evaluate(tiny.config(), workdir)
  assert_same(resumed.params, state.params)
  assert_same(resumed.opt_state, state.opt_state)
  assert_same(resumed.wrapper_states, state.wrapper_states)
  # A stop splits the mean over two steps into two rows.
  rows, whole_rows = map(tiny.untimed_rows, (workdir, whole_workdir))
  assert [r["step"] for r in rows] == [2, 3, 4, 6, 7, 8]
  assert rows[3] == whole_rows[2]
  for name in ("eval_loss", "learning_rate", "loss_scale"):
    assert rows[-1][name] == whole_rows[-1][name]


def count_live_arrays(shape) -> int:
  # Tracebacks of earlier tests hold states in reference cycles.
  gc.collect()
  return sum(x.shape == shape for x in jax.live_arrays())


def count_at_restore(monkeypatch, shape) -> list[int]:
  """Returns a list that gets the number of arrays alive when a run restores."""
  counts = []
  restore = checkpoint.Checkpointer.restore

  def count_and_restore(self, state, **kwargs):
    leaves = jax.tree.leaves(state)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    counts.append(count_live_arrays(shape))
    return restore(self, state, **kwargs)

  monkeypatch.setattr(checkpoint.Checkpointer, "restore", count_and_restore)
  return counts


def test_a_finished_run_is_restored_and_not_trained_again(
  whole_run, tmp_path, monkeypatch, caplog
):
  """Broken rows are ignored; a broken config.json is an error."""
  workdir, state = whole_run
  copy = tmp_path / "copy"
  shutil.copytree(workdir, copy)
  with open(copy / "metrics.jsonl", "ab") as f:
    f.write(b'5\n{}\n{"step": null}\n\xff\n{"step": 8')
  before = count_live_arrays((64, 8))
  counts = count_at_restore(monkeypatch, (64, 8))
  with caplog.at_level(logging.INFO, "flaxshard"):
    again = train.train_and_evaluate(tiny.config(), str(copy))
  # Memory holds the restored state, not an initialized one as well.
  assert counts == [before]
  assert_same(again.params, state.params)
  assert tiny.rows(copy) == tiny.rows(workdir)
  assert "nothing to train" in caplog.text

  (copy / "config.json").write_text("")
  with pytest.raises(ValueError, match=r"config\.json"):
    train.train_and_evaluate(tiny.config(), str(copy))


def read_files(workdir) -> dict[pathlib.Path, bytes]:
  files = pathlib.Path(workdir).rglob("*")
  return {f: f.read_bytes() for f in files if f.is_file()}


@pytest.mark.parametrize(
  ("fields", "facts"),
  [
    (
      dict(
        model={"name": "cnn", "features": (), "dense": 9},
        num_train_steps=16,
        resume="extend",
      ),
      ("dense/bias", "(8,)", "(9,)"),
    ),
    # The position of the data would mean other examples.
    (dict(batch_size=32), ("config.batch_size=32", "16")),
  ],
)
def test_checkpoints_of_another_run_raise_and_are_kept(
  whole_run, fields, facts
):
  workdir, _ = whole_run
  before = read_files(workdir)
  with pytest.raises(ValueError) as e:
    train.train_and_evaluate(tiny.config(**fields), workdir)
  for fact in facts:
    assert fact in str(e.value)
  assert read_files(workdir) == before


def test_mistakes_raise_before_anything_is_written(tmp_path, monkeypatch):
  def fails(error, match, workdir=tmp_path, **fields):
    with pytest.raises(error, match=match):
      train.train_and_evaluate(tiny.config(**fields), str(workdir))

  fails(ValueError, "config.precision", precision="float16")
  fails(ValueError, "config.mesh", mesh={"replica": 9})
  fails(ValueError, "config.model", model={"name": "cnn", "dropout": 1.5})
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  fails(ImportError, r"matplotlib.*flaxshard\[train\]")
  assert os.listdir(tmp_path) == []
  file = tmp_path / "file"
  file.write_text("")
  for path in (file, file / "below"):
    fails(ValueError, f"workdir='{path}.* cannot be written", path)


class TinyNNX(nnx.Module):
  """An NNX model with batch statistics and a random stream."""

  def __init__(self, *, num_classes, policy, rngs, width: int = 8):
    dtype = policy.compute_dtype
    self.hidden = nnx.Linear(64, width, dtype=dtype, rngs=rngs)
    self.norm = nnx.BatchNorm(width, rngs=rngs)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)
    self.out = nnx.Linear(width, num_classes, dtype=dtype, rngs=rngs)

  def __call__(self, x):
    x = x.reshape(x.shape[0], -1)
    return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


@pytest.mark.slow
def test_an_nnx_model_trains_and_resumes(tmp_path, monkeypatch):
  config = tiny.config(
    model={"name": f"{__name__}:TinyNNX", "width": 16},
    num_train_steps=4,
    eval_every_steps=100,
    checkpoint_every_steps=2,
  )
  state = train.train_and_evaluate(config, str(tmp_path))
  assert int(state.rngs["dropout"]["rngs"]["count"]) == 4
  assert np.abs(state.batch_stats["norm"]["mean"]).max() > 0
  shutil.rmtree(tmp_path / "checkpoints" / "4")
  before = count_live_arrays((64, 16))
  counts = count_at_restore(monkeypatch, (64, 16))
  resumed = train.train_and_evaluate(config, str(tmp_path))
  # An NNX module initializes its parameters; they are gone by then.
  assert counts == [before]
  assert_same(resumed.params, state.params)
  assert_same(resumed.batch_stats, state.batch_stats)
  stream, resumed_stream = (s.rngs["dropout"]["rngs"] for s in (state, resumed))
  assert stream["key"] == resumed_stream["key"]
  assert int(resumed_stream["count"]) == 4
