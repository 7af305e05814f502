"""`training.png`: the metrics of a run, drawn over its steps."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from etils import epath

_BLUE, _ORANGE, _RED = "#3060a0", "#c05020", "#c02020"
# Points up to which each of them has a marker.
_MAX_MARKED = 30
_MAX_METRICS = 8
# Panels that are drawn if rows have the key.
_PANELS = {
  "learning rate": "learning_rate",
  "steps per second": "steps_per_second",
  "loss scale": "loss_scale",
  "commits": "commits",
  "workers in the last commit": "commit_workers",
  "staleness of commits": "commit_staleness",
  "MB sent by commits": "commit_megabytes",
  "seconds per commit": "commit_seconds",
}


def require_packages(writer: str) -> None:
  """Raises an ImportError if what reports a run lacks a package.

  Args:
    writer: The name of the event writer; see `events.event_writer`.
  """
  packages = {"training.png": "matplotlib", "the progress bar": "tqdm"}
  if writer == "tensorboard":
    packages["config.writer='tensorboard'"] = "tensorboardX"
  for feature, package in packages.items():
    if importlib.util.find_spec(package) is None:
      raise ImportError(
        f"{feature} needs {package}, not installed: "
        "pip install 'flaxshard[train]'"
      )


def plot(rows: list[dict[str, Any]], path: str, title: str = "") -> None:
  """Draws the metrics over the steps into a PNG file.

  There are panels of the metrics of training and evaluation, the learning rate
  and the speed, and of the loss scale and AGN's commits where rows have them:
  of commits to a store, the workers, staleness, megabytes and seconds.
  Rows in which updates were skipped are marked on the loss scale.

  Args:
    rows: Rows of a `metrics.jsonl`.
    path: The file to write.
    title: The title of the plot.
  """
  # Not pyplot, which picks a GUI backend and keeps every figure alive.
  from matplotlib import figure
  from matplotlib import ticker

  metrics = _metric_names(rows)
  others = [name for name, key in _PANELS.items() if _points(rows, key)[0]]
  names = [*metrics, *others]
  lines = -(-len(names) // 2)
  canvas = figure.Figure(figsize=(10, 3 * lines), layout="constrained")
  axes = canvas.subplots(lines, 2, sharex=True, squeeze=False).ravel()
  for ax in axes[len(names) :]:
    ax.remove()
  for name, ax in zip(names, axes, strict=False):
    if name in metrics:
      _draw(ax, rows, f"train_{name}", _BLUE)
      _draw(ax, rows, f"eval_{name}", _ORANGE)
    elif name == "loss scale":
      _draw(ax, rows, "loss_scale", _BLUE, drawstyle="steps-post")
      _mark_skipped(ax, rows)
      ax.set_yscale("log", base=2)
    else:
      _draw(ax, rows, _PANELS[name], _BLUE)
      # A constant is not drawn as if its last digits were of interest.
      ax.set_ylim(bottom=0)
    if len(ax.lines) > 1 or (name in metrics and ax.lines):
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


def _draw(
  ax: Any, rows: list[dict[str, Any]], key: str, color: str, **kwargs: Any
) -> None:
  """Draws a metric as a line, with a marker at each of a few points."""
  steps, values = _points(rows, key)
  if steps:
    # A line through a single point would be invisible.
    style = "o-" if len(steps) <= _MAX_MARKED else "-"
    ax.plot(steps, values, style, color=color, ms=4, label=key, **kwargs)


def _mark_skipped(ax: Any, rows: list[dict[str, Any]]) -> None:
  """Marks the loss scale of rows in which steps were skipped."""
  # `skipped_steps` is a total: a row with a larger one has skipped some.
  steps, totals = _points(rows, "skipped_steps")
  pairs = zip(steps, [0, *totals], totals, strict=False)
  skipping = {step for step, before, now in pairs if now > before}
  marked = [row for row in rows if row["step"] in skipping]
  if marked:
    label = f"skipped steps ({totals[-1]} in all)"
    ax.plot(*_points(marked, "loss_scale"), "v", color=_RED, label=label)
