"""The wrappers for programs that use `flax.nnx.Optimizer`."""

from flaxshard.nnx.module_values import update
from flaxshard.nnx.optimizer import Optimizer
from flaxshard.nnx.optimizer import WrapperState

__all__ = ["Optimizer", "WrapperState", "update"]


def __dir__() -> list[str]:
  return sorted(__all__)
