"""Reports the progress of a run: files, log lines and a progress bar."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import logging
import os
from typing import Any

import jax

from flaxshard.core import multihost
from flaxshard.train import charts
from flaxshard.train import console
from flaxshard.train import metrics as metrics_lib

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_report(
  workdir: str, writer: str, first_step: int, num_train_steps: int
) -> Iterator[charts.WriteRow]:
  """Opens everything that a row of metrics is written to.

  That is `metrics.jsonl`, TensorBoard events, the log, and a progress bar on a
  terminal and in a notebook.

  Args:
    workdir: The folder of the files.
    writer: The name of the event writer; see `charts.event_writer`.
    first_step: The step that the run continues from, 0 for a new one.
    num_train_steps: The last step.

  Yields:
    A function `write_row(step, row)`. An OSError in one process is raised in
    all of them.
  """
  metrics_file = metrics_lib.MetricsFile(
    metrics_lib.metrics_path(workdir), first_step
  )
  with contextlib.ExitStack() as stack:
    stack.enter_context(metrics_lib.close_on_exit(metrics_file.close))
    write_events, close_events = charts.event_writer(
      writer, workdir, first_step
    )
    stack.enter_context(metrics_lib.close_on_exit(close_events))
    update_bar = stack.enter_context(
      console.progress_bar(first_step, num_train_steps)
    )

    def write_row(step: int, row: metrics_lib.Row) -> None:
      # Otherwise the processes without the error would wait for this one.
      with multihost.raise_on_all_processes(OSError):
        metrics_file.write(step, row)
        write_events(step, row)
      for line in metrics_lib.format_row(step, row):
        _log.info("%s", line)
      update_bar(step, row)

    yield write_row


def finish(workdir: str) -> None:
  """Draws `training.png` and logs the last metrics, from process 0."""
  if jax.process_index():
    return
  rows = metrics_lib.read_rows(metrics_lib.metrics_path(workdir))
  charts.plot(rows, os.path.join(workdir, "training.png"))
  # The last row need not have every metric.
  final: dict[str, Any] = {}
  for row in rows:
    final |= row
  # Of two lines, the second one is the evaluation.
  for line in metrics_lib.format_row(final.pop("step", 0), final)[-1:]:
    _log.info("done: %s", line)
  _log.info(
    "in %s: checkpoints/, metrics.jsonl, training.png, config.json", workdir
  )
