"""`training.png`: the metrics of a run, drawn over its steps."""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from flaxshard.core import files

_INSTALL = "pip install 'flaxshard[train]'"
_BLUE, _ORANGE = "#3060a0", "#c05020"
# Points up to which each of them has a marker.
_MAX_MARKED = 30
_MAX_METRICS = 8
# Panels that are drawn if rows have the key.
_OPTIONAL_PANELS = {
  "loss scale": "loss_scale",
  "commits": "commits",
  "workers in the last commit": "commit_workers",
  "staleness of commits": "commit_staleness",
  "MB sent by commits": "commit_megabytes",
  "seconds per commit": "commit_seconds",
}


def require(feature: str, package: str, remedy: str = _INSTALL) -> None:
  """Raises an ImportError with the remedy if a package is not installed.

  Args:
    feature: What needs the package, for the message.
    package: The name to import.
    remedy: The command that installs it.
  """
  if importlib.util.find_spec(package) is None:
    raise ImportError(f"{feature} needs {package}, not installed: {remedy}")


def require_packages(writer: str) -> None:
  """Raises an ImportError if the plot or an event writer lacks a package.

  Args:
    writer: The name of the event writer; see `events.event_writer`.
  """
  require("training.png", "matplotlib")
  if writer == "tensorboard":
    require("config.writer='tensorboard'", "tensorboardX")
  elif writer == "clu":
    for package in ("tensorflow", "tensorboard"):
      remedy = "pip install tensorflow tensorboard"
      require("config.writer='clu'", package, remedy)


def plot(rows: list[dict[str, Any]], path: str, title: str = "") -> None:
  """Draws the metrics over the steps into a PNG file.

  There are panels of the metrics of training and evaluation, the learning rate
  and the speed, and of the loss scale and AGN's commits where rows have them:
  of commits from host to host, the workers, staleness, megabytes and seconds.
  Steps at which updates were skipped are marked on the loss scale.

  Args:
    rows: Rows of a `metrics.jsonl`.
    path: The file to write.
    title: The title of the plot.
  """
  # Not pyplot, which picks a GUI backend and keeps every figure alive.
  from matplotlib import figure
  from matplotlib import ticker

  metrics = _metric_names(rows)
  others = ["learning rate", "steps per second"]
  others += [
    panel for panel, key in _OPTIONAL_PANELS.items() if _points(rows, key)[0]
  ]
  # One panel alone is as wide as two.
  panels: Any = [
    [group[i], group[min(i + 1, len(group) - 1)]]
    for group in (metrics, others)
    for i in range(0, len(group), 2)
  ]
  canvas = figure.Figure(figsize=(10, 3 * len(panels)), layout="constrained")
  axes: dict[str, Any] = canvas.subplot_mosaic(panels, sharex=True)
  canvas.suptitle(title)
  for name in metrics:
    _draw(axes[name], rows, f"train_{name}", _BLUE)
    _draw(axes[name], rows, f"eval_{name}", _ORANGE, marked=True)
    if axes[name].lines:
      axes[name].legend(frameon=False)
  for name in ("learning rate", "steps per second", *_OPTIONAL_PANELS):
    if name in axes and name != "loss scale":
      key = _OPTIONAL_PANELS.get(name, name.replace(" ", "_"))
      _draw(axes[name], rows, key, _BLUE)
      # A constant is not drawn as if its last digits were of interest.
      axes[name].set_ylim(bottom=0)
  if "loss scale" in axes:
    _draw_loss_scale(axes["loss scale"], rows)
  for name, ax in axes.items():
    ax.set_ylabel(name)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    # A wide panel below has other distances than the two above it.
    ax.tick_params(labelbottom=True)
  for name in set(panels[-1]):
    axes[name].set_xlabel("step (batches consumed)")
  png = io.BytesIO()
  canvas.savefig(png, dpi=100, format="png")
  with files.add_filename_to_oserror(path):
    files.write_bytes(path, png.getvalue())


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
  ax: Any,
  rows: list[dict[str, Any]],
  key: str,
  color: str,
  *,
  marked: bool = False,
  **kwargs: Any,
) -> None:
  """Draws a metric as a line, with a marker at each of a few points."""
  steps, values = _points(rows, key)
  if not steps:
    return
  # A line through a single point would be invisible.
  style = "o-" if marked or len(steps) <= _MAX_MARKED else "-"
  ax.plot(steps, values, style, color=color, ms=4, label=key, **kwargs)


def _draw_loss_scale(ax: Any, rows: list[dict[str, Any]]) -> None:
  _draw(ax, rows, "loss_scale", _BLUE, drawstyle="steps-post")
  ax.set_yscale("log", base=2)
  # `skipped_steps` is a total: a row with a larger one has skipped some.
  total, marks = 0, []
  for row in rows:
    skipped = row.get("skipped_steps")
    if skipped is None:
      continue
    if skipped > total and row.get("loss_scale") is not None:
      marks.append((row["step"], row["loss_scale"], skipped - total))
    total = skipped
  if marks:
    ax.plot(
      [step for step, _, _ in marks],
      [scale for _, scale, _ in marks],
      "v",
      color="#c02020",
      label=f"skipped steps ({total} in all)",
    )
    # More numbers would cover each other.
    for step, scale, count in marks if len(marks) <= _MAX_MARKED else ():
      ax.annotate(
        f"{count}",
        (step, scale),
        textcoords="offset points",
        xytext=(0, -13),
        ha="center",
        fontsize=8,
      )
    ax.legend(frameon=False)
  ax.margins(y=0.25)
