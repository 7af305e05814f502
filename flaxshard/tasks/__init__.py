"""Tasks: what a training loop trains, and how it is evaluated."""

from flaxshard.tasks.apply import Apply
from flaxshard.tasks.classification import Classification
from flaxshard.tasks.classification import LanguageModeling
from flaxshard.tasks.load import BUILTIN
from flaxshard.tasks.load import create
from flaxshard.tasks.steps import Evaluation
from flaxshard.tasks.stream import Stream
from flaxshard.tasks.task import adapt
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
