"""Wrappers around loss, gradients and update: the base class and built-ins.

A config of wrappers is a tuple of `(name, arguments)` pairs, outermost wrapper
first, of plain values only. A dataclass among the arguments is a dict whose
`type` names its class; an optimizer is
`{"type": "optimizer", "name": "sgd", "learning_rate": 0.7}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flaxshard.core import checks
from flaxshard.core import optimizer
from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.wrappers import stack
from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.accumulate import AccumulateState
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState
from flaxshard.wrappers.agn_store import Store
from flaxshard.wrappers.base import Base
from flaxshard.wrappers.base import Next
from flaxshard.wrappers.base import Target
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

_WRAPPERS: dict[str, Any] = {
  "accumulate": Accumulate,
  "agn": AGN,
  "cross_shard": CrossShard,
  "ema": EMA,
  "loss_scale": LossScale,
}

# Objects among their arguments.
_ARGUMENTS: dict[str, Any] = {
  "dynamic": DynamicLossScale,
  "fixed": FixedLossScale,
  "optimizer": optimizer.named,
  "policy": Policy,
  "store": Store,
}


def from_config(
  config: Iterable[Any], argument: str = "wrappers"
) -> tuple[Base, ...]:
  """Builds the wrappers that a config names.

  Args:
    config: A sequence of `(name, arguments)` pairs, or of bare names for the
      default arguments. A name is `"accumulate"`, `"agn"`, `"cross_shard"`,
      `"ema"`, `"loss_scale"`, or `"package.module:Class"` for a custom
      wrapper. The `ConfigDict`s of `ml_collections` may stand for dicts.
    argument: Name of `config`, for errors.

  Returns:
    The wrappers, outermost first.

  Raises:
    ValueError: A name or an argument is unknown (the message lists those that
      exist), or a wrapper raises it for an argument.
    TypeError: `config` is not a sequence, or an entry is no name and no pair.

  Example:
    >>> import flaxshard as fs
    >>> fs.wrappers.from_config((("loss_scale", {"scale": 128}),))[0].scale
    128.0
  """
  if isinstance(config, (str, Mapping)) or not isinstance(config, Iterable):
    raise checks.ArgumentTypeError(
      f"{argument} must be a sequence of (name, arguments) pairs such as "
      f"(('loss_scale', {{'scale': 'dynamic'}}),), got {config!r}."
    )
  made = []
  for i, entry in enumerate(config):
    pair = (entry, {}) if isinstance(entry, str) else entry
    is_pair = isinstance(pair, Sequence) and len(pair) == 2
    if not is_pair or not registry.is_dict(pair[1]):
      raise checks.ArgumentTypeError(
        f"{argument}[{i}] must be a name or a pair (name, dict of arguments), "
        f"got {entry!r}."
      )
    name, arguments = pair
    made.append(_construct(f"{argument}[{i}]", name, arguments, _WRAPPERS))
  return stack.check(made)


def _construct(
  where: str, name: Any, arguments: Any, classes: dict[str, Any]
) -> Any:
  """Builds the dataclass of a name with the arguments of a config."""
  cls = registry.lookup(where, name, classes)
  where, arguments = f"{where} ({name!r})", dict(arguments)
  for key, value in arguments.items():
    if registry.is_dict(value):
      value = dict(value)
      # A transport that has arguments has one type only.
      kind = value.pop("type", "store" if key == "transport" else None)
      arguments[key] = _construct(
        f"{where}: {key}: type", kind, value, _ARGUMENTS
      )
  return registry.construct(where, cls, arguments)
