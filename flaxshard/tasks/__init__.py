"""Tasks: what a training loop trains, and how it is evaluated.

`create` makes the task that a config names.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax

from flaxshard import data as data_lib
from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.data import sources
from flaxshard.tasks.apply import Apply
from flaxshard.tasks.classification import Classification
from flaxshard.tasks.classification import LanguageModeling
from flaxshard.tasks.steps import Evaluation
from flaxshard.tasks.stream import Stream
from flaxshard.tasks.task import adapt
from flaxshard.tasks.task import AdaptedTask
from flaxshard.tasks.task import Aux
from flaxshard.tasks.task import Batch
from flaxshard.tasks.task import Task

__all__ = [
  "BUILTIN",
  "Apply",
  "Aux",
  "Batch",
  "Classification",
  "Evaluation",
  "LanguageModeling",
  "Stream",
  "Task",
  "adapt",
  "create",
]

BUILTIN = {
  "classification": Classification,
  "language_modeling": LanguageModeling,
}


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
    >>> fs.tasks.create(config).name
    'Classification'
  """
  return load(config, shapes_only=True)[0]


def load(
  config: Any,
  task: Any = None,
  *,
  shapes_only: bool = False,
  known: sources.Shapes | None = None,
) -> tuple[AdaptedTask, sources.Shapes, sources.Splits | None]:
  """Creates the task of a config and loads its data.

  Args:
    config: A checked config.
    task: A task object, in place of the one that `config.task` names.
    shapes_only: Whether to find only the shapes of the data, without reading it
      where that is possible.
    known: The shapes of the data, if they are known: nothing is read.

  Returns:
    The task; the shapes of an example, as `collate` makes it; and the data,
    None for a plan, and if the task makes its own batches.

  Raises:
    ValueError, TypeError: The task or the data is not valid.
  """

  @functools.cache
  def read() -> Any:
    """Returns the data that `config.data` names, or its shapes."""
    if known is not None:
      return known
    if not config.data:
      raise ValueError(
        "config.data is missing: the task has neither load_data nor example."
      )
    return data_lib.call_factory(config.data, shapes_only=shapes_only)

  adapted = _create(config, read) if task is None else adapt(task)
  if known is not None:
    return adapted, known, None
  if adapted.load_data is not None and config.data:
    raise ValueError(
      f"config.data={config.data.to_dict()!r} has no effect: {adapted.name} "
      "loads its own data in load_data."
    )
  has_data = adapted.load_data is not None or config.data
  if adapted.example is not None and (shapes_only or not has_data):
    where = f"{adapted.name}.example must return shapes by key"
    with registry.errors_name(where, AttributeError):
      example = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for key, x in adapted.example().items()
      }
    return adapted, sources.Shapes(example), None
  if adapted.load_data is None:
    data, where = read(), f"config.data ({config.data.get('name')!r})"
  else:
    data, where = adapted.load_data(), f"{adapted.name}.load_data"
  shapes = sources.check(where, data, adapted.collate)
  return adapted, shapes, None if shapes_only else data


def _create(config: Any, read: Callable[..., Any]) -> AdaptedTask:
  """Creates the task that `config.task` names."""
  name = config.task.name
  if name.startswith("<"):
    raise ValueError(
      f"config.task={name!r} was an object: give it again as the argument "
      "task of train_and_evaluate, fs.load or fs.export."
    )
  where, found, given = registry.find("config.task", config.task, BUILTIN)
  policy = Policy(config.precision)
  offered = {
    "policy": policy,
    "dtype": policy.compute_dtype,
    "seed": config.seed,
    "config": registry.to_plain(config.model),
  }
  if config.data or not any(
    getattr(found, n, None) for n in ("load_data", "example")
  ):
    # Else the task makes its data, and its defaults are used.
    offered |= {"num_classes": None, "example": None}
  accepted = registry.accepted(found, offered, given)
  if "num_classes" in accepted:
    accepted["num_classes"] = read().num_classes
  if "example" in accepted:
    accepted["example"] = sources.check("config.data", read()).example
  return adapt(registry.construct(where, found, given, given=accepted), where)
