"""Tasks: what a training loop trains, and how it is evaluated."""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from flaxshard.tasks.adapted import adapt
  from flaxshard.tasks.classification import Classification
  from flaxshard.tasks.language_modeling import LanguageModeling
  from flaxshard.tasks.load import create
  from flaxshard.tasks.task import Apply
  from flaxshard.tasks.task import Aux
  from flaxshard.tasks.task import Batch
  from flaxshard.tasks.task import Evaluation
  from flaxshard.tasks.task import Stream
  from flaxshard.tasks.task import Task

# Names of modules, so that clu is imported on use only.
BUILTIN = {
  "classification": "flaxshard.tasks.classification:Classification",
  "language_modeling": "flaxshard.tasks.language_modeling:LanguageModeling",
}

_MODULES = {
  "Apply": "task",
  "Aux": "task",
  "Batch": "task",
  "Evaluation": "task",
  "Stream": "task",
  "Task": "task",
  "Classification": "classification",
  "LanguageModeling": "language_modeling",
  "adapt": "adapted",
  "create": "load",
}

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


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    module = importlib.import_module(f"flaxshard.tasks.{_MODULES[name]}")
    return getattr(module, name)
  raise AttributeError(f"module 'flaxshard.tasks' has no attribute {name!r}")
