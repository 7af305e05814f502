"""`training.png`: the metrics of a run, drawn over its steps."""

from __future__ import annotations

import io
from typing import Any

from etils import epath

_BLUE, _ORANGE = "#3060a0", "#c05020"
# Points up to which each of them has a marker.
_MAX_MARKED = 30
_MAX_METRICS = 8
# Panels that are drawn if rows have the key.
_PANELS = {
  "learning rate": "learning_rate",
  "steps per second": "steps_per_second",
  "loss scale": "loss_scale",
  "skipped steps": "skipped_steps",
  "commits": "commits",
  "workers in the last commit": "commit_workers",
  "staleness of commits": "commit_staleness",
  "MB sent by commits": "commit_megabytes",
  "seconds per commit": "commit_seconds",
}


def plot(rows: list[dict[str, Any]], path: str, title: str = "") -> None:
  """Draws the metrics over the steps into a PNG file.

  There are panels of the metrics of training and evaluation, the learning rate
  and the speed, and of the loss scale, the skipped steps and AGN's commits
  where rows have them: of commits to a store, the workers, staleness, megabytes
  and seconds.

  Args:
    rows: Rows of a `metrics.jsonl`.
    path: The file to write.
    title: The title of the plot.
  """
  # Not pyplot, which picks a GUI backend and keeps every figure alive.
  from matplotlib import figure
  from matplotlib import ticker

  metrics = _metric_names(rows)
  # Panel by name: the key and the color of each line.
  panels = {
    name: {f"train_{name}": _BLUE, f"eval_{name}": _ORANGE} for name in metrics
  }
  for name, key in _PANELS.items():
    values = _points(rows, key)[1]
    # A run without skipped steps has no panel of them.
    if any(values) if key == "skipped_steps" else values:
      panels[name] = {key: _BLUE}
  lines = -(-len(panels) // 2)
  canvas = figure.Figure(figsize=(10, 3 * lines), layout="constrained")
  axes = canvas.subplots(lines, 2, sharex=True, squeeze=False).ravel()
  for ax in axes[len(panels) :]:
    ax.remove()
  for (name, colors), ax in zip(panels.items(), axes, strict=False):
    for key, color in colors.items():
      steps, values = _points(rows, key)
      if steps:
        # A line through a single point would be invisible.
        style = "o-" if len(steps) <= _MAX_MARKED else "-"
        ax.plot(steps, values, style, color=color, ms=4, label=key)
    if name == "loss scale":
      ax.set_yscale("log", base=2)
    elif name not in metrics:
      # A constant is not drawn as if its last digits were of interest.
      ax.set_ylim(bottom=0)
    elif ax.lines:
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


def _metric_names(rows: list[dict[str, Any]]) -> list[str]:
  """Returns the metrics to draw: the loss, the accuracy, and then others."""
  prefixes = ("train_", "eval_")
  names = [
    key.removeprefix(prefix)
    for row in rows
    for key in row
    for prefix in prefixes
    if key.startswith(prefix)
  ]
  first = [name for name in ("loss", "accuracy") if name in names]
  return list(dict.fromkeys([*first, *names]))[:_MAX_METRICS] or ["loss"]


def _points(rows: list[dict[str, Any]], key: str) -> tuple[list, list]:
  """Returns the steps and the values of the rows that have a key."""
  points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
  return [step for step, _ in points], [value for _, value in points]
