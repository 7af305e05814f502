"""Data sources, and their distribution over the devices of a strategy."""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from flaxshard.data.sources import Arrays
  from flaxshard.data.sources import digits
  from flaxshard.data.sources import eval_batches
  from flaxshard.data.sources import Example
  from flaxshard.data.sources import load
  from flaxshard.data.sources import Source
  from flaxshard.data.sources import Splits
  from flaxshard.data.sources import text
  from flaxshard.data.sources import train_iterator
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


def __getattr__(name: str) -> Any:
  # Imported on first use: Grain takes a second, and Strategy needs only the
  # modules that distribute batches.
  if name in __all__:
    return getattr(importlib.import_module("flaxshard.data.sources"), name)
  raise AttributeError(f"module 'flaxshard.data' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
