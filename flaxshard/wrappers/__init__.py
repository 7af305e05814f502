"""Wrappers around loss, gradients and update: the base class and built-ins."""

from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.accumulate import AccumulateState
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState
from flaxshard.wrappers.agn_store import Store
from flaxshard.wrappers.base import Base
from flaxshard.wrappers.base import Next
from flaxshard.wrappers.base import Target
from flaxshard.wrappers.config import from_config
from flaxshard.wrappers.cross_shard import CrossShard
from flaxshard.wrappers.ema import EMA
from flaxshard.wrappers.ema import EMAState
from flaxshard.wrappers.loss_scale import DynamicLossScale
from flaxshard.wrappers.loss_scale import FixedLossScale
from flaxshard.wrappers.loss_scale import LossScale
from flaxshard.wrappers.loss_scale import LossScaleState
from flaxshard.wrappers.wrapped import wrap
from flaxshard.wrappers.wrapped import Wrapped
from flaxshard.wrappers.wrapped import WrappedState

__all__ = [
  "AGN",
  "EMA",
  "AGNState",
  "Accumulate",
  "AccumulateState",
  "Base",
  "CrossShard",
  "DynamicLossScale",
  "EMAState",
  "FixedLossScale",
  "LossScale",
  "LossScaleState",
  "Next",
  "Store",
  "Target",
  "Wrapped",
  "WrappedState",
  "from_config",
  "wrap",
]
