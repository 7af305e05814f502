"""Charts of the metrics: TensorBoard events and `training.png`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import importlib.util
import os
import time
from typing import Any

from flaxshard.train import metrics as metrics_lib

Row = Mapping[str, float | int | None]
WriteRow = Callable[[int, Row], None]

_INSTALL = "pip install 'flaxshard[train]'"


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
    writer: The name of the event writer; see `event_writer`.
  """
  require("training.png", "matplotlib")
  if writer == "tensorboard":
    require("config.writer='tensorboard'", "tensorboardX")
  elif writer == "clu":
    for package in ("tensorflow", "tensorboard"):
      remedy = "pip install tensorflow tensorboard"
      require("config.writer='clu'", package, remedy)


def event_writer(
  name: str, workdir: str, last_step: int = 0
) -> tuple[WriteRow, Callable[[], None]]:
  """Opens a file of TensorBoard events.

  Args:
    name: `"tensorboard"` (tensorboardX, without TensorFlow), `"clu"`
      (`clu.metric_writers`, which needs TensorFlow), or `"none"`.
    workdir: The folder of the event file.
    last_step: The step that the run continues from. TensorBoard drops the
      events of later steps that an earlier run wrote.

  Returns:
    A function `write(step, row)`, and a function that closes the file.

  Raises:
    ImportError: The package is not installed.
  """
  require_packages(name)
  if name == "none":
    return (lambda step, row: None), (lambda: None)
  if name == "clu":
    from clu import metric_writers

    writer = metric_writers.create_default_writer(workdir, asynchronous=False)
    write_clu = lambda step, row: writer.write_scalars(step, _numbers(row))
    return write_clu, writer.close
  return _tensorboard_writer(workdir, last_step)


def _tensorboard_writer(
  workdir: str, last_step: int
) -> tuple[WriteRow, Callable[[], None]]:
  from tensorboardX import event_file_writer
  from tensorboardX.proto import event_pb2
  from tensorboardX.proto import summary_pb2

  # EventsWriter has no thread, unlike SummaryWriter. On a full disk that thread
  # dies, and the next write waits for it forever.
  events = event_file_writer.EventsWriter(os.path.join(workdir, "events"))
  # The full file name has a time stamp; errors name its constant part.
  path = os.path.join(workdir, "events.out.tfevents")

  def write_event(step: int, **content: Any) -> None:
    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    events.write_event(event)

  if last_step:
    # TensorBoard drops events at or after the step of a START event.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    write_event(last_step + 1, session_log=start)

  def write(step: int, row: Row) -> None:
    values = [
      summary_pb2.Summary.Value(tag=key, simple_value=number)
      for key, number in _numbers(row).items()
    ]
    with metrics_lib.add_filename_to_oserror(path):
      write_event(step, summary=summary_pb2.Summary(value=values))
      events.flush()

  def close() -> None:
    with metrics_lib.add_filename_to_oserror(path):
      events.close()

  return write, close


def _numbers(row: Row) -> dict[str, float | int]:
  return {key: value for key, value in row.items() if value is not None}


def plot(rows: list[dict[str, Any]], path: str) -> None:
  """Draws loss, accuracy and loss scale over the steps into a PNG file.

  Steps at which updates were skipped are marked on the loss scale.

  Args:
    rows: Rows of a `metrics.jsonl`.
    path: The file to write.
  """
  # Not pyplot, which picks a GUI backend and keeps every figure alive.
  from matplotlib import figure
  from matplotlib import ticker

  has_scale = any(row.get("loss_scale") is not None for row in rows)
  canvas = figure.Figure(
    figsize=(8, 9 if has_scale else 6.2), layout="constrained"
  )
  axes = canvas.subplots(3 if has_scale else 2, 1, sharex=True)
  for ax, name in zip(axes[:2], ("loss", "accuracy"), strict=True):
    train = _points(rows, f"train_{name}")
    ax.plot(*train, color="#3060a0", label=f"train_{name}")
    # Evaluations are few: mark each of them.
    held_out = _points(rows, f"eval_{name}")
    ax.plot(*held_out, "o-", color="#c05020", ms=4, label=f"eval_{name}")
    ax.set_ylabel(name)
    ax.legend(frameon=False)
  if has_scale:
    _plot_loss_scale(axes[2], rows)
  for ax in axes:
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
  axes[-1].set_xlabel("step (batches consumed)")
  axes[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  with metrics_lib.add_filename_to_oserror(path):
    canvas.savefig(path, dpi=120)


def _points(rows: list[dict[str, Any]], key: str) -> tuple[list, list]:
  """Returns the steps and the values of the rows that have a key."""
  points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
  return [step for step, _ in points], [value for _, value in points]


def _plot_loss_scale(ax: Any, rows: list[dict[str, Any]]) -> None:
  steps, scales = _points(rows, "loss_scale")
  ax.step(steps, scales, where="post", color="#3060a0", label="loss_scale")
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
    # More than 30 numbers would cover each other.
    for step, scale, count in marks if len(marks) <= 30 else ():
      ax.annotate(
        f"{count}",
        (step, scale),
        textcoords="offset points",
        xytext=(0, -13),
        ha="center",
        fontsize=8,
      )
  ax.margins(y=0.25)
  ax.set_ylabel("loss scale")
  ax.legend(frameon=False)
