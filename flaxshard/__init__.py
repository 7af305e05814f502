"""flaxshard: TensorFlow's distributed-training wrappers for Flax."""

from flaxshard import wrappers
from flaxshard.gradients import nonfinite_leaves
from flaxshard.policy import Policy
from flaxshard.train_state import create_train_state
from flaxshard.train_state import TrainState
from flaxshard.wrappers import DynamicLossScale
from flaxshard.wrappers import FixedLossScale
from flaxshard.wrappers import LossScale

__version__ = "0.1.0"

__all__ = [
  "DynamicLossScale",
  "FixedLossScale",
  "LossScale",
  "Policy",
  "TrainState",
  "create_train_state",
  "nonfinite_leaves",
  "wrappers",
]
