"""`training.png`."""

import sys

from matplotlib import figure
from matplotlib import image
import numpy as np
import pytest

from flaxshard.train import charts

ROWS = [
  {"step": 2, "train_loss": 2.0, "train_accuracy": 0.25}
  | {"learning_rate": 0.125, "steps_per_second": 10.0},
  {"step": 4, "train_loss": 1.0, "train_accuracy": 0.5, "eval_loss": 1.5}
  | {"eval_accuracy": 0.4},
  # A row with an evaluation only, and one with a non-finite loss.
  {"step": 5, "eval_loss": 1.25, "eval_accuracy": 0.6},
  {"step": 6, "train_loss": None, "train_accuracy": 0.75}
  | {"steps_per_second": 12.0},
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


@pytest.fixture
def not_saved(monkeypatch):
  """Collects the figures without saving them, which takes half a second."""
  figures = []
  monkeypatch.setattr(
    figure.Figure, "savefig", lambda self, *args, **kwargs: figures.append(self)
  )
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


def axes_of(canvas):
  """Returns the axes of a figure by their names."""
  return {ax.get_ylabel(): ax for ax in canvas.axes}


def test_plot_without_a_loss_scale(tmp_path, drawn, monkeypatch):
  # Pyplot would choose a GUI backend and keep every figure.
  monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
  path = tmp_path / "training.png"
  charts.plot(ROWS, str(path), "digits: cnn on digits")
  assert pixels(path) == (600, 1000)
  axes = axes_of(drawn[0])
  assert set(axes) == {"loss", "accuracy", "learning rate", "steps per second"}
  assert lines(axes["loss"]) == {
    "train_loss": ([2, 4], [2.0, 1.0]),
    "eval_loss": ([4, 5], [1.5, 1.25]),
  }
  assert lines(axes["accuracy"]) == {
    "train_accuracy": ([2, 4, 6], [0.25, 0.5, 0.75]),
    "eval_accuracy": ([4, 5], [0.4, 0.6]),
  }
  assert lines(axes["learning rate"]) == {"learning_rate": ([2], [0.125])}
  speed = {"steps_per_second": ([2, 6], [10.0, 12.0])}
  assert lines(axes["steps per second"]) == speed
  assert drawn[0].get_suptitle() == "digits: cnn on digits"
  assert axes["steps per second"].get_xlabel() == "step (batches consumed)"
  for name in ("loss", "accuracy"):
    labels = [text.get_text() for text in axes[name].get_legend().get_texts()]
    assert labels == list(lines(axes[name]))


@pytest.mark.parametrize("count", [1, 30])
def test_each_point_of_a_short_run_has_a_marker(tmp_path, not_saved, count):
  rows = [
    {"step": i, "train_loss": 1.0, "loss_scale": 2.0, "commits": i}
    | {"train_accuracy": 0.5, "learning_rate": 0.1, "steps_per_second": 3.0}
    for i in range(count)
  ]
  charts.plot(rows, str(tmp_path / "training.png"))
  assert len(not_saved[0].axes) == 6
  for name, ax in axes_of(not_saved[0]).items():
    (line,) = ax.get_lines()
    assert line.get_marker() == "o", name
    # There are no steps between two integers.
    assert all(x.is_integer() for x in ax.get_xticks()), ax.get_xticks()


def test_a_long_run_is_a_line_with_marked_evaluations(tmp_path, not_saved):
  rows = [{"step": i, "train_loss": 1.0} for i in range(1000)]
  rows += [{"step": i, "eval_loss": 1.0} for i in range(0, 1000, 20)]
  charts.plot(rows, str(tmp_path / "training.png"))
  train, held_out = axes_of(not_saved[0])["loss"].get_lines()
  assert (train.get_marker(), held_out.get_marker()) == ("None", "o")


def test_plot_of_agn_has_its_commits(tmp_path, not_saved):
  rows = [{**row, "commits": row["step"] // 2} for row in ROWS]
  charts.plot(rows, str(tmp_path / "training.png"))
  assert lines(axes_of(not_saved[0])["commits"]) == {
    "commits": ([2, 4, 5, 6], [1, 2, 2, 3])
  }


def test_plot_of_workers_has_their_commits(tmp_path, not_saved):
  commits = {"commit_workers": 4, "commit_staleness": 0.5} | {
    "commit_megabytes": 0.25,
    "commit_seconds": 0.125,
  }
  rows = [{**ROWS[0], "commits": 0}, {**ROWS[1], "commits": 1, **commits}]
  charts.plot(rows, str(tmp_path / "training.png"))
  axes = axes_of(not_saved[0])
  for panel, key, value in (
    ("workers in the last commit", "commit_workers", 4),
    ("staleness of commits", "commit_staleness", 0.5),
    ("MB sent by commits", "commit_megabytes", 0.25),
    ("seconds per commit", "commit_seconds", 0.125),
  ):
    assert lines(axes[panel]) == {key: ([4], [value])}


def test_plot_marks_skipped_steps(tmp_path, drawn):
  path = tmp_path / "training.png"
  charts.plot(scaled_rows(), str(path))
  assert pixels(path) == (900, 1000)
  scale = axes_of(drawn[0])["loss scale"]
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


def test_plot_without_skipped_steps(tmp_path, not_saved):
  rows = [{**row, "skipped_steps": 0} for row in scaled_rows()]
  charts.plot(rows, str(tmp_path / "training.png"))
  scale = axes_of(not_saved[0])["loss scale"]
  assert list(lines(scale)) == ["loss_scale"]
  assert scale.texts == [] or not any(t.get_text() for t in scale.texts)


def test_plot_accepts_missing_rows_and_values(tmp_path):
  path = tmp_path / "training.png"
  charts.plot([], str(path))
  assert image.imread(path).shape[:2] == (600, 1000)
  # A scale that is not finite is null in metrics.jsonl.
  rows = scaled_rows()
  rows[-1]["loss_scale"] = None
  charts.plot(rows, str(path))
  assert pixels(path) == (900, 1000)


def test_all_metrics_are_drawn(not_saved, tmp_path):
  rows = [
    {"step": i, "train_kl": 2.0 / i, "train_loss": 1.0, "eval_fid": 3.0}
    for i in (1, 2)
  ]
  charts.plot(rows, str(tmp_path / "training.png"))
  axes = axes_of(not_saved[0])
  assert list(axes)[:3] == ["loss", "kl", "fid"]
  assert lines(axes["kl"]) == {"train_kl": ([1, 2], [2.0, 1.0])}
  assert lines(axes["fid"]) == {"eval_fid": ([1, 2], [3.0, 3.0])}
