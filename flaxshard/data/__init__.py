"""Data sources, and their distribution over the devices of a strategy."""

import importlib
from typing import Any, TYPE_CHECKING

from flaxshard.data.builtin import digits
from flaxshard.data.builtin import text
from flaxshard.data.sources import Arrays
from flaxshard.data.sources import Example
from flaxshard.data.sources import load
from flaxshard.data.sources import Shapes
from flaxshard.data.sources import shapes_from
from flaxshard.data.sources import Source
from flaxshard.data.sources import Splits
from flaxshard.data.sources import Windows

if TYPE_CHECKING:
  from flaxshard.data.batching import eval_batches
  from flaxshard.data.batching import train_iterator

__all__ = [
  "Arrays",
  "Example",
  "Shapes",
  "Source",
  "Splits",
  "Windows",
  "digits",
  "eval_batches",
  "load",
  "shapes_from",
  "text",
  "train_iterator",
]


def __getattr__(name: str) -> Any:
  # Importing Grain takes about a second, and Strategy imports this package
  # without needing Grain: import its users when they are first used.
  if name in ("eval_batches", "train_iterator"):
    return getattr(importlib.import_module("flaxshard.data.batching"), name)
  raise AttributeError(f"module 'flaxshard.data' has no attribute {name!r}")
