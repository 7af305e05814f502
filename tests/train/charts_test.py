"""TensorBoard events and `training.png`."""

import importlib.util
import pathlib
import struct
import sys

from matplotlib import figure
from matplotlib import image
import numpy as np
import pytest

from flaxshard.train import charts


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


def test_events_of_a_resumed_run_replace_later_events(tmp_path):
  from tensorboardX.proto import event_pb2

  write, close = charts.event_writer("tensorboard", str(tmp_path), 4)
  write(6, {"train_loss": 0.5})
  close()
  (file,) = tmp_path.iterdir()
  start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
  event = event_pb2.Event(step=5, session_log=start).SerializeToString()
  assert event in file.read_bytes()
  assert read_events(tmp_path) == [(6, "train_loss", 0.5)]


def test_writer_none_writes_nothing(tmp_path):
  write, close = charts.event_writer("none", str(tmp_path))
  write(2, {"train_loss": 0.5})
  close()
  assert list(tmp_path.iterdir()) == []


@pytest.fixture
def installed(monkeypatch):
  """Returns a function that makes packages look uninstalled."""
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
def test_a_missing_package_raises_with_the_remedy(
  tmp_path, installed, name, package, remedy
):
  installed(package)
  with pytest.raises(ImportError) as e:
    charts.event_writer(name, str(tmp_path))
  message = str(e.value)
  assert message.startswith(f"config.writer={name!r} needs {package}")
  assert message.endswith(remedy)
  assert list(tmp_path.iterdir()) == []


ROWS = [
  {"step": 2, "train_loss": 2.0, "train_accuracy": 0.25},
  {"step": 4, "train_loss": 1.0, "train_accuracy": 0.5, "eval_loss": 1.5}
  | {"eval_accuracy": 0.4},
  # A row with an evaluation only, and one with a non-finite loss.
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
  """Collects the figures that are saved."""
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
  # Something is drawn: not one color.
  assert np.ptp(drawn[..., :3]) > 0.5
  return drawn.shape[:2]


def test_plot_without_a_loss_scale(tmp_path, drawn, monkeypatch):
  # Pyplot would choose a GUI backend and keep every figure.
  monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
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
  # A mark at each row with more skipped steps, with their number.
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


def test_plot_accepts_missing_rows_and_values(tmp_path):
  path = tmp_path / "training.png"
  charts.plot([], str(path))
  assert image.imread(path).shape[:2] == (744, 960)
  # A scale that is not finite is null in metrics.jsonl.
  rows = scaled_rows()
  rows[-1]["loss_scale"] = None
  charts.plot(rows, str(path))
  assert pixels(path) == (1080, 960)
