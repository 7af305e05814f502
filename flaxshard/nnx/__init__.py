"""The wrappers for programs that use `flax.nnx.Optimizer`."""

from flaxshard.nnx.optimizer import Optimizer
from flaxshard.nnx.optimizer import WrapperState
from flaxshard.nnx.variables import update

__all__ = ["Optimizer", "WrapperState", "update"]
