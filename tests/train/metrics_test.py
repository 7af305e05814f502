"""`metrics.jsonl` and `config.json`."""

import json
import logging

import pytest

from flaxshard.train import metrics as metrics_lib


def read_lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
  return tmp_path / "metrics.jsonl"


def test_a_row_is_on_disk_at_once(path):
  file = metrics_lib.MetricsFile(str(path), 0)
  file.write(2, {"train_loss": 0.5, "skipped_steps": 1})
  assert read_lines(path) == [
    {"step": 2, "train_loss": 0.5, "skipped_steps": 1}
  ]
  file.write(4, {"eval_loss": 0.25})
  assert read_lines(path)[1:] == [{"step": 4, "eval_loss": 0.25}]
  file.close()
  assert len(read_lines(path)) == 2


def test_nonfinite_numbers_are_null(path):
  file = metrics_lib.MetricsFile(str(path), 0)
  values = {
    "a": float("nan"),
    "b": float("inf"),
    "c": -float("inf"),
    "d": None,
    "e": 0.0,
    "f": 0,
  }
  file.write(1, values)
  file.close()
  assert path.read_text() == (
    '{"step": 1, "a": null, "b": null, "c": null, "d": null, "e": 0.0, '
    '"f": 0}\n'
  )


def test_a_resumed_run_removes_later_rows(path):
  file = metrics_lib.MetricsFile(str(path), 0)
  for step in (2, 4, 6, 8):
    file.write(step, {"loss": 1.0 / step, "scale": None})
  file.close()
  file = metrics_lib.MetricsFile(str(path), 4)
  assert [row["step"] for row in read_lines(path)] == [2, 4]
  file.write(6, {"loss": 0.0})
  file.close()
  assert read_lines(path) == [
    {"step": 2, "loss": 0.5, "scale": None},
    {"step": 4, "loss": 0.25, "scale": None},
    {"step": 6, "loss": 0.0},
  ]
  # The temporary file is gone.
  assert list(path.parent.iterdir()) == [path]


def test_a_new_run_starts_an_empty_file(path):
  path.write_text('{"step": 2}\n')
  metrics_lib.MetricsFile(str(path), 0).close()
  assert path.read_text() == ""


def test_an_incomplete_line_is_ignored(path, caplog):
  # The last write of a process that was killed.
  path.write_text('{"step": 2, "loss": 0.5}\n{"step": 4, "lo')
  with caplog.at_level(logging.WARNING, "flaxshard"):
    assert metrics_lib.read_rows(str(path)) == [{"step": 2, "loss": 0.5}]
  (record,) = caplog.records
  assert str(path) in record.getMessage()
  assert '{"step": 4, "lo' in record.getMessage()
  # The next row starts a new line.
  file = metrics_lib.MetricsFile(str(path), 4)
  file.write(6, {"loss": 0.25})
  file.close()
  assert read_lines(path) == [
    {"step": 2, "loss": 0.5},
    {"step": 6, "loss": 0.25},
  ]


def test_a_missing_file_has_no_rows(path):
  assert metrics_lib.read_rows(str(path)) == []


def test_close_on_exit_raises_the_first_of_two_errors(caplog):
  def close():
    raise OSError(28, "No space left on device", "metrics.jsonl")

  with pytest.raises(KeyError), metrics_lib.close_on_exit(close):
    raise KeyError
  assert "No space left on device: 'metrics.jsonl'" in caplog.text
  with (
    pytest.raises(OSError, match="metrics"),
    metrics_lib.close_on_exit(close),
  ):
    pass


# Every metric that a config with LossScale and AGN has, with long numbers.
ALL_METRICS = {
  "train_loss": 2.3456789,
  "train_accuracy": 0.87654321,
  "learning_rate": 0.00289123,
  "loss_scale": 2.0**24,
  "skipped_steps": 12,
  "commits": 60,
  "steps_per_second": 73.61234,
}
EVALUATION = {"eval_loss": 0.24837777, "eval_accuracy": 0.93333333}


def test_a_row_of_all_metrics_fits_100_columns():
  lines = metrics_lib.format_row(12000, {**ALL_METRICS, **EVALUATION})
  assert lines == [
    "step 12000: loss=2.346 acc=0.8765 lr=0.00289 scale=2^24 skipped=12 "
    "commits=60 73.6 steps/s",
    "step 12000: eval_loss=0.2484 eval_accuracy=0.9333",
  ]
  # The log has the time in front.
  assert max(len("12:00:00 " + line) for line in lines) <= 100


def test_a_row_of_many_custom_metrics_is_wrapped():
  row = {f"gradient_norm_{i}": 1.23456 for i in range(20)}
  lines = metrics_lib.format_row(2, row)
  assert max(len("12:00:00 " + line) for line in lines) <= 100
  assert " ".join(lines).count("=1.235") == 20


@pytest.mark.parametrize(
  ("name", "value", "text"),
  [
    ("skipped_steps", 3, "skipped=3"),
    ("loss_scale", 32768.0, "scale=2^15"),
    ("loss_scale", 1.0, "scale=1"),
    ("loss_scale", 1000.0, "scale=1000"),
    ("train_loss", float("nan"), "loss=nan"),
    ("learning_rate", 1e-5, "lr=1e-05"),
    ("steps_per_second", 0.012345, "0.0123 steps/s"),
    ("steps_per_second", 12345.6, "12346 steps/s"),
    ("commits", 123456, "commits=123456"),
  ],
)
def test_numbers_in_a_row_are_rounded(name, value, text):
  assert metrics_lib.format_row(2, {name: value}) == [f"step 2: {text}"]


def test_a_row_leaves_out_what_is_missing_or_zero_skipped_steps():
  row = {"train_loss": None, "skipped_steps": 0}
  assert metrics_lib.format_row(2, row) == []


def test_last_values_are_of_the_last_row_that_has_the_metric(tmp_path):
  path = tmp_path / "metrics.jsonl"
  assert metrics_lib.read_last_values(str(path)) == {}
  path.write_text(
    '{"step": 2, "loss": 3.0, "eval_loss": 4.0}\n{"step": 4, "loss": 1.0}\n'
  )
  values = metrics_lib.read_last_values(str(path))
  assert values == {"step": 4, "loss": 1.0, "eval_loss": 4.0}
