"""Creates the task of a config, and loads its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import inspect
from typing import Any

import jax

from flaxshard import data as data_lib
from flaxshard import tasks
from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.data import sources
from flaxshard.tasks.adapted import adapt
from flaxshard.tasks.adapted import AdaptedTask


@dataclasses.dataclass(frozen=True)
class LoadedTask:
  """A task and its data.

  Attributes:
    task: The task.
    example: Shapes of one example, without the batch dimension, by key.
    num_classes: Number of classes of the data, or None.
    splits: The data; None for a plan, and if the task makes its own batches.
  """

  task: AdaptedTask
  example: Mapping[str, jax.ShapeDtypeStruct]
  num_classes: int | None
  splits: data_lib.Splits | None


def record(config: Any, task: Any) -> Any:
  """Returns a config that names a task object in `config.task`.

  Args:
    config: A ConfigDict or dict.
    task: The object, or None: the config is returned as it is.

  Raises:
    ValueError: `config.task` names another task.
  """
  if task is None or not registry.is_dict(config):
    return config
  cls = type(task.task if isinstance(task, AdaptedTask) else task)
  name = f"<{cls.__module__}.{cls.__qualname__}>"
  given = dict(config).get("task", "classification")
  if given not in ("classification", name):
    raise ValueError(
      f"config.task={given!r} and task={name} are both given: give one of them."
    )
  return {**dict(config), "task": name}


def create(config: Any) -> AdaptedTask:
  """Creates the task that a config names, without its data if it needs none.

  Args:
    config: A checked config.

  Raises:
    ValueError, TypeError: The name or an argument is unknown, or it does not
      name a task.

  Example:
    >>> import flaxshard as fs
    >>> config = fs.train.config.check({
    ...   "model": {"name": "cnn"}, "data": {"name": "digits"},
    ...   "batch_size": 8, "num_train_steps": 1, "learning_rate": 0.1})
    >>> create(config).name
    'Classification'
  """
  return load(config, shapes_only=True).task


def load(
  config: Any,
  task: Any = None,
  *,
  shapes_only: bool = False,
  known: data_lib.Shapes | None = None,
) -> LoadedTask:
  """Creates the task of a config and loads its data.

  Args:
    config: A checked config.
    task: A task object, in place of the one that `config.task` names.
    shapes_only: Whether to find only the shapes of the data, without reading it
      where that is possible.
    known: The shapes of the data, if they are known: nothing is read.

  Raises:
    ValueError, TypeError: The task or the data is not valid.
  """
  found: list[Any] = [] if known is None else [known]

  def read() -> data_lib.Splits | data_lib.Shapes:
    """Returns the data that `config.data` names, or its shapes."""
    if not found:
      if not config.data:
        raise ValueError(
          "config.data is missing: the task has neither load_data nor example."
        )
      found.append(
        sources.call_factory_for_shapes(config.data)
        if shapes_only
        else sources.call_factory(config.data)
      )
    return found[0]

  if task is None:
    adapted = _create(config, read)
  else:
    adapted = adapt(task)
  if known is not None:
    return LoadedTask(adapted, known.example, known.num_classes, None)
  collate = adapted.collate
  if adapted.load_data is not None and config.data:
    raise ValueError(
      f"config.data={config.data.to_dict()!r} has no effect: {adapted.name} "
      "loads its own data in load_data."
    )
  if adapted.example is not None and (
    shapes_only or not (adapted.load_data or config.data)
  ):
    shapes = {
      key: jax.ShapeDtypeStruct(x.shape, x.dtype)
      for key, x in adapted.example().items()
    }
    return LoadedTask(adapted, shapes, None, None)
  if adapted.load_data is None:
    splits, where = read(), f"config.data ({config.data.get('name')!r})"
  else:
    splits, where = adapted.load_data(), f"{adapted.name}.load_data"
  if isinstance(splits, data_lib.Shapes):
    shapes = sources.collate_shapes(where, splits.example, collate)
    return LoadedTask(adapted, shapes, splits.num_classes, None)
  batch = sources.check_splits(where, splits, collate)
  shapes = sources.shapes_of(batch)
  return LoadedTask(
    adapted, shapes, splits.num_classes, None if shapes_only else splits
  )


def _makes_data(task: Any) -> bool:
  """Returns whether a task, or its class, brings its own data or shapes."""
  return any(getattr(task, n, None) for n in ("load_data", "example"))


def _create(config: Any, read: Callable[..., Any]) -> AdaptedTask:
  """Creates the task that `config.task` names."""
  field = config.task
  given = {"name": field} if isinstance(field, str) else field.to_dict()
  name = given.pop("name")
  if name.startswith("<"):
    raise ValueError(
      f"config.task={name!r} was an object: give it again as the argument "
      "task of train_and_evaluate, fs.load or fs.export."
    )
  found = registry.lookup("config.task", name, tasks.BUILTIN)
  where = f"config.task ({name!r})"
  if not inspect.isclass(found) and hasattr(found, "loss"):
    if given:
      raise ValueError(
        f"{where} is an object, which takes no arguments, got {given!r}."
      )
    return adapt(found, where)
  policy = Policy(config.precision)
  offered = {
    "policy": policy,
    "dtype": policy.compute_dtype,
    "seed": config.seed,
    "config": None,
    "example": None,
    "num_classes": None,
  }
  accepted = registry.accepted(found, offered)
  if "config" in accepted:
    accepted["config"] = registry.to_plain(config.model)
  accepted = {k: v for k, v in accepted.items() if k not in given}
  of_data = {"num_classes", "example"} & accepted.keys()
  if of_data and not config.data and _makes_data(found):
    # The task knows them: its defaults are used.
    accepted = {k: v for k, v in accepted.items() if k not in of_data}
  elif of_data:
    data = read()
    if "num_classes" in accepted:
      accepted["num_classes"] = data.num_classes
    if "example" in accepted:
      accepted["example"] = (
        data.example
        if isinstance(data, data_lib.Shapes)
        else sources.shapes_of(sources.check_splits("config.data", data))
      )
  return adapt(registry.construct(where, found, given, given=accepted), where)
