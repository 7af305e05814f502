"""`training.png`."""

import sys

from matplotlib import figure
from matplotlib import image
import numpy as np

from flaxshard.train import charts

ROWS = [
  {"step": 2, "train_loss": 2.0, "learning_rate": 0.125},
  {"step": 4, "train_loss": 1.0, "eval_loss": 1.5, "loss_scale": 2.0}
  | {"skipped_steps": 1},
  # A row with an evaluation only, and one with a non-finite loss.
  {"step": 5, "eval_loss": 1.25, "eval_fid": 3.0},
  {"step": 6, "train_loss": None, "loss_scale": None, "commits": 1}
  | {"commit_workers": 4},
]


def test_each_metric_is_drawn(tmp_path, monkeypatch):
  # Pyplot would choose a GUI backend and keep every figure.
  monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
  figures = []
  save = figure.Figure.savefig

  def keep_and_save(self, *args, **kwargs):
    figures.append(self)
    save(self, *args, **kwargs)

  monkeypatch.setattr(figure.Figure, "savefig", keep_and_save)
  path = tmp_path / "training.png"
  charts.plot(ROWS, str(path))
  drawn = {
    ax.get_ylabel(): {
      line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
      for line in ax.get_lines()
    }
    for ax in figures[0].axes
  }
  assert drawn["loss"] == {
    "train_loss": ([2, 4], [2.0, 1.0]),
    "eval_loss": ([4, 5], [1.5, 1.25]),
  }
  assert drawn["fid"] == {"eval_fid": ([5], [3.0])}
  assert drawn["workers in the last commit"] == {"commit_workers": ([6], [4])}
  assert drawn["loss scale"] == {
    "loss_scale": ([4], [2.0]),
    "skipped steps (1 in all)": ([4], [2.0]),
  }
  # Something is drawn: not one color.
  assert np.ptp(image.imread(path)[..., :3]) > 0.5
  charts.plot([], str(path))
  assert image.imread(path).shape[:2] == (300, 1000)
