"""The training loop that `python -m flaxshard` runs."""

import importlib
from typing import Any, TYPE_CHECKING

if TYPE_CHECKING:
  from flaxshard.train.hooks import HookError
  from flaxshard.train.loop import train_and_evaluate

__all__ = ["HookError", "train_and_evaluate"]

# Imported when asked for: a config needs neither Orbax nor Grain.
_MODULES = {
  "HookError": "flaxshard.train.hooks",
  "train_and_evaluate": "flaxshard.train.loop",
}


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    return getattr(importlib.import_module(_MODULES[name]), name)
  raise AttributeError(f"module 'flaxshard.train' has no attribute {name!r}")
