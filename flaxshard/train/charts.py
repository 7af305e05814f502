"""`training.png`: the metrics of a run, drawn over its steps."""

from __future__ import annotations

import io
from typing import Any

from etils import epath

# Points up to which each of them has a marker.
_MAX_MARKED = 30
_MAX_PANELS = 16


def plot(rows: list[dict[str, Any]], path: str, title: str = "") -> None:
  """Draws the metrics over the steps into a PNG file.

  A panel has a metric of training and evaluation, or another column of the
  rows, such as the learning rate.

  Args:
    rows: Rows of a `metrics.jsonl`.
    path: The file to write.
    title: The title of the plot.
  """
  # Not pyplot, which picks a GUI backend and keeps every figure alive.
  from matplotlib import figure
  from matplotlib import ticker

  panels = _panels(rows)
  lines = max(1, -(-len(panels) // 2))
  canvas = figure.Figure(figsize=(10, 3 * lines), layout="constrained")
  axes = canvas.subplots(lines, 2, sharex=True, squeeze=False).ravel()
  for ax in axes[len(panels) :]:
    ax.remove()
  for (name, keys), ax in zip(panels.items(), axes, strict=False):
    for key in keys:
      points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
      # A line through a single point would be invisible.
      style = "o-" if len(points) <= _MAX_MARKED else "-"
      color = "C1" if key.startswith("eval_") else None
      steps, values = zip(*points, strict=True)
      ax.plot(steps, values, style, color=color, ms=4, label=key)
    if name == "loss scale":
      ax.set_yscale("log", base=2)
    elif not keys[0].startswith(("train_", "eval_")):
      # A constant is not drawn as if its last digits were of interest.
      ax.set_ylim(bottom=0)
    ax.legend(frameon=False)
    ax.set_ylabel(name)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
  canvas.suptitle(title)
  canvas.supxlabel("step (batches consumed)")
  png = io.BytesIO()
  canvas.savefig(png, dpi=100, format="png")
  epath.Path(path).write_bytes(png.getvalue())


def _panels(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
  """Returns the keys of each panel: the loss, the accuracy, and then others."""
  panels: dict[str, list[str]] = {"loss": [], "accuracy": []}
  # A column without a number, or of zeros alone, has no panel.
  columns = {key: None for row in rows for key, value in row.items() if value}
  is_other = lambda key: not key.startswith(("train_", "eval_"))
  for key in sorted(columns, key=is_other):
    if key != "step":
      # The learning rate of a pattern has the pattern after a slash.
      name = key.removeprefix("train_").removeprefix("eval_").split("/")[0]
      panels.setdefault(name.replace("_", " "), []).append(key)
  drawn = [(name, keys) for name, keys in panels.items() if keys]
  return dict(drawn[:_MAX_PANELS])
