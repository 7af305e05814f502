"""Complete tasks of the example configs, written with the public API alone."""

import importlib
from typing import Any

__all__ = ["ddpm", "ppo", "recsys", "regression", "simclr", "vae"]


def __getattr__(name: str) -> Any:
  # clu and Flax are imported when a task is first used.
  if name in __all__:
    return importlib.import_module(f"flaxshard.examples.{name}")
  raise AttributeError(f"module 'flaxshard.examples' has no attribute {name!r}")


def __dir__() -> list[str]:
  return sorted(__all__)
