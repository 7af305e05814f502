"""TensorBoard events: the metrics and the config of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import json
import os
import time
from typing import Any

from flaxshard.core import files
from flaxshard.train import charts
from flaxshard.train import metrics as metrics_lib

WriteRow = Callable[..., None]


def event_writer(
  name: str,
  workdir: str,
  last_step: int = 0,
  config: Mapping[str, Any] | None = None,
) -> tuple[WriteRow, Callable[[], None]]:
  """Opens a file of TensorBoard events.

  The metrics of training and evaluation are side by side: their tags are
  `loss/train` and `loss/eval`. The config is the text `config`, and its fields
  are the hyperparameters of the run.

  Args:
    name: `"tensorboard"` (tensorboardX, without TensorFlow) or `"none"`.
    workdir: The folder of the event file.
    last_step: The step that the run continues from. TensorBoard drops the
      events of later steps that an earlier run wrote.
    config: The config, of plain values, lists and dicts.

  Returns:
    A function `write(step, row, flush=False)`, and a function that closes the
    file. In a bucket, tensorboardX writes the whole file with `flush` alone.

  Raises:
    ImportError: The package is not installed.
  """
  charts.require_packages(name)
  if name == "none":
    return (lambda step, row, flush=False: None), (lambda: None)
  from tensorboardX import event_file_writer
  from tensorboardX import summary
  from tensorboardX.proto import event_pb2
  from tensorboardX.proto import summary_pb2

  # EventsWriter has no thread, unlike SummaryWriter. On a full disk that thread
  # dies, and the next write waits for it forever.
  events = event_file_writer.EventsWriter(os.path.join(workdir, "events"))

  def write_event(step: int, **content: Any) -> None:
    event = event_pb2.Event(wall_time=time.time(), step=step, **content)
    events.write_event(event)

  if last_step:
    # TensorBoard drops events at or after the step of a START event.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    write_event(last_step + 1, session_log=start)
  if config:
    # The third summary says that the session has ended.
    hparams = summary.hparams(_flatten(config), {"loss/eval": 0})[:2]
    for content in (summary.text("config", _to_markdown(config)), *hparams):
      write_event(last_step, summary=content)

  in_bucket = files.is_bucket(workdir)

  def write(step: int, row: metrics_lib.Row, flush: bool = False) -> None:
    values = [
      summary_pb2.Summary.Value(tag=tag, simple_value=number)
      for tag, number in _scalars(row).items()
    ]
    write_event(step, summary=summary_pb2.Summary(value=values))
    if flush or not in_bucket:
      events.flush()

  return write, events.close


def _scalars(row: metrics_lib.Row) -> dict[str, float | int]:
  return {_tag(key): x for key, x in row.items() if x is not None}


def _tag(name: str) -> str:
  """Returns `loss/train` for `train_loss`: TensorBoard groups by the prefix."""
  split, _, metric = name.partition("_")
  return f"{metric}/{split}" if split in ("train", "eval") else name


def _to_markdown(config: Mapping[str, Any]) -> str:
  text = json.dumps(config, indent=2, sort_keys=True)
  # Lines indented by four spaces are shown as they are.
  return "\n".join(f"    {line}" for line in text.splitlines())


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns the fields of a config as `model.name`, lists as text."""
  flat: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat |= _flatten(value, f"{prefix}{key}.")
    elif isinstance(value, (bool, int, float, str)):
      flat[prefix + key] = value
    else:
      flat[prefix + key] = json.dumps(value)
  return flat
