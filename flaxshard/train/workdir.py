"""What a workdir holds besides checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
import json
import logging
import os
from typing import Any

import jax

from flaxshard.train import metrics as metrics_lib

_log = logging.getLogger(__name__)


def check_continues(config: Any, workdir: str) -> None:
  """Refuses to go on with a checkpoint that counts other batches."""
  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    _log.warning("%s is missing: going on with the config as it is", path)
    return
  try:
    with open(path) as f:
      before = dict(json.load(f))
  except (ValueError, TypeError) as e:
    raise ValueError(
      f"{path} is broken ({e}); remove it to go on with the config as it is."
    ) from e
  now = json.loads(config.to_json())
  for field in ("data", "batch_size", "seed"):
    if before.get(field) != now[field]:
      raise ValueError(
        f"config.{field}={now[field]!r}, but {workdir} was trained with "
        f"{before.get(field)!r}, so its data cannot be continued; go on with "
        "that, or take another workdir."
      )
  changed = [k for k in now if before.get(k) != now[k]]
  if changed:
    _log.info("changed since the last run: config.%s", ", ".join(changed))


def write_config(config: Any, workdir: str) -> None:
  """Writes `config.json`, whole or not at all."""
  if jax.process_index() == 0:
    path = os.path.join(workdir, "config.json")
    with metrics_lib.atomic_write(path) as f:
      json.dump(json.loads(config.to_json()), f, indent=2, sort_keys=True)


def metrics_path(workdir: str) -> str:
  """Returns where this process writes its rows."""
  if jax.process_index():
    return os.path.join(workdir, f"metrics.{jax.process_index()}.jsonl")
  return os.path.join(workdir, "metrics.jsonl")


def format_row(row: Mapping[str, Any]) -> str:
  """Returns a row as it is logged."""
  return " ".join(
    f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
    for k, v in row.items()
    if v is not None
  )


def finish(workdir: str) -> None:
  """Draws the plot and says how it went and where everything lies."""
  if jax.process_index():
    return
  rows = metrics_lib.read_rows(metrics_path(workdir))
  metrics_lib.plot(rows, os.path.join(workdir, "training.png"))
  final: dict[str, Any] = {}
  for row in rows:
    final |= row
  _log.info(
    "done: %s\nin %s: checkpoints/, metrics.jsonl, training.png, config.json",
    format_row(final),
    workdir,
  )
