"""The rows of a workdir's `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
import io
import json
import logging
import math
import os
import textwrap
from typing import Any

from etils import epath

from flaxshard.core import files

_log = logging.getLogger(__name__)

# 100 with the time that the log shows in front.
_MAX_COLUMNS = 91
_SHORT_NAMES = {
  "train_loss": "loss",
  "train_accuracy": "acc",
  "loss_scale": "scale",
  "skipped_steps": "skipped",
}

FILE = "metrics.jsonl"

Row = Mapping[str, float | int | None]


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
    kept = [row for row in read_rows(workdir) if row["step"] <= last_step]
    self._path = os.path.join(workdir, FILE)
    self._text = "".join(json.dumps(row) + "\n" for row in kept)
    # A crash while the file is rewritten must not lose the earlier rows.
    files.write_text(self._path, self._text)

  def write(self, step: int, row: Row) -> None:
    """Appends a row: values by name."""
    finite = {
      key: value if value is None or math.isfinite(value) else None
      for key, value in row.items()
    }
    line = json.dumps({"step": step, **finite}) + "\n"
    # An object in a bucket cannot be appended to.
    if files.is_bucket(self._path):
      self._text += line
      return
    with open(self._path, "a") as f:
      f.write(line)

  def flush(self) -> None:
    """Writes the object in a bucket again; a killed process loses its rows."""
    if files.is_bucket(self._path):
      files.write_text(self._path, self._text)

  def close(self) -> None:
    """Flushes the file."""
    self.flush()


def read_rows(workdir: str) -> list[dict[str, Any]]:
  """Returns the rows of a workdir's `metrics.jsonl`, without broken lines.

  A process that was killed while writing leaves an incomplete last line.

  Args:
    workdir: The folder of the file, which may be missing.
  """
  rows = []
  path = epath.Path(os.path.join(workdir, FILE))
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
