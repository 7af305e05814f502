"""Rows of metrics: to the file, the log and the final message."""

import logging

import tiny

from flaxshard.train import report


def test_a_row_is_whole_in_the_file_and_rounded_in_the_log(tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  row = {"train_loss": 0.123456, "eval_loss": None, "skipped_steps": 0}
  with report.open_report(str(tmp_path), "none", 2, 4) as write_row:
    write_row(4, row)
  assert tiny.rows(tmp_path) == [{"step": 4, **row}]
  assert caplog.messages == ["step 4: loss=0.1235"]


def test_finish_logs_the_last_evaluation(tmp_path, caplog):
  caplog.set_level(logging.INFO, "flaxshard")
  with report.open_report(str(tmp_path), "none", 0, 4) as write_row:
    write_row(2, {"train_loss": 0.5, "eval_loss": 0.75})
    write_row(4, {"train_loss": 0.25})
  caplog.clear()
  report.finish(str(tmp_path))
  assert caplog.messages[0] == "done: step 4: eval_loss=0.75"
  assert str(tmp_path) in caplog.messages[1]
  assert (tmp_path / "training.png").exists()
