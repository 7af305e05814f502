"""The metrics file, TensorBoard events and the plot."""

import importlib.util
import json
import logging
import pathlib
import struct
import sys

from matplotlib import figure
from matplotlib import image
import numpy as np
import pytest

from flaxshard.train import charts
from flaxshard.train import metrics as metrics_lib


def read_lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


# metrics.jsonl.


@pytest.fixture
def path(tmp_path):
  return tmp_path / "metrics.jsonl"


def test_rows_are_on_disk_at_once(path):
  file = metrics_lib.MetricsFile(str(path), 0)
  file.write(2, {"train_loss": 0.5, "skipped_steps": 1})
  assert read_lines(path) == [
    {"step": 2, "train_loss": 0.5, "skipped_steps": 1}
  ]
  file.write(4, {"eval_loss": 0.25})
  assert read_lines(path)[1:] == [{"step": 4, "eval_loss": 0.25}]
  file.close()
  assert len(read_lines(path)) == 2


def test_what_is_not_finite_is_null(path):
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


def test_a_resumed_run_drops_rows_that_it_writes_again(path):
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
  # Nothing else is left beside it.
  assert list(path.parent.iterdir()) == [path]


def test_a_new_run_starts_an_empty_file(path):
  path.write_text('{"step": 2}\n')
  metrics_lib.MetricsFile(str(path), 0).close()
  assert path.read_text() == ""


def test_a_line_cut_short_is_left_out(path, caplog):
  # The last write of a process that was killed.
  path.write_text('{"step": 2, "loss": 0.5}\n{"step": 4, "lo')
  with caplog.at_level(logging.WARNING, "flaxshard"):
    assert metrics_lib.read_rows(str(path)) == [{"step": 2, "loss": 0.5}]
  (record,) = caplog.records
  assert str(path) in record.getMessage()
  assert '{"step": 4, "lo' in record.getMessage()
  # The next row does not go on in that line.
  file = metrics_lib.MetricsFile(str(path), 4)
  file.write(6, {"loss": 0.25})
  file.close()
  assert read_lines(path) == [
    {"step": 2, "loss": 0.5},
    {"step": 6, "loss": 0.25},
  ]


def test_no_file_has_no_rows(path):
  assert metrics_lib.read_rows(str(path)) == []


# Events.


def read_events(folder):
  """Returns the scalars of the event files in a folder as (step, tag, value).

  A record is its length, a checksum of that, the event and a checksum of it.
  """
  from tensorboardX.proto import event_pb2

  scalars = []
  for file in sorted(pathlib.Path(folder).glob("events.out.tfevents.*")):
    content = file.read_bytes()
    while content:
      (length,) = struct.unpack("<Q", content[:8])
      event = event_pb2.Event.FromString(content[12 : 12 + length])
      scalars += [
        (event.step, value.tag, value.simple_value)
        for value in event.summary.value
      ]
      content = content[16 + length :]
  return scalars


def test_tensorboard_events(tmp_path):
  write, close = charts.event_writer("tensorboard", str(tmp_path))
  write(2, {"train_loss": 0.5, "loss_scale": 2.0**15, "absent": None})
  write(4, {"eval_accuracy": 0.25, "skipped_steps": 3})
  close()
  assert read_events(tmp_path) == [
    (2, "train_loss", 0.5),
    (2, "loss_scale", 2.0**15),
    (4, "eval_accuracy", 0.25),
    (4, "skipped_steps", 3.0),
  ]


def test_events_of_a_resumed_run_replace_later_ones(tmp_path):
  from tensorboardX.proto import event_pb2

  write, close = charts.event_writer("tensorboard", str(tmp_path), 4)
  write(6, {"train_loss": 0.5})
  close()
  (file,) = tmp_path.iterdir()
  start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  event = event_pb2.Event(step=5, session_log=start).SerializeToString()
  assert event in file.read_bytes()
  assert read_events(tmp_path) == [(6, "train_loss", 0.5)]


def test_of_two_errors_the_first_is_raised(caplog):
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


def test_no_events(tmp_path):
  write, close = charts.event_writer("none", str(tmp_path))
  write(2, {"train_loss": 0.5})
  close()
  assert list(tmp_path.iterdir()) == []


@pytest.fixture
def installed(monkeypatch):
  """Sets which packages seem to be installed, whatever is."""
  find_spec = importlib.util.find_spec

  def uninstall(*names):
    monkeypatch.setattr(
      importlib.util,
      "find_spec",
      lambda name, *args: None if name in names else find_spec(name, *args),
    )

  return uninstall


@pytest.mark.parametrize(
  ("name", "package", "remedy"),
  [
    ("clu", "tensorflow", "pip install tensorflow tensorboard"),
    ("tensorboard", "tensorboardX", "pip install 'flaxshard[train]'"),
  ],
)
def test_a_missing_package(tmp_path, installed, name, package, remedy):
  installed(package)
  with pytest.raises(ImportError) as e:
    charts.event_writer(name, str(tmp_path))
  message = str(e.value)
  assert message.startswith(f"config.writer={name!r} needs {package}")
  assert message.endswith(remedy)
  assert list(tmp_path.iterdir()) == []


def test_require(installed):
  charts.require("this", "json")
  with pytest.raises(ImportError) as e:
    charts.require("this", "flaxshard_no_such_package")
  assert str(e.value) == (
    "this needs flaxshard_no_such_package, not installed: "
    "pip install 'flaxshard[train]'"
  )
  installed("json")
  with pytest.raises(ImportError, match=r"that needs json, .*: get it"):
    charts.require("that", "json", "get it")


# The plot.

ROWS = [
  {"step": 2, "train_loss": 2.0, "train_accuracy": 0.25},
  {"step": 4, "train_loss": 1.0, "train_accuracy": 0.5, "eval_loss": 1.5}
  | {"eval_accuracy": 0.4},
  # A row of an evaluation alone, and a loss that was not finite.
  {"step": 5, "eval_loss": 1.25, "eval_accuracy": 0.6},
  {"step": 6, "train_loss": None, "train_accuracy": 0.75},
]
SCALES = {
  2: {"loss_scale": 1024.0, "skipped_steps": 1},
  4: {"loss_scale": 1024.0, "skipped_steps": 1},
  6: {"loss_scale": 256.0, "skipped_steps": 3},
}


def scaled_rows():
  return [{**row, **SCALES.get(row["step"], {})} for row in ROWS]


@pytest.fixture
def drawn(monkeypatch):
  """The figures that were saved."""
  figures = []
  savefig = figure.Figure.savefig

  def save(self, *args, **kwargs):
    figures.append(self)
    return savefig(self, *args, **kwargs)

  monkeypatch.setattr(figure.Figure, "savefig", save)
  return figures


def lines(ax):
  """Returns label -> (xs, ys) of the lines of an axes."""
  return {
    line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
    for line in ax.get_lines()
  }


def pixels(path):
  drawn = image.imread(path)
  # Something is drawn: not one colour.
  assert np.ptp(drawn[..., :3]) > 0.5
  return drawn.shape[:2]


def test_plot_without_a_loss_scale(tmp_path, drawn):
  path = tmp_path / "training.png"
  charts.plot(ROWS, str(path))
  assert pixels(path) == (744, 960)
  loss, accuracy = drawn[0].axes
  assert lines(loss) == {
    "train_loss": ([2, 4], [2.0, 1.0]),
    "eval_loss": ([4, 5], [1.5, 1.25]),
  }
  assert lines(accuracy) == {
    "train_accuracy": ([2, 4, 6], [0.25, 0.5, 0.75]),
    "eval_accuracy": ([4, 5], [0.4, 0.6]),
  }
  assert (loss.get_ylabel(), accuracy.get_ylabel()) == ("loss", "accuracy")
  assert accuracy.get_xlabel() == "step (batches consumed)"
  for ax in (loss, accuracy):
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == list(lines(ax))


def test_plot_marks_skipped_steps(tmp_path, drawn):
  path = tmp_path / "training.png"
  charts.plot(scaled_rows(), str(path))
  assert pixels(path) == (1080, 960)
  *_, scale = drawn[0].axes
  assert scale.get_ylabel() == "loss scale"
  assert scale.get_yscale() == "log"
  # Marks where the count of skipped steps has grown, with by how much.
  assert lines(scale) == {
    "loss_scale": ([2, 4, 6], [1024.0, 1024.0, 256.0]),
    "skipped steps (3 in all)": ([2, 6], [1024.0, 256.0]),
  }
  marks = scale.get_lines()[1]
  assert marks.get_marker() == "v"
  assert marks.get_linestyle() == "None"
  notes = [text for text in scale.texts if text.get_text()]
  assert [(note.get_text(), note.xy) for note in notes] == [
    ("1", (2, 1024.0)),
    ("2", (6, 256.0)),
  ]


def test_plot_without_skipped_steps(tmp_path, drawn):
  rows = [{**row, "skipped_steps": 0} for row in scaled_rows()]
  charts.plot(rows, str(tmp_path / "training.png"))
  *_, scale = drawn[0].axes
  assert list(lines(scale)) == ["loss_scale"]
  assert scale.texts == [] or not any(t.get_text() for t in scale.texts)


def test_plot_takes_no_display(tmp_path, monkeypatch):
  # pyplot would choose a backend, and keep every figure.
  monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
  path = tmp_path / "training.png"
  charts.plot(ROWS, str(path))
  assert pixels(path) == (744, 960)


def test_plot_of_no_rows(tmp_path):
  path = tmp_path / "training.png"
  charts.plot([], str(path))
  assert image.imread(path).shape[:2] == (744, 960)


def test_plot_of_a_scale_that_is_not_finite(tmp_path):
  # Such a number is null in metrics.jsonl.
  rows = scaled_rows()
  rows[-1]["loss_scale"] = None
  path = tmp_path / "training.png"
  charts.plot(rows, str(path))
  assert pixels(path) == (1080, 960)
