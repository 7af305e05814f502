"""The training loop that `python -m flaxshard` runs."""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from flaxshard.train.loop import train_and_evaluate

__all__ = ["train_and_evaluate"]


def __getattr__(name: str) -> Any:
  # Imported when asked for: a config needs neither Orbax nor Grain.
  if name == "train_and_evaluate":
    return importlib.import_module("flaxshard.train.loop").train_and_evaluate
  raise AttributeError(f"module 'flaxshard.train' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted(__all__)
