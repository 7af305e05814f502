"""The training loop on one mesh: files, interruptions, and what may change."""

import functools
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
from flaxshard.train import config as config_lib
from flaxshard.train import report
from flaxshard.train import same_run

_DRAW = report.draw
config_of = functools.partial(tiny.config, mesh={"replica": 2})


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
  """An uninterrupted run of eight steps: its workdir and final state."""
  workdir = str(tmp_path_factory.mktemp("whole"))
  config = config_of(writer="tensorboard")
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(report, "draw", _DRAW)
    return workdir, train.train_and_evaluate(config, workdir)


def test_a_run_writes_rows_events_plot_config_and_checkpoints(whole_run):
  workdir, state = whole_run
  rows = tiny.rows(workdir)
  assert [r["step"] for r in rows] == [2, 4, 6, 8]
  names = "step train_loss train_accuracy learning_rate loss_scale"
  names += " skipped_steps steps_per_second"
  assert set(rows[0]) == set(names.split())
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
    train.train_and_evaluate(config_of(), workdir)
  assert stopped.value.code == 128 + signal.SIGTERM
  for fact in ("SIGTERM: saved step 3", workdir, "continues"):
    assert fact in caplog.text
  assert [r["step"] for r in tiny.rows(workdir)] == [2, 3]

  write = report.MetricsFile.write

  def write_and_crash(self, step, row, flush):
    write(self, step, row, flush)
    if step == 6:
      raise KeyboardInterrupt  # the row is written, the checkpoint is of step 4

  with monkeypatch.context() as patch:
    patch.setattr(report.MetricsFile, "write", write_and_crash)
    with pytest.raises(KeyboardInterrupt):
      train.train_and_evaluate(config_of(), workdir)
  assert "resuming from step 3" in caplog.text
  assert [r["step"] for r in tiny.rows(workdir)] == [2, 3, 4, 6]

  with monkeypatch.context() as patch, at_step_3(signal.SIGINT):
    # IPython in a terminal, which the tests do not need to be installed.
    shell = types.SimpleNamespace(config={})
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    patch.setitem(sys.modules, "IPython", ipython)
    part = train.train_and_evaluate(config_of(), workdir)
  assert "resuming from step 4" in caplog.text
  assert "SIGINT: saved step 7" in caplog.text
  assert int(part.step) == 7
  assert set(os.listdir(tmp_path / "checkpoints")) == {"3", "4", "7"}

  resumed = train.train_and_evaluate(config_of(), workdir)
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
  counts = tiny.count_at_restore(monkeypatch, (64, 8))
  with caplog.at_level(logging.INFO, "flaxshard"):
    again = train.train_and_evaluate(config_of(), str(copy))
  # Memory holds the restored state, not an initialized one as well.
  assert counts == [0]
  assert_trees_equal(again.params, state.params)
  assert tiny.rows(copy) == tiny.rows(workdir)
  assert "nothing to train" in caplog.text

  (copy / "config.json").write_text("")
  with pytest.raises(ValueError, match=r"config\.json"):
    train.train_and_evaluate(config_of(), str(copy))


def read_files(workdir) -> dict[pathlib.Path, bytes]:
  files = pathlib.Path(workdir).rglob("*")
  return {f: f.read_bytes() for f in files if f.is_file()}


def test_checkpoints_of_another_run_raise_and_are_kept(whole_run):
  workdir, _ = whole_run
  before = read_files(workdir)
  wider = {"name": "cnn", "features": (), "dense": 9}
  for fields, match in (
    # The position of the data would mean other examples.
    ({"batch_size": 32}, r"config\.batch_size=32.* 16"),
    ({"model": wider, "num_train_steps": 16}, r"dense/bias.*\(8,\).*\(9,\)"),
  ):
    config = config_of(**fields, resume="extend")
    with pytest.raises(ValueError, match=match):
      train.train_and_evaluate(config, workdir)
  assert read_files(workdir) == before


# What may change between two runs of a workdir.


def check_earlier_run(workdir, latest_step, num_examples=1437, **fields):
  setup = types.SimpleNamespace(
    config=config_lib.check(config_of(**fields)),
    num_train_examples=num_examples,
  )
  same_run.check_earlier_run(setup, str(workdir), latest_step)


@pytest.mark.parametrize(
  ("changes", "facts"),
  [
    (
      {"learning_rate": 0.5},
      "config.learning_rate: 0.01 -> 0.5. above 8; config.resume='extend'",
    ),
    ({"num_train_steps": 2, "resume": "extend"}, "num_train_steps: 8 -> 2 8;"),
    ({"num_train_steps": 9}, "config.num_train_steps: 8 -> 9 =extend"),
    # Another number of examples under the same config.
    ({"num_examples": 96}, "number of training examples=96, 1437,"),
    # A stream.
    ({"num_examples": None}, "number of training examples=None, 1437,"),
  ],
)
def test_a_finished_workdir_with_a_change_raises(whole_run, changes, facts):
  workdir, _ = whole_run
  with pytest.raises(ValueError) as e:
    check_earlier_run(workdir, 8, **changes)
  for fact in (workdir, "another workdir", *facts.split()):
    assert fact in str(e.value), str(e.value)


def test_before_the_end_a_change_is_a_warning(whole_run, tmp_path, caplog):
  workdir, _ = whole_run
  check_earlier_run(workdir, 8, writer="none", max_to_keep=2)
  assert not caplog.records
  changes = {"learning_rate": 0.5, "num_train_steps": 9, "writer": "none"}
  check_earlier_run(workdir, 2, **changes)
  (message,) = caplog.messages
  facts = "step 2 config.learning_rate: 0.01 -> 0.5, num_train_steps: 8 -> 9"
  for fact in facts.split():
    assert fact in message
  assert "writer" not in message
  # A run continues without the files that are compared, and that of a version
  # that had fewer fields.
  caplog.clear()
  values = json.loads((pathlib.Path(workdir) / "config.json").read_text())
  del values["early_stopping"]
  (tmp_path / "config.json").write_text(json.dumps(values))
  check_earlier_run(tmp_path, 2, num_examples=96, num_train_steps=9)
  assert "num_train_steps: 8 -> 9" in caplog.text
  (tmp_path / "config.json").unlink()
  check_earlier_run(tmp_path, 2, seed=1)
  assert "config.json is missing" in caplog.text
