"""Where metrics go: `metrics.jsonl`, TensorBoard events, a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import importlib.util
import json
import logging
import math
import os
import time
from typing import Any, IO

_log = logging.getLogger(__name__)

Row = dict[str, float | int | None]
Write = Callable[[int, Mapping[str, float | int | None]], None]


class MetricsFile:
  """`metrics.jsonl`: one JSON object a line, on disk as soon as it is written.

  A number that is not finite is written as null, which JSON can hold.

  Args:
    path: The file. Rows of later steps than `last_step` are dropped: a resumed
      run writes them again.
    last_step: The step that the run goes on from.
  """

  def __init__(self, path: str, last_step: int):
    kept = [row for row in read_rows(path) if row["step"] <= last_step]
    with atomic_write(path) as f:
      f.writelines(json.dumps(row) + "\n" for row in kept)
    self._path = path
    self._file = open(path, "a")

  def write(self, step: int, values: Mapping[str, float | int | None]) -> None:
    """Appends a row."""
    row = {"step": step, **{k: _finite(v) for k, v in values.items()}}
    with add_filename_to_oserror(self._path):
      self._file.write(json.dumps(row) + "\n")
      self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    with add_filename_to_oserror(self._path):
      self._file.close()


def read_rows(path: str) -> list[dict[str, Any]]:
  """Returns the rows of a `metrics.jsonl`; a line cut short is left out."""
  rows = []
  if os.path.exists(path):
    with open(path, errors="replace") as f:
      for line in f:
        try:
          row = json.loads(line)
        except json.JSONDecodeError:
          row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
          rows.append(row)
        else:
          _log.warning("%s: left out a broken line: %r", path, line)
  return rows


def event_writer(
  name: str, workdir: str, last_step: int = 0
) -> tuple[Write, Callable[[], None]]:
  """Returns how to write scalars for TensorBoard, and how to close it.

  Args:
    name: `"tensorboard"` (tensorboardX, without TensorFlow), `"clu"`
      (`clu.metric_writers`, which needs TensorFlow), or `"none"`.
    workdir: Where the events go.
    last_step: The step that the run goes on from; TensorBoard drops what an
      earlier run wrote of later ones.

  Raises:
    ImportError: The package is not installed.
  """
  require_packages(name)
  if name == "none":
    return (lambda step, values: None), (lambda: None)
  if name == "clu":
    from clu import metric_writers

    writer = metric_writers.create_default_writer(workdir, asynchronous=False)
    write_clu = lambda step, v: writer.write_scalars(step, _numbers(v))
    return write_clu, writer.close
  from tensorboardX import event_file_writer
  from tensorboardX.proto import event_pb2
  from tensorboardX.proto import summary_pb2

  # Without the thread of a SummaryWriter: on a full disk it ends, and what is
  # written next waits for it, for ever.
  events = event_file_writer.EventsWriter(os.path.join(workdir, "events"))
  named = os.path.join(workdir, "events.out.tfevents")

  def add(step: int, **what: Any) -> None:
    event = event_pb2.Event(wall_time=time.time(), step=step, **what)
    events.write_event(event)

  if last_step:
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    add(last_step + 1, session_log=start)

  def write(step: int, values: Mapping[str, float | int | None]) -> None:
    value = [
      summary_pb2.Summary.Value(tag=key, simple_value=number)
      for key, number in _numbers(values).items()
    ]
    with add_filename_to_oserror(named):
      add(step, summary=summary_pb2.Summary(value=value))
      events.flush()

  def close() -> None:
    with add_filename_to_oserror(named):
      events.close()

  return write, close


@contextlib.contextmanager
def add_filename_to_oserror(path: str) -> Iterator[None]:
  """Has an OSError name the file: that of a full disk does not."""
  try:
    yield
  except OSError as e:
    if e.filename is None:
      e.filename = path
    raise


@contextlib.contextmanager
def atomic_write(path: str) -> Iterator[IO[str]]:
  """Opens a file that takes its name only when it is whole."""
  fresh = f"{path}.tmp"
  with add_filename_to_oserror(fresh), open(fresh, "w") as f:
    yield f
  os.replace(fresh, path)


@contextlib.contextmanager
def close_on_exit(close: Callable[[], None]) -> Iterator[None]:
  """Closes a file in the end; of two errors, the one that came first is raised.

  Args:
    close: Closes it.
  """
  try:
    yield
  except BaseException:
    try:
      close()
    except OSError as e:
      _log.error("%s", e)
    raise
  close()


def require_packages(writer: str) -> None:
  """Raises an ImportError unless there is what a run writes its metrics with.

  Args:
    writer: The name of an event writer.
  """
  require("training.png", "matplotlib")
  if writer == "tensorboard":
    require("config.writer='tensorboard'", "tensorboardX")
  elif writer == "clu":
    for package in ("tensorflow", "tensorboard"):
      remedy = "pip install tensorflow tensorboard"
      require("config.writer='clu'", package, remedy)


_TRAIN = "pip install 'flaxshard[train]'"


def require(what: str, package: str, remedy: str = _TRAIN) -> None:
  """Raises an ImportError that says how to get a package, unless it is here."""
  if importlib.util.find_spec(package) is None:
    raise ImportError(f"{what} needs {package}, not installed: {remedy}")


def plot(rows: list[dict[str, Any]], path: str) -> None:
  """Draws loss, accuracy and loss scale over steps into a PNG.

  Steps in whose interval an update was skipped are marked on the loss scale.

  Args:
    rows: The rows of a `metrics.jsonl`.
    path: The file to write.
  """
  from matplotlib import figure
  from matplotlib import ticker

  def series(key: str) -> tuple[list[float], list[float]]:
    points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]

  scaled = any(r.get("loss_scale") is not None for r in rows)
  height = 9 if scaled else 6.2
  canvas = figure.Figure(figsize=(8, height), layout="constrained")
  axes = canvas.subplots(3 if scaled else 2, 1, sharex=True)
  for ax, name in zip(axes[:2], ("loss", "accuracy"), strict=True):
    ax.plot(*series(f"train_{name}"), color="#3060a0", label=f"train_{name}")
    held_out = series(f"eval_{name}")
    # Evaluations are few: a marker each.
    ax.plot(*held_out, "o-", color="#c05020", ms=4, label=f"eval_{name}")
    ax.set_ylabel(name)
    ax.legend(frameon=False)
  if scaled:
    ax = axes[2]
    steps, scales = series("loss_scale")
    ax.step(steps, scales, where="post", color="#3060a0", label="loss_scale")
    ax.set_yscale("log", base=2)
    before, marked = 0, []
    for row in rows:
      total = row.get("skipped_steps")
      if total is not None:
        if total > before and row.get("loss_scale") is not None:
          marked.append((row["step"], row["loss_scale"], total - before))
        before = total
    if marked:
      ax.plot(
        [m[0] for m in marked],
        [m[1] for m in marked],
        "v",
        color="#c02020",
        label=f"skipped steps ({before} in all)",
      )
      # Where there are many, the numbers would cover each other.
      for step, scale, count in marked if len(marked) <= 30 else ():
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
  for ax in axes:
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
  axes[-1].set_xlabel("step (batches consumed)")
  axes[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  with add_filename_to_oserror(path):
    canvas.savefig(path, dpi=120)


def _numbers(
  values: Mapping[str, float | int | None],
) -> dict[str, float | int]:
  return {k: v for k, v in values.items() if v is not None}


def _finite(value: float | int | None) -> float | int | None:
  return value if value is None or math.isfinite(value) else None
