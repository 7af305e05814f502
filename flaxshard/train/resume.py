"""Continues the run of a workdir, or begins one.

`config.json` and `data.json` say with which config and data a workdir was
trained. The data must be the same: a checkpoint counts the batches consumed.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.state.train_state import TrainState
from flaxshard.train import config as config_lib
from flaxshard.train import early_stopping
from flaxshard.train import setup as setup_lib

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"

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
    config=config_to_json(config),
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
    return _initialize(config.init_from, setup.create_state()), 0
  with multihost.raise_on_all_processes(ValueError):
    if jax.process_index() == 0:
      check_earlier_run(config, workdir, setup.num_train_examples, latest_step)
  # Into shapes and shardings: a state of arrays would need its memory twice.
  state = checkpointer.restore(setup.abstract_state, data=batches)
  # Not always the latest step: a damaged one is passed over.
  first_step = checkpointer.restored_step or 0
  if first_step < config.num_train_steps:
    _log.info("resuming from step %d in %s", first_step, workdir)
  return state, first_step


def _initialize(init_from: Any, state: TrainState) -> TrainState:
  """Returns a new state with the parameters of `config.init_from`, if any.

  Raises:
    ValueError: The checkpoint cannot be read, or does not fit the model.
  """
  arguments = init_from.to_dict()
  path, step, item = (arguments.pop(name) for name in ("path", "step", "item"))
  if not path:
    return state
  try:
    new, _ = checkpoint.init_from(
      state,
      path,
      step=None if step < 0 else step,
      item=item or None,
      **arguments,
    )
  except ValueError as e:
    raise ValueError(f"config.init_from: {e}") from e
  return new


def check_earlier_run(
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
  before, now = read_json(workdir, CONFIG_FILE), config_to_json(config)
  if before is None:
    _log.warning(
      "%s/%s is missing: not checked if the config fits", workdir, CONFIG_FILE
    )
    return
  count = (read_json(workdir, DATA_FILE) or {}).get("num_train_examples")
  must_equal = {f"config.{f}": (before.get(f), now[f]) for f in _DATA_FIELDS}
  must_equal["the number of training examples"] = count, num_train_examples
  for name, (old, new) in must_equal.items():
    # A stream has no number of examples.
    if None not in (old, new) and old != new:
      raise ValueError(
        f"{name}={new!r}, but {workdir} was trained with {old!r}, so its data "
        "cannot be continued. Use that value or another workdir."
      )
  changes = ", ".join(
    f"{path}: {old!r} -> {new!r}"
    for field in now
    # A field that another version did not have is no change.
    if field in before and field not in FREE_FIELDS
    for path, old, new in checks.differences(
      before[field], now[field], f"config.{field}"
    )
  )
  if not changes:
    return

  def is_finished(values: Mapping[str, Any]) -> bool:
    rule = values.get("early_stopping", {"metric": "none"})
    stopping = early_stopping.replay(rule, workdir, latest_step)
    is_last = latest_step >= values.get("num_train_steps", math.inf)
    return is_last or stopping.stopped_step is not None

  if is_finished(now) or (config.resume != "extend" and is_finished(before)):
    raise ValueError(
      f"{workdir} has a finished run of {latest_step} steps, and the config "
      f"has changed: {changes}. Use another workdir, or train on with "
      "config.resume='extend' (--config.resume=extend) and a "
      f"config.num_train_steps above {latest_step}; after early stopping, "
      "with a larger config.early_stopping.patience, too."
    )
  _log.warning(
    "the config has changed; training goes on from step %d with %s",
    latest_step,
    changes,
  )


def write_files(setup: setup_lib.Setup, workdir: str) -> None:
  """Writes what the next run compares, from process 0.

  Args:
    setup: The setup of the config. A run is loaded without its data: the shapes
      of an example are written.
    workdir: The workdir.
  """
  if jax.process_index():
    return
  data_json = {
    "num_train_examples": setup.num_train_examples,
    **shapes_to_json(setup.loaded.shapes),
  }
  for name, content in (
    (CONFIG_FILE, config_to_json(setup.config)),
    (DATA_FILE, data_json),
  ):
    text = json.dumps(content, indent=2, sort_keys=True)
    files.write_text(os.path.join(workdir, name), text)


def config_to_json(config: Any) -> dict[str, Any]:
  """Returns a config as in its `config.json`, which has lists for tuples."""
  return dict(json.loads(config.to_json()))


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


def read_json(workdir: str, name: str) -> dict[str, Any] | None:
  """Returns the content of a JSON file of a workdir; None if it is missing.

  Raises:
    ValueError: The file is broken.
  """
  path = epath.Path(os.path.join(workdir, name))
  if not path.exists():
    return None
  try:
    return dict(json.loads(path.read_bytes()))
  except (ValueError, TypeError) as e:
    raise ValueError(
      f"{path} is broken ({e}). A run continues without this file, and without "
      "a check that the config fits."
    ) from e
