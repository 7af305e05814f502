"""Rows of metrics: to files, the log and a progress bar."""

import logging
import sys

import pytest
import tiny

from flaxshard.train import report


@pytest.mark.parametrize("is_terminal", [False, True])
def test_rows_go_to_file_log_and_bar_on_a_terminal(
  tmp_path, monkeypatch, capsys, caplog, is_terminal
):
  caplog.set_level(logging.INFO, "flaxshard")
  monkeypatch.setattr(
    type(sys.stderr), "isatty", lambda self: is_terminal, raising=False
  )
  with report.open_report(str(tmp_path), "none", 2, 4) as write_row:
    write_row(4, {"train_loss": 0.123456, "eval_loss": None, "commits": 3})
  assert tiny.rows(tmp_path) == [
    {"step": 4, "train_loss": 0.123456, "eval_loss": None, "commits": 3}
  ]
  assert ("4/4" in capsys.readouterr().err) == is_terminal
  if not is_terminal:
    # On a terminal tqdm prints the log lines instead of pytest's handler.
    assert "step 4: train_loss=0.1235 commits=3" in caplog.text


def test_finish_logs_the_last_value_of_each_metric(tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  with report.open_report(str(tmp_path), "none", 0, 4) as write_row:
    write_row(2, {"train_loss": 0.5, "eval_loss": 0.75})
    write_row(4, {"train_loss": 0.25})
  report.finish(str(tmp_path))
  assert "done: step=4 train_loss=0.25 eval_loss=0.75" in caplog.text
  assert (tmp_path / "training.png").exists()
