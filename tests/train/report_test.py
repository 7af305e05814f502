"""Rows of metrics: to the file, the log and the final message."""

import logging

import pytest
import tiny

from flaxshard.train import charts
from flaxshard.train import report

CONFIG = tiny.config(num_train_steps=4)


@pytest.fixture(autouse=True)
def titles(monkeypatch):
  """Draws no plots; returns their numbers of rows and their titles."""
  titles = []
  monkeypatch.setattr(
    charts, "plot", lambda rows, path, title: titles.append((len(rows), title))
  )
  return titles


def test_a_row_is_whole_in_the_file_and_rounded_in_the_log(tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  row = {"train_loss": 0.123456, "eval_loss": None, "skipped_steps": 0}
  with report.open_report(CONFIG, str(tmp_path), 2) as write_row:
    write_row(4, row)
  assert tiny.rows(tmp_path) == [{"step": 4, **row}]
  assert caplog.messages == ["step 4: loss=0.1235"]


def test_log_result_has_the_last_evaluation(tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  with report.open_report(CONFIG, str(tmp_path), 0) as write_row:
    write_row(2, {"train_loss": 0.5, "eval_loss": 0.75})
    write_row(4, {"train_loss": 0.25})
  caplog.clear()
  report.log_result(str(tmp_path))
  assert caplog.messages[0] == "done: step 4: eval_loss=0.75"
  assert str(tmp_path) in caplog.messages[1]


def test_an_interrupted_run_has_a_plot_whose_title_says_where(tmp_path, titles):
  with pytest.raises(KeyboardInterrupt):
    with report.open_report(CONFIG, str(tmp_path), 0) as write_row:
      write_row(2, {"train_loss": 0.5})
      raise KeyboardInterrupt
  with report.open_report(CONFIG, str(tmp_path), 2) as write_row:
    write_row(4, {"train_loss": 0.25})
  name = f"{tmp_path.name}: cnn on digits"
  assert titles == [(1, f"{name}, step 2 of 4"), (2, name)]
