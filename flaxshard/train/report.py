"""Reports a run: rows of metrics and where they go, and a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import io
import json
import logging
import math
import os
import tempfile
import textwrap
import time
from typing import Any

from etils import epath
import jax
import optax

from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import gradients
from flaxshard.state import describe
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.train import console

_log = logging.getLogger(__name__)

# Of the picture.
_MAX_PANELS = 16
# Of a line of the log: 100 with the time that the log shows in front.
_MAX_COLUMNS = 91
_SHORT_NAMES = {
  "train_loss": "loss",
  "train_accuracy": "acc",
  "loss_scale": "scale",
  "skipped_steps": "skipped",
}

_METRICS_FILE = "metrics.jsonl"

Row = Mapping[str, float | int | None]


def require_packages(writer: str) -> None:
  """Raises an ImportError if what reports a run lacks a package.

  Args:
    writer: `config.writer`.
  """
  with checks.extra("training from a config", "train"):
    import matplotlib  # noqa: F401
    import tqdm  # noqa: F401

    if writer == "tensorboard":
      import tensorboardX  # noqa: F401


def log_state(state: TrainState, *, is_new: bool) -> None:
  """Logs the size of a state and, for a new run, the table of parameters."""
  description = describe.describe(state)
  if description.note:
    _log.warning("%s", description.note)
  if is_new:
    _log.info("parameters:\n%s", describe.describe(state.params))
  size = optax.tree.size
  trained = size(gradients.trained(state.tx, state.params))
  frozen = size(state.params) - trained
  if isinstance(state.apply_fn, lora.Apply):
    frozen += size(state.frozen)
  # The slots of the optimizer are split like their parameters.
  _log.info(
    "%s parameters are trained, %s are frozen; the whole state: %s",
    f"{trained:,}",
    f"{frozen:,}",
    description.summary,
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
    processes. A row is on disk as soon as it is written; in a bucket, with
    `flush` and at the end, because there the whole file is written again.
  """
  if jax.process_index():
    yield lambda step, row, flush=False: None
    return
  with contextlib.ExitStack() as stack:
    stack.callback(draw, config, workdir)
    writers: list[Any] = [MetricsFile(workdir, first_step)]
    if config.writer == "tensorboard":
      writers.append(_Events(workdir, first_step))
    for writer in writers:
      stack.enter_context(contextlib.closing(writer))
    update_bar = stack.enter_context(
      console.progress_bar(first_step, config.num_train_steps)
    )

    def write_row(step: int, row: Row, flush: bool = False) -> None:
      for writer in writers:
        writer.write(step, row, flush or not files.is_bucket(workdir))
      for line in format_row(step, row):
        _log.info("%s", line)
      update_bar(step, row)

    yield write_row


class MetricsFile:
  """Writes `metrics.jsonl`: one JSON object per line.

  JSON has no NaN and no infinity: numbers that are not finite are written as
  null.

  Args:
    workdir: The folder of the file. Rows of steps after `last_step` are
      removed, because a resumed run writes them again.
    last_step: The step that the run continues from.
  """

  def __init__(self, workdir: str, last_step: int):
    kept = read_rows(workdir, last_step)
    self._path = os.path.join(workdir, _METRICS_FILE)
    self._text = "".join(json.dumps(row) + "\n" for row in kept)
    # A crash while the file is rewritten must not lose the earlier rows.
    files.write_text(self._path, self._text)

  def write(self, step: int, row: Row, flush: bool = True) -> None:
    """Appends a row: values by name; in a bucket, on disk with `flush`."""
    finite = {
      key: value if value is None or math.isfinite(value) else None
      for key, value in row.items()
    }
    line = json.dumps({"step": step, **finite}) + "\n"
    if not files.is_bucket(self._path):
      with open(self._path, "a") as f:
        f.write(line)
      return
    # Only here: the rows of a long run take memory.
    self._text += line
    if flush:
      self.close()

  def close(self) -> None:
    """Writes an object in a bucket again: nothing can be appended to it."""
    if files.is_bucket(self._path):
      files.write_text(self._path, self._text)


def read_rows(
  workdir: str, last_step: float = math.inf
) -> list[dict[str, Any]]:
  """Returns the rows of a workdir's `metrics.jsonl`, without broken lines.

  A process that was killed while writing leaves an incomplete last line.

  Args:
    workdir: The folder of the file, which may be missing.
    last_step: Rows of later steps are left out.
  """
  rows = []
  path = epath.Path(os.path.join(workdir, _METRICS_FILE))
  if path.exists():
    # A broken line may have bytes that are not UTF-8.
    with io.TextIOWrapper(path.open("rb"), errors="replace") as f:
      for line in f:
        try:
          row = json.loads(line)
        except json.JSONDecodeError:
          row = None
        # The end of a line that was cut in two may be valid JSON, such as `5`.
        if isinstance(row, dict) and isinstance(row.get("step"), int):
          if row["step"] <= last_step:
            rows.append(row)
        else:
          _log.warning("%s: ignored a broken line: %r", path, line)
  return rows


def read_last_values(workdir: str) -> dict[str, Any]:
  """Returns the last value of each metric of a workdir's `metrics.jsonl`."""
  values: dict[str, Any] = {}
  # The last row need not have every metric.
  for row in read_rows(workdir):
    values |= row
  return values


def format_row(step: int, row: Row) -> list[str]:
  """Returns a row as lines of text, with rounded numbers and short names.

  With the time before it, no line has more than 100 columns. An evaluation has
  a line of its own. `skipped_steps` is left out if no step was skipped.

  Args:
    step: The step of the row.
    row: Values by name; those that are None are left out.

  Example:
    >>> row = {"train_loss": 0.34567, "loss_scale": 2.0**15, "skipped_steps": 0}
    >>> format_row(20, {**row, "eval_loss": 0.45678})
    ['step 20: loss=0.3457 scale=2^15', 'step 20: eval_loss=0.4568']
  """
  lines: list[str] = []
  for is_evaluation in (False, True):
    items = [
      _format_metric(name, value)
      for name, value in row.items()
      if name.startswith("eval_") == is_evaluation
      and value is not None
      and (value or name != "skipped_steps")
    ]
    if items:
      lines += textwrap.wrap(
        f"step {step}: {' '.join(items)}",
        _MAX_COLUMNS,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
      )
  return lines


def _format_metric(name: str, value: float | int) -> str:
  if name == "steps_per_second":
    return f"{value:.3g} steps/s" if value < 100 else f"{value:.0f} steps/s"
  if name.partition("/")[0] == "learning_rate":
    # That of a pattern has the pattern after a slash.
    return f"lr{name.removeprefix('learning_rate')}={value:.3g}"
  if name == "loss_scale" and value >= 2 and math.frexp(value)[0] == 0.5:
    # Nearly always a power of two.
    text = f"2^{math.frexp(value)[1] - 1}"
  else:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
  return f"{_SHORT_NAMES.get(name, name)}={text}"


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

    # EventsWriter has no thread, unlike SummaryWriter. On a full disk that
    # thread dies, and the next write waits for it forever.
    path = os.path.join(workdir, "events")
    self._writer = event_file_writer.EventsWriter(path)
    if first_step:
      # TensorBoard drops events at or after the step of a START event.
      self._write(first_step + 1, session_log={"status": "START"})

  def write(self, step: int, row: Row, flush: bool) -> None:
    """Writes a row of metrics; with `flush` it is on disk then."""
    values = []
    for name, value in row.items():
      if value is not None:
        # TensorBoard groups by the prefix.
        split, _, metric = name.partition("_")
        tag = f"{metric}/{split}" if split in ("train", "eval") else name
        values.append({"tag": tag, "simple_value": value})
    self._write(step, summary={"value": values})
    if flush:
      self._writer.flush()

  def _write(self, step: int, **content: Any) -> None:
    from tensorboardX.proto import event_pb2

    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    self._writer.write_event(event)

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()
    # In a bucket its end uploads once more: now, and not when a traceback that
    # holds the run is collected, perhaps without a connection.
    del self._writer


def draw(config: Any, workdir: str) -> None:
  """Draws `training.png` from `metrics.jsonl`, in process 0.

  A panel has a metric of training and evaluation, or another column of the
  rows, such as the learning rate.

  Args:
    config: The checked config.
    workdir: The folder of the files.
  """
  if jax.process_index():
    return
  # Not pyplot, which picks a GUI backend and keeps every figure alive.
  from matplotlib import figure
  from matplotlib import ticker

  rows = read_rows(workdir)
  panels = _panels(rows)
  lines = max(1, -(-len(panels) // 2))
  canvas = figure.Figure(figsize=(10, 3 * lines), layout="constrained")
  axes = canvas.subplots(lines, 2, sharex=True, squeeze=False).ravel()
  for ax in axes[len(panels) :]:
    ax.remove()
  for (name, keys), ax in zip(panels.items(), axes, strict=False):
    for key in keys:
      points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
      # Markers: a line through a single point would be invisible.
      ax.plot(*zip(*points, strict=True), "o-", ms=2, label=key)
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
  step = rows[-1]["step"] if rows else 0
  name, last_step = os.path.basename(workdir), config.num_train_steps
  canvas.suptitle(f"{name}: step {step} of {last_step}")
  canvas.supxlabel("step (batches consumed)")
  png = io.BytesIO()
  canvas.savefig(png, dpi=100, format="png")
  path = epath.Path(os.path.join(workdir, "training.png"))
  try:
    path.write_bytes(png.getvalue())
  except OSError as e:
    # On a full disk, say, where what has ended the run is to be raised.
    _log.warning("%s cannot be written: %s", path, e)


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


def log_result(
  workdir: str, stopped: str | None = None, level: int = logging.INFO
) -> None:
  """Logs the last metrics and where the files are.

  Args:
    workdir: The folder of the files.
    stopped: Why the run has ended early, if it has.
    level: The level: workers but worker 0 log warnings only.
  """
  if stopped:
    _log.log(level, "%s", stopped)
  final = read_last_values(workdir)
  # Of two lines, the second one is the evaluation.
  for line in format_row(final.pop("step", 0), final)[-1:]:
    _log.log(level, "done: %s", line)
  _log.log(
    level,
    "in %s: checkpoints/, metrics.jsonl, training.png, config.json",
    workdir,
  )


@contextlib.contextmanager
def profile_steps(
  steps: tuple[int, ...], workdir: str
) -> Iterator[Callable[[int, TrainState], None]]:
  """Traces a range of steps with JAX's profiler, in process 0.

  Args:
    steps: The first and the last step to trace, or () for none.
    workdir: The trace is written to its subdirectory `profile/`, that of a
      workdir in a bucket to a new folder on this machine.

  Yields:
    A function `before_step(step, state)`, to be called before each step with
    the state that the step starts from.
  """
  # Traces of processes on one host would overwrite each other.
  first, last = (0, 0) if jax.process_index() else steps or (0, 0)
  path = os.path.join(workdir, "profile")
  if first and files.is_bucket(workdir):
    # The profiler writes to file systems only.
    path = tempfile.mkdtemp(prefix="profile_")
  is_tracing = False
  with contextlib.ExitStack() as trace:

    def before_step(step: int, state: TrainState) -> None:
      nonlocal is_tracing
      # A run may resume within the range, and a worker may jump over its ends.
      wanted = first <= step <= last
      if wanted == is_tracing:
        return
      is_tracing = wanted
      # Steps are dispatched ahead: let those outside of the range finish.
      jax.block_until_ready(state)
      trace.close()
      if wanted:
        trace.callback(_log.info, "profiled from step %d: %s", step, path)
        trace.enter_context(jax.profiler.trace(path))

    # Training may end within the range.
    yield before_step
