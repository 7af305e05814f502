"""Reports the progress of a run: files, log lines and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import importlib.util
import logging
import os
import time
from typing import Any

import jax

from flaxshard.core import files
from flaxshard.train import charts
from flaxshard.train import console
from flaxshard.train import metrics as metrics_lib

_log = logging.getLogger(__name__)


def require_packages(writer: str) -> None:
  """Raises an ImportError if what reports a run lacks a package.

  Args:
    writer: `config.writer`.
  """
  for package in ("matplotlib", "tqdm", "tensorboardX"):
    is_used = package != "tensorboardX" or writer == "tensorboard"
    if is_used and importlib.util.find_spec(package) is None:
      raise ImportError(
        f"training from a config needs {package}, not installed: "
        "pip install 'flaxshard[train]'"
      )


@contextlib.contextmanager
def open_report(
  config: Any, workdir: str, first_step: int
) -> Iterator[Callable[..., None]]:
  """Opens everything that a row of metrics is written to.

  That is `metrics.jsonl`, TensorBoard events, the log, and a progress bar on a
  terminal and in a notebook. At the end `training.png` is drawn, also of a run
  that is interrupted or raises. Process 0 does this for all processes.

  Args:
    config: The checked config.
    workdir: The folder of the files.
    first_step: The step that the run continues from, 0 for a new one.

  Yields:
    A function `write_row(step, row, flush=False)`; it does nothing in other
    processes. Rows of a workdir in a bucket are written there with `flush`,
    and at the end.
  """
  if jax.process_index():
    yield lambda step, row, flush=False: None
    return
  with contextlib.ExitStack() as stack:
    stack.callback(draw, config, workdir)
    path = metrics_lib.metrics_path(workdir)
    writers: list[Any] = [metrics_lib.MetricsFile(path, first_step)]
    if config.writer == "tensorboard":
      writers.append(_Events(workdir, first_step))
    for writer in writers:
      stack.enter_context(contextlib.closing(writer))
    update_bar = stack.enter_context(
      console.progress_bar(first_step, config.num_train_steps)
    )

    def write_row(step: int, row: metrics_lib.Row, flush: bool = False) -> None:
      for writer in writers:
        writer.write(step, row, flush)
      for line in metrics_lib.format_row(step, row):
        _log.info("%s", line)
      update_bar(step, row)

    yield write_row


class _Events:
  """A file of TensorBoard events, written by tensorboardX.

  The metrics of training and evaluation are side by side: their tags are
  `loss/train` and `loss/eval`.

  Args:
    workdir: The folder of the file.
    first_step: The step that the run continues from. TensorBoard drops the
      events of later steps that an earlier run wrote.
  """

  def __init__(self, workdir: str, first_step: int):
    from tensorboardX import event_file_writer
    from tensorboardX.proto import event_pb2

    # EventsWriter has no thread, unlike SummaryWriter. On a full disk that
    # thread dies, and the next write waits for it forever.
    self._events = event_file_writer.EventsWriter(
      os.path.join(workdir, "events")
    )
    # In a bucket, tensorboardX writes the whole file at each flush.
    self._is_in_bucket = files.is_bucket(workdir)
    if first_step:
      # TensorBoard drops events at or after the step of a START event.
      start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
      self._write(first_step + 1, session_log=start)

  def _write(self, step: int, **content: Any) -> None:
    from tensorboardX.proto import event_pb2

    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    self._events.write_event(event)

  def write(self, step: int, row: metrics_lib.Row, flush: bool = False) -> None:
    """Writes a row of metrics."""
    from tensorboardX.proto import summary_pb2

    values = []
    for name, value in row.items():
      if value is not None:
        # TensorBoard groups by the prefix.
        split, _, metric = name.partition("_")
        tag = f"{metric}/{split}" if split in ("train", "eval") else name
        value = summary_pb2.Summary.Value(tag=tag, simple_value=value)
        values.append(value)
    self._write(step, summary=summary_pb2.Summary(value=values))
    if flush or not self._is_in_bucket:
      self._events.flush()

  def close(self) -> None:
    """Closes the file."""
    self._events.close()


def draw(config: Any, workdir: str) -> None:
  """Draws `training.png` from `metrics.jsonl`, in process 0."""
  if jax.process_index():
    return
  rows = metrics_lib.read_rows(metrics_lib.metrics_path(workdir))
  step = rows[-1]["step"] if rows else 0
  name, last_step = os.path.basename(workdir), config.num_train_steps
  title = f"{name}: step {step} of {last_step}"
  charts.plot(rows, os.path.join(workdir, "training.png"), title)


def log_result(workdir: str, level: int = logging.INFO) -> None:
  """Logs the last metrics and where the files are, in process 0.

  Args:
    workdir: The folder of the files.
    level: The level: workers but worker 0 log warnings only.
  """
  if jax.process_index():
    return
  final = metrics_lib.read_last_values(metrics_lib.metrics_path(workdir))
  # Of two lines, the second one is the evaluation.
  for line in metrics_lib.format_row(final.pop("step", 0), final)[-1:]:
    _log.log(level, "done: %s", line)
  _log.log(
    level,
    "in %s: checkpoints/, metrics.jsonl, training.png, config.json",
    workdir,
  )
