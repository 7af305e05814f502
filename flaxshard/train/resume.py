"""Continues the run of a workdir, or begins one.

`config.json` and `data.json` say with which config and data a workdir was
trained. The data must be the same: a checkpoint counts the batches consumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
import logging
import math
import os
from typing import Any

from etils import epath
import jax
import numpy as np

from flaxshard import checkpoint
from flaxshard import data
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.state.train_state import TrainState
from flaxshard.train import config as config_lib
from flaxshard.train import early_stopping
from flaxshard.train import setup as setup_lib
from flaxshard.train.config import checking

_log = logging.getLogger(__name__)

# Another value of these fields means other examples at the same position.
_DATA_FIELDS = ("data", "batch_size", "seed")

# These fields do not change what a run of given data computes.
FREE_FIELDS = (
  "mesh",
  "log_every_steps",
  "eval_every_steps",
  "checkpoint_every_steps",
  "checkpoint_every_minutes",
  "on_nonfinite",
  "profile_steps",
  "writer",
  "max_to_keep",
  "keep_every_steps",
  "best_metric",
  "best_mode",
  "keep_best",
  "resume",
  "hooks",
)


def open_checkpointer(config: Any, workdir: str) -> checkpoint.Checkpointer:
  """Returns the checkpointer of a workdir.

  Args:
    config: A checked config.
    workdir: The workdir.
  """
  best_metric = config.best_metric
  return checkpoint.Checkpointer(
    os.path.join(workdir, "checkpoints"),
    max_to_keep=config.max_to_keep,
    keep_every=config.keep_every_steps or None,
    best_metric=None if best_metric == "none" else best_metric,
    best_mode=config_lib.resolve_mode(best_metric, config.best_mode),
    keep_best=config.keep_best,
    config=_to_json(config),
  )


def restore_or_create(
  setup: setup_lib.Setup,
  workdir: str,
  checkpointer: checkpoint.Checkpointer,
  batches: Any,
) -> tuple[TrainState, int]:
  """Returns the state to train from, and the step that it was saved at.

  Args:
    setup: The setup of the config.
    workdir: The workdir.
    checkpointer: Its checkpointer.
    batches: The training batches, which continue from the same step.

  Raises:
    ValueError: The checkpoint has another model or another data order, or a
      finished run would pass for one of a changed config.
  """
  config = setup.config
  latest_step = checkpointer.latest_step()
  multihost.check_agreement(
    {"the latest checkpoint": latest_step},
    "All processes must read the same checkpoints.",
  )
  if latest_step is None:
    return _initialize(config, setup.create_state()), 0
  with multihost.raise_on_all_processes(ValueError):
    if jax.process_index() == 0:
      check(config, workdir, setup.num_train_examples, latest_step)
  # Into shapes and shardings: a state of arrays would need its memory twice.
  state = checkpointer.restore(setup.abstract_state, data=batches)
  # Not always the latest step: a damaged one is passed over.
  first_step = checkpointer.restored_step or 0
  if first_step < config.num_train_steps:
    _log.info("resuming from step %d in %s", first_step, workdir)
  return state, first_step


def _initialize(config: Any, state: TrainState) -> TrainState:
  """Returns a new state with the parameters of `config.init_from`, if any.

  Args:
    config: A checked config.
    state: The state at the start of a run.

  Raises:
    ValueError: The checkpoint cannot be read, or does not fit the model.
  """
  fields = config.init_from
  if not fields.path:
    return state
  try:
    new, _ = checkpoint.init_from(
      state,
      fields.path,
      step=None if fields.step < 0 else fields.step,
      item=fields.item or None,
      subtree=fields.subtree,
      **{name: fields[name] for name in checking.PATTERNS},
    )
  except ValueError as e:
    raise ValueError(f"config.init_from: {e}") from e
  return new


def check(
  config: Any, workdir: str, num_train_examples: int | None, latest_step: int
) -> None:
  """Raises if a config cannot continue the last run of a workdir.

  With other data, another batch size or another seed, the batches consumed are
  other examples. A finished run must not pass for one of a changed config. A
  config that changes in the middle of a run is warned of.

  Args:
    config: A checked config.
    workdir: The workdir, with the `config.json` of its last run.
    num_train_examples: Number of training examples now.
    latest_step: The latest step that was saved.

  Raises:
    ValueError: The data has changed; or the last run is finished, the config
      has changed, and `config.resume` is not "extend", or there is no step to
      add; or a file of the last run is broken.
  """
  config_path = os.path.join(workdir, "config.json")
  if not epath.Path(config_path).exists():
    _log.warning("%s is missing: not checked if the config fits", config_path)
    return
  before = read_json(config_path)
  now = _to_json(config)
  for field in _DATA_FIELDS:
    if before.get(field) != now[field]:
      raise ValueError(
        f"config.{field}={now[field]!r}, but {workdir} was trained with "
        f"{before.get(field)!r}, so its data cannot be continued. Use that "
        "value or another workdir."
      )
  examples, path = None, data_path(workdir)
  if epath.Path(path).exists():
    examples = read_json(path).get("num_train_examples")
  if None not in (examples, num_train_examples) and (
    examples != num_train_examples
  ):
    raise ValueError(
      f"config.data={now['data']!r} has {num_train_examples} training "
      f"examples, but {workdir} was trained with {examples}, so it cannot be "
      "continued. Use that data or another workdir."
    )
  changed = {
    # A field that another version did not have is no change.
    field: list(_differences(f"config.{field}", before[field], now[field]))
    for field in now
    if field in before
  }
  free = [text for field in FREE_FIELDS for text in changed.pop(field, ())]
  if free:
    _log.info("changed since the last run: %s", ", ".join(free))
  fields = ", ".join(text for texts in changed.values() for text in texts)
  if not fields:
    return

  def is_finished(values: Mapping[str, Any]) -> bool:
    return latest_step >= values.get("num_train_steps", math.inf) or (
      early_stopping.has_ended(
        values.get("early_stopping", {}), workdir, latest_step
      )
    )

  if is_finished(now) or (config.resume != "extend" and is_finished(before)):
    raise ValueError(
      f"{workdir} has a finished run of {latest_step} steps, and the config "
      f"has changed: {fields}. Use another workdir, or train on with "
      "config.resume='extend' (--config.resume=extend) and a "
      f"config.num_train_steps above {latest_step}; after early stopping, "
      "with a larger config.early_stopping.patience, too."
    )
  _log.warning(
    "the config has changed; training goes on from step %d with %s",
    latest_step,
    fields,
  )


def write(setup: setup_lib.Setup, workdir: str) -> None:
  """Writes what the next run compares, from process 0.

  Args:
    setup: The setup of the config. A run is loaded without its data: the shapes
      of an example are written.
    workdir: The workdir.
  """
  if jax.process_index():
    return
  contents = {
    os.path.join(workdir, "config.json"): _to_json(setup.config),
    data_path(workdir): {
      "num_train_examples": setup.num_train_examples,
      **shapes_to_json(setup.shapes),
    },
  }
  for path, content in contents.items():
    files.write_text(path, json.dumps(content, indent=2, sort_keys=True))


def _to_json(config: Any) -> dict[str, Any]:
  """Returns a config as in its `config.json`, which has lists for tuples."""
  return dict(json.loads(config.to_json()))


def data_path(workdir: str) -> str:
  """Returns the path of `data.json`."""
  return os.path.join(workdir, "data.json")


def shapes_to_json(shapes: data.Shapes) -> dict[str, Any]:
  """Returns the shapes for a `data.json`."""
  return {
    "num_classes": shapes.num_classes,
    "example": {
      key: {"shape": x.shape, "dtype": str(x.dtype)}
      for key, x in shapes.example.items()
    },
  }


def shapes_from_json(content: Mapping[str, Any]) -> data.Shapes:
  """Returns the shapes in the content of a `data.json`."""
  example = {
    key: jax.ShapeDtypeStruct(tuple(x["shape"]), np.dtype(x["dtype"]))
    for key, x in content["example"].items()
  }
  return data.Shapes(example, content["num_classes"])


def read_json(path: str) -> dict[str, Any]:
  """Returns the content of a JSON file of a workdir.

  Raises:
    ValueError: The file is broken.
  """
  try:
    return dict(json.loads(epath.Path(path).read_bytes()))
  except (ValueError, TypeError) as e:
    raise ValueError(
      f"{path} is broken ({e}). A run continues without this file, and without "
      "a check that the config fits."
    ) from e


def _differences(field: str, before: Any, now: Any) -> Iterator[str]:
  """Yields `"field: before -> now"` for each changed field of a config."""
  if isinstance(before, Mapping) and isinstance(now, Mapping):
    for key in {**before, **now}:
      yield from _differences(f"{field}.{key}", before.get(key), now.get(key))
  elif before != now:
    yield f"{field}: {before!r} -> {now!r}"
