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
