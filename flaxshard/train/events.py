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

WriteRow = Callable[[int, metrics_lib.Row], None]


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
    name: `"tensorboard"` (tensorboardX, without TensorFlow), `"clu"`
      (`clu.metric_writers`, which needs TensorFlow), or `"none"`.
    workdir: The folder of the event file.
    last_step: The step that the run continues from. TensorBoard drops the
      events of later steps that an earlier run wrote.
    config: The config, of plain values, lists and dicts.

  Returns:
    A function `write(step, row)`, and a function that closes the file.

  Raises:
    ImportError: The package is not installed.
  """
  charts.require_packages(name)
  if name == "none":
    return (lambda step, row: None), (lambda: None)
  if name == "clu":
    return _clu_writer(workdir, last_step, config)
  return _tensorboard_writer(workdir, last_step, config)


def _clu_writer(
  workdir: str, last_step: int, config: Mapping[str, Any] | None
) -> tuple[WriteRow, Callable[[], None]]:
  from clu import metric_writers

  writer = metric_writers.create_default_writer(workdir, asynchronous=False)
  if config:
    writer.write_texts(last_step, {"config": _to_markdown(config)})
    writer.write_hparams(_flatten(config))
  write = lambda step, row: writer.write_scalars(step, _scalars(row))
  return write, writer.close


def _tensorboard_writer(
  workdir: str, last_step: int, config: Mapping[str, Any] | None
) -> tuple[WriteRow, Callable[[], None]]:
  from tensorboardX import event_file_writer
  from tensorboardX import summary
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
  if config:
    # The third summary says that the session has ended.
    hparams = summary.hparams(_flatten(config), {"loss/eval": 0})[:2]
    for content in (summary.text("config", _to_markdown(config)), *hparams):
      write_event(last_step, summary=content)

  def write(step: int, row: metrics_lib.Row) -> None:
    values = [
      summary_pb2.Summary.Value(tag=tag, simple_value=number)
      for tag, number in _scalars(row).items()
    ]
    with files.add_filename_to_oserror(path):
      write_event(step, summary=summary_pb2.Summary(value=values))
      events.flush()

  def close() -> None:
    with files.add_filename_to_oserror(path):
      events.close()

  return write, close


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
