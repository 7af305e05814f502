"""Data sources, and their distribution over the devices of a strategy."""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from flaxshard.data.batching import eval_batches
  from flaxshard.data.batching import train_iterator
  from flaxshard.data.builtin import digits
  from flaxshard.data.builtin import text
  from flaxshard.data.sources import Arrays
  from flaxshard.data.sources import Example
  from flaxshard.data.sources import load
  from flaxshard.data.sources import Source
  from flaxshard.data.sources import Splits
  from flaxshard.data.sources import Windows

__all__ = [
  "Arrays",
  "Example",
  "Source",
  "Splits",
  "Windows",
  "digits",
  "eval_batches",
  "load",
  "text",
  "train_iterator",
]

_MODULES = {
  "digits": "builtin",
  "eval_batches": "batching",
  "text": "builtin",
  "train_iterator": "batching",
}


def __getattr__(name: str) -> Any:
  # Importing Grain takes about a second, and Strategy imports this package
  # without needing Grain: import these names when they are first used.
  if name in __all__:
    module = _MODULES.get(name, "sources")
    return getattr(importlib.import_module(f"flaxshard.data.{module}"), name)
  raise AttributeError(f"module 'flaxshard.data' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
