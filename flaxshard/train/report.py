"""Reports the progress of a run: files, log lines and a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import json
import logging
import os
from typing import Any

import jax

from flaxshard.train import charts
from flaxshard.train import console
from flaxshard.train import events
from flaxshard.train import metrics as metrics_lib

_log = logging.getLogger(__name__)


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
    stack.enter_context(
      metrics_lib.close_on_exit(lambda: draw(config, workdir))
    )
    metrics_file = metrics_lib.MetricsFile(
      metrics_lib.metrics_path(workdir), first_step
    )
    stack.enter_context(metrics_lib.close_on_exit(metrics_file.close))
    write_events, close_events = events.event_writer(
      config.writer, workdir, first_step, json.loads(config.to_json())
    )
    stack.enter_context(metrics_lib.close_on_exit(close_events))
    update_bar = stack.enter_context(
      console.progress_bar(first_step, config.num_train_steps)
    )

    def write_row(step: int, row: metrics_lib.Row, flush: bool = False) -> None:
      metrics_file.write(step, row, flush)
      write_events(step, row, flush)
      for line in metrics_lib.format_row(step, row):
        _log.info("%s", line)
      update_bar(step, row)

    yield write_row


def draw(config: Any, workdir: str) -> None:
  """Draws `training.png` from `metrics.jsonl`, in process 0."""
  if jax.process_index():
    return
  rows = metrics_lib.read_rows(metrics_lib.metrics_path(workdir))
  what = config.model.get("name")
  if what is None:
    what = config.task if isinstance(config.task, str) else config.task.name
  title = f"{os.path.basename(workdir)}: {what}"
  if config.data:
    title += f" on {config.data.name}"
  last_step = rows[-1]["step"] if rows else 0
  if last_step < config.num_train_steps:
    title += f", step {last_step} of {config.num_train_steps}"
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
