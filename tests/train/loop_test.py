"""The training loop on one mesh: files, resuming, skipped and bad steps."""

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

import jax
import pytest
import tiny
from tree_equality import assert_trees_equal

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
  assert_trees_equal(*map(jax.tree.leaves, (resumed, state)))
  # A stop splits the mean over two steps into two rows.
  rows, whole_rows = map(tiny.untimed_rows, (workdir, whole_workdir))
  assert [r["step"] for r in rows] == [2, 3, 4, 6, 7, 8]
  assert rows[3] == whole_rows[2]
  for name in ("eval_loss", "learning_rate", "loss_scale"):
    assert rows[-1][name] == whole_rows[-1][name]


def test_a_finished_run_is_restored_and_not_trained_again(
  whole_run, tmp_path, monkeypatch, caplog
):
  """Broken rows are ignored; a broken config.json is an error."""
  workdir, state = whole_run
  copy = tmp_path / "copy"
  shutil.copytree(workdir, copy)
  with open(copy / "metrics.jsonl", "ab") as f:
    f.write(b'5\n{}\n{"step": null}\n\xff\n{"step": 8')
  before = tiny.count_live_arrays((64, 8))
  counts = tiny.count_at_restore(monkeypatch, (64, 8))
  with caplog.at_level(logging.INFO, "flaxshard"):
    again = train.train_and_evaluate(tiny.config(), str(copy))
  # Memory holds the restored state, not an initialized one as well.
  assert counts == [before]
  assert_trees_equal(again.params, state.params)
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
