"""Decides whether a config can continue the run of a workdir."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import json
import logging
import os
import types
from typing import Any, NamedTuple

from etils import epath
import jax
import numpy as np

from flaxshard import data
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.train import early_stopping

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


class Changes(NamedTuple):
  """The differences between a config and that of the last run in a workdir.

  Attributes:
    fields: The changed fields that affect the result of training, each as
      `"config.learning_rate: 0.1 -> 0.2"`.
    num_train_steps: The last step of the last run; None if it is not known.
    early_stopping: `config.early_stopping` of the last run.
  """

  fields: tuple[str, ...]
  num_train_steps: int | None
  early_stopping: Mapping[str, Any] = types.MappingProxyType({})


def check_data(
  config: Any, workdir: str, num_train_examples: int | None
) -> Changes:
  """Raises if a config has other data than the last run of a workdir.

  A checkpoint counts the batches consumed. With other data, another batch size
  or another seed, that count means other examples. Process 0 reads the workdir,
  and all processes raise its error.

  Args:
    config: A checked config.
    workdir: The workdir, with the `config.json` of its last run.
    num_train_examples: Number of training examples now.

  Returns:
    The changes of other fields; no changes in processes other than 0.

  Raises:
    ValueError: The data has changed, or a file of the last run is broken.
  """
  with multihost.raise_on_all_processes(ValueError):
    if jax.process_index() == 0:
      return _check_data(config, workdir, num_train_examples)
  return Changes((), None)


def _check_data(
  config: Any, workdir: str, num_train_examples: int | None
) -> Changes:
  before = _read(os.path.join(workdir, "config.json"))
  if before is None:
    return Changes((), None)
  # Through JSON like the saved config, which has lists for tuples.
  now = json.loads(config.to_json())
  for field in _DATA_FIELDS:
    if before.get(field) != now[field]:
      raise ValueError(
        f"config.{field}={now[field]!r}, but {workdir} was trained with "
        f"{before.get(field)!r}, so its data cannot be continued. Use that "
        "value or another workdir."
      )
  examples = (_read(data_path(workdir)) or {}).get("num_train_examples")
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
    field: tuple(_differences(f"config.{field}", before[field], now[field]))
    for field in now
    if field in before
  }
  free = [text for field in FREE_FIELDS for text in changed.pop(field, ())]
  if free:
    _log.info("changed since the last run: %s", ", ".join(free))
  return Changes(
    sum(changed.values(), ()),
    before.get("num_train_steps"),
    before.get("early_stopping", {}),
  )


def check_changes(
  config: Any, workdir: str, changes: Changes, first_step: int
) -> None:
  """Raises if a finished run would pass for one of a changed config.

  A config that changes in the middle of a run is warned of.

  Args:
    config: A checked config.
    workdir: The workdir.
    changes: The result of `check_data`. All processes raise the error that
      follows from the changes that process 0 found.
    first_step: The step that is restored.

  Raises:
    ValueError: The last run is finished, the config has changed, and
      `config.resume` is not "extend", or there is no step to add.
  """
  with multihost.raise_on_all_processes(ValueError):
    _check_changes(config, workdir, changes, first_step)


def _check_changes(
  config: Any, workdir: str, changes: Changes, first_step: int
) -> None:
  if not changes.fields:
    return
  fields = ", ".join(changes.fields)
  if first_step >= config.num_train_steps:
    raise ValueError(
      f"{workdir} has trained {first_step} steps already, with another "
      f"config: {fields}. Use another workdir, or a config.num_train_steps "
      f"above {first_step} with config.resume='extend'."
    )
  if early_stopping.has_ended(config.early_stopping, workdir, first_step):
    raise ValueError(
      f"config.early_stopping ends the run in {workdir} at step {first_step} "
      f"already, and the config has changed: {fields}. Use another workdir, or "
      "a larger config.early_stopping.patience or "
      "config.early_stopping.metric='none' with config.resume='extend'."
    )
  last_step = changes.num_train_steps
  if early_stopping.has_ended(changes.early_stopping, workdir, first_step):
    last_step = first_step
  is_finished = last_step is not None and first_step >= last_step
  if is_finished and config.resume != "extend":
    raise ValueError(
      f"{workdir} has a finished run of {last_step} steps, and the config has "
      f"changed: {fields}. Use another workdir, or config.resume='extend' "
      f"(--config.resume=extend) to train on from step {first_step}."
    )
  _log.warning(
    "the config has changed; training goes on from step %d with %s",
    first_step,
    fields,
  )


def write(
  config: Any,
  workdir: str,
  num_train_examples: int | None,
  shapes: data.Shapes,
) -> None:
  """Writes what the next run compares, from process 0.

  Args:
    config: The checked config, for `config.json`.
    workdir: The workdir.
    num_train_examples: Number of training examples, for `data.json`.
    shapes: Shapes of an example: a run is loaded without its data.
  """
  if jax.process_index():
    return
  contents = {
    os.path.join(workdir, "config.json"): json.loads(config.to_json()),
    data_path(workdir): {
      "num_train_examples": num_train_examples,
      **shapes_to_json(shapes),
    },
  }
  for path, content in contents.items():
    files.write_text(path, json.dumps(content, indent=2, sort_keys=True))


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


def _read(path: str) -> dict[str, Any] | None:
  """Returns the content of a JSON file, or None if it is missing."""
  if not epath.Path(path).exists():
    _log.warning("%s is missing: cannot check that the config fits", path)
    return None
  try:
    return dict(json.loads(epath.Path(path).read_bytes()))
  except (ValueError, TypeError) as e:
    raise ValueError(
      f"{path} is broken ({e}). Remove it to continue without this check."
    ) from e


def _differences(field: str, before: Any, now: Any) -> Iterator[str]:
  """Yields `"field: before -> now"` for each changed field of a config."""
  if isinstance(before, Mapping) and isinstance(now, Mapping):
    for key in {**before, **now}:
      yield from _differences(f"{field}.{key}", before.get(key), now.get(key))
  elif before != now:
    yield f"{field}: {before!r} -> {now!r}"
