"""The wrappers for programs that use `flax.nnx.Optimizer`."""

from flaxshard.nnx.optimizer import Optimizer
from flaxshard.nnx.optimizer import WrapperState

__all__ = ["Optimizer", "WrapperState"]


def __dir__() -> list[str]:
  return sorted(__all__)
