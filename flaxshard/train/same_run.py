"""Continues the run of a workdir, if it is the same.

`config.json` and `data.json` say with which config and data a workdir was
trained: a checkpoint counts the batches consumed, so the data must be the same.
Processes and workers that disagree would wait for each other for ever, or train
on with parameters that differ.
"""

from __future__ import annotations

from collections.abc import Mapping
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import time
from typing import Any
import uuid

from etils import epath
import jax
import numpy as np

from flaxshard import checkpoint
from flaxshard.checkpoint import items
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.core import registry
from flaxshard.core import trees
from flaxshard.core.version import VERSION
from flaxshard.data import sources
from flaxshard.state.train_state import TrainState
from flaxshard.train import config as config_lib
from flaxshard.train import endings
from flaxshard.train import report
from flaxshard.train import setup as setup_lib
from flaxshard.train.config import definition

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
DATA_FILE = "data.json"

# Another value of these means other examples at the same position.
_DATA_FACTS = (
  *("config.data", "config.batch_size", "config.seed"),
  "the number of training examples",
)

# The packages that decide what a step computes and how it is saved.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

# Seconds until a new file is visible on all hosts of a shared file system.
_VISIBLE_SECONDS = 10.0


# The last run of a workdir.


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
    **_shapes_to_json(setup.shapes),
  }
  for name, content in (
    (CONFIG_FILE, config_to_json(setup.config)),
    (DATA_FILE, data_json),
  ):
    text = json.dumps(content, indent=2, sort_keys=True)
    files.write_text(os.path.join(workdir, name), text)


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


def config_to_json(config: Any) -> dict[str, Any]:
  """Returns a config as in its `config.json`, which has lists for tuples.

  Raises:
    TypeError: A value is none of JSON: the run could not be loaded again.
  """
  values = config.to_dict()
  for path, value in trees.leaves_by_path(values).items():
    if not isinstance(value, int | float | str):
      raise checks.ArgumentTypeError(
        f"config.{'.'.join(path)} must be a value of JSON, got {value!r}: a "
        "dtype, a class or a function is given by its name, such as 'bfloat16'."
      )
  return dict(json.loads(json.dumps(values)))


def array_to_json(x: Any) -> dict[str, Any]:
  """Returns the shape and the dtype of an array."""
  # A symbolic dimension is a name or an expression.
  shape = [n if isinstance(n, int) else str(n) for n in x.shape]
  return {"shape": shape, "dtype": str(x.dtype)}


def _shapes_to_json(shapes: sources.Shapes) -> dict[str, Any]:
  example = jax.tree.map(array_to_json, dict(shapes.example))
  return {"num_classes": shapes.num_classes, "example": example}


def shapes_from_json(content: Mapping[str, Any]) -> sources.Shapes:
  """Returns the shapes in the content of a `data.json`."""
  example = {
    key: jax.ShapeDtypeStruct(tuple(x["shape"]), np.dtype(x["dtype"]))
    for key, x in content["example"].items()
  }
  return sources.Shapes(example, content["num_classes"])


def check_earlier_run(
  setup: setup_lib.Setup, workdir: str, latest_step: int
) -> None:
  """Raises if a config cannot continue the last run of a workdir.

  With other data, another batch size or another seed, the batches consumed are
  other examples. A finished run must not pass for one of a changed config. A
  config that changes in the middle of a run is warned of.

  Args:
    setup: The setup of the config.
    workdir: The workdir, with the `config.json` of its last run.
    latest_step: The latest step that was saved.

  Raises:
    ValueError: The data has changed; or the last run is finished, the config
      has changed, and `config.resume` is not "extend", or there is no step to
      add; or a file of the last run is broken.
  """
  before, now = read_json(workdir, CONFIG_FILE), config_to_json(setup.config)
  if before is None:
    _log.warning(
      "%s/%s is missing: not checked if the config fits", workdir, CONFIG_FILE
    )
    return
  # Another version had other fields.
  fields = now.keys() & before.keys() - definition.FREE_FIELDS
  facts = {f"config.{name}": (before[name], now[name]) for name in fields}
  if data_json := read_json(workdir, DATA_FILE):
    # None of a stream.
    count = data_json["num_train_examples"]
    facts["the number of training examples"] = count, setup.num_train_examples
  changes: list[str] = []
  for name in sorted(facts):
    for path, old, new in checks.differences(*facts[name], name):
      if name in _DATA_FACTS:
        also = f" Changed as well: {', '.join(changes)}." if changes else ""
        raise ValueError(
          f"{path}={new!r}, but {workdir} was trained with {old!r}, so its "
          f"data cannot be continued. Use that value or another workdir.{also}"
        )
      changes.append(f"{path}: {old!r} -> {new!r}")
  if not changes:
    return
  listed = ", ".join(changes)
  rows = report.read_rows(workdir, latest_step)

  def is_finished(values: Mapping[str, Any]) -> bool:
    rule = values.get("early_stopping", {"metric": "none"})
    is_last = latest_step >= values.get("num_train_steps", math.inf)
    return is_last or endings.stopped_early(rule, rows) is not None

  if is_finished(now) or (now["resume"] != "extend" and is_finished(before)):
    raise ValueError(
      f"{workdir} has a finished run of {latest_step} steps, and the config "
      f"has changed: {listed}. Use another workdir, or train on with "
      "config.resume='extend' (--config.resume=extend) and a "
      f"config.num_train_steps above {latest_step}; after early stopping, "
      "with a larger config.early_stopping.patience, too."
    )
  _log.warning(
    "the config has changed; training goes on from step %d with %s",
    latest_step,
    listed,
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
      finished run would pass for one of a changed config; or that of
      `config.init_from` does not fit the model. Or a new state cannot be saved.
  """
  config = setup.config
  latest_step = checkpointer.latest_step()
  multihost.check_agreement(
    {"the latest checkpoint": latest_step},
    "All processes must read the same checkpoints.",
  )
  if latest_step is None:
    state = setup.create_state()
    if config.init_from.path:
      given = config.init_from.to_dict()
      # What stands for None in a config.
      given["step"] = None if given["step"] < 0 else given["step"]
      given["item"] = given["item"] or None
      with registry.errors_name("config.init_from"):
        state = checkpoint.init_from(state, **given)[0]
    items.check_savable(state)
    return state, 0
  with multihost.raise_on_all_processes(ValueError):
    if jax.process_index() == 0:
      check_earlier_run(setup, workdir, latest_step)
  # Into shapes and shardings: a state of arrays would need its memory twice.
  state = checkpointer.restore(setup.abstract_state, data=batches)
  # Not always the latest step: a damaged one is passed over.
  first_step = checkpointer.restored_step or 0
  if first_step < config.num_train_steps:
    _log.info("resuming from step %d in %s", first_step, workdir)
  return state, first_step


# The processes and the workers of a run.


def check_processes(
  config: Any,
  setup: setup_lib.Setup | None = None,
  lowered: jax.stages.Lowered | None = None,
) -> None:
  """Raises if processes have other configs, packages, data or train steps.

  Call it before JAX starts its devices, if the processes know of each other
  then: with other configs, the start may hang. The traced train step shows the
  devices, and the code of the model, the optimizer and the wrappers.

  Args:
    config: A checked config.
    setup: The setup of the config, if it is there already.
    lowered: Its train step.

  Raises:
    ValueError: Two processes disagree.
  """
  if multihost.process_count() == 1:
    return
  facts = _facts(config, setup)
  if lowered is not None:
    step = hashlib.sha256(lowered.as_text().encode()).hexdigest()
    facts["the traced train step (SHA-256)"] = step
  multihost.check_agreement(
    facts,
    "Run the same command, with the same files and packages, and as many "
    "devices of one kind, on all processes.",
  )


def worker_facts(setup: setup_lib.Setup) -> dict[str, Any]:
  """Returns what all workers of a run must have in common.

  `Worker.start` compares it, by the names of the fields.

  Args:
    setup: The setup of the config.
  """
  facts = _facts(setup.config, setup)
  for field in definition.FREE_FIELDS:
    facts["config"].pop(field)
  return {**facts, "example": _shapes_to_json(setup.shapes)}


def _facts(config: Any, setup: setup_lib.Setup | None) -> dict[str, Any]:
  """Returns facts about the config, the code and, of a setup, the data."""
  versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
  facts: dict[str, Any] = {
    "config": config_to_json(config),
    "the version of": {"flaxshard": VERSION, **versions},
  }
  # None if the task makes its own batches.
  if setup is not None and (splits := setup.splits) is not None:
    named = {"train": splits.train, "eval": splits.eval}
    read = {k: _source_facts(x) for k, x in named.items() if x is not None}
    facts["the data"] = read
  return facts


def _source_facts(source: Any) -> dict[str, Any]:
  is_stream = sources.is_stream(source)

  def digest() -> str:
    example = next(iter(source)) if is_stream else source[0]
    leaves = [np.asarray(x).tobytes() for x in jax.tree.leaves(example)]
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]

  first = digest()
  return {
    "number of examples": "stream" if is_stream else len(source),
    # A source may augment its examples at random.
    "first example": first if first == digest() else "random",
  }


def check_workdir(workdir: str) -> None:
  """Creates the workdir; all processes must see the same directory.

  Args:
    workdir: The absolute path of the workdir.

  Raises:
    ValueError: A process cannot write in it, or does not see a file that
      process 0 has written.
  """
  with multihost.raise_on_all_processes(ValueError):
    files.check_writable("workdir", workdir)
  if multihost.process_count() == 1:
    return
  name = multihost.exchange(f".same_workdir_{uuid.uuid4().hex}")[0]
  path = epath.Path(os.path.join(workdir, name))
  index = multihost.process_index()
  if index == 0:
    path.write_bytes(b"")
  deadline = time.monotonic() + _VISIBLE_SECONDS
  try:
    with multihost.raise_on_all_processes(ValueError):
      while not path.exists():
        if time.monotonic() > deadline:
          raise ValueError(
            f"workdir={workdir!r} is not the same directory for all processes: "
            f"process {index} does not see a file that process 0 has written, "
            f"for {_VISIBLE_SECONDS:g} s. Use a directory that all hosts share."
          )
        time.sleep(0.1)
  finally:
    if index == 0:
      path.unlink()
