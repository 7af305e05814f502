"""Builds wrappers from configs, and configs from wrappers.

A config of wrappers is a tuple of `(name, arguments)` pairs, outermost wrapper
first, of plain values only. A dataclass among the arguments is a dict whose
`type` names its class; an optimizer is
`{"type": "optimizer", "name": "sgd", "learning_rate": 0.7}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import optax

from flaxshard.core import registry
from flaxshard.core.optimizer import Optimizer
from flaxshard.core.policy import Policy
from flaxshard.wrappers import accumulate
from flaxshard.wrappers import agn
from flaxshard.wrappers import agn_store
from flaxshard.wrappers import base
from flaxshard.wrappers import cross_shard
from flaxshard.wrappers import ema
from flaxshard.wrappers import loss_scale
from flaxshard.wrappers import loss_scale_rules
from flaxshard.wrappers import stack

_WRAPPERS: dict[str, type[base.Base]] = {
  "accumulate": accumulate.Accumulate,
  "agn": agn.AGN,
  "cross_shard": cross_shard.CrossShard,
  "ema": ema.EMA,
  "loss_scale": loss_scale.LossScale,
}
_VALUES: dict[str, type] = {
  "dynamic": loss_scale_rules.DynamicLossScale,
  "fixed": loss_scale_rules.FixedLossScale,
  "optimizer": Optimizer,
  "policy": Policy,
  "store": agn_store.Store,
}


def from_config(config: Iterable[Any]) -> tuple[base.Base, ...]:
  """Builds the wrappers that a config names.

  Args:
    config: A sequence of `(name, arguments)` pairs, or of bare names for the
      default arguments. A name is `"accumulate"`, `"agn"`, `"cross_shard"`,
      `"ema"`, `"loss_scale"`, or `"package.module:Class"` for a custom
      wrapper. The `ConfigDict`s of `ml_collections` may stand for dicts.

  Returns:
    The wrappers, outermost first.

  Raises:
    ValueError: A name or an argument is unknown (the message lists those that
      exist), or a wrapper raises it for an argument.
    TypeError: `config` is not a sequence, or an entry is no name and no pair.

  Example:
    >>> from_config((("loss_scale", {"scale": 128}),))[0].scale
    128.0
  """
  if isinstance(config, (str, Mapping)) or not isinstance(config, Iterable):
    raise TypeError(
      "wrappers must be a sequence of (name, arguments) pairs such as "
      f"(('loss_scale', {{'scale': 'dynamic'}}),), got {config!r}."
    )
  return stack.check(
    [_build(f"wrappers[{i}]", entry) for i, entry in enumerate(config)]
  )


def to_config(
  wrappers: Sequence[base.Base],
) -> tuple[tuple[str, dict[str, Any]], ...]:
  """Returns the config of wrappers: the inverse of `from_config`.

  Args:
    wrappers: The wrappers, outermost first.

  Returns:
    `(name, arguments)` pairs of plain values. Arguments that equal their
    default are left out, except the first.

  Raises:
    ValueError: An argument, such as an optax transformation, is no plain value.

  Example:
    >>> to_config([loss_scale.LossScale("dynamic")])
    (('loss_scale', {'scale': 'dynamic'}),)
  """
  return tuple(
    (_name_in_config(w), _arguments_in_config(w)) for w in stack.check(wrappers)
  )


def add_accumulation(
  wrappers: Sequence[base.Base], steps: int, *, per_replica: bool = False
) -> tuple[base.Base, ...]:
  """Adds an `Accumulate` to wrappers, for `accumulate_steps` of a config.

  It is placed as far outside as possible, so that other wrappers see the
  gradients of the update. A dynamic `LossScale` and what is around it stay
  outside.

  Args:
    wrappers: The wrappers, outermost first.
    steps: Number of batches in an update. With 1 nothing is added.
    per_replica: See `Accumulate`. A wrapper around it that reduces the
      gradients of each batch, such as `CrossShard`, makes it False.

  Raises:
    ValueError: The wrappers do not allow it.

  Example:
    >>> import flaxshard as fs
    >>> added = add_accumulation([fs.LossScale(), fs.EMA()], 4)
    >>> [base.name_of(wrapper) for wrapper in added]
    ['loss_scale', 'accumulate', 'ema']
  """
  wrappers = tuple(wrappers)
  if any(isinstance(wrapper, accumulate.Accumulate) for wrapper in wrappers):
    raise ValueError(
      "config.wrappers: 'accumulate' is not a wrapper of a training config; "
      "set config.accumulate_steps, which the schedule depends on as well."
    )
  if steps == 1:
    return wrappers
  skipping = [
    isinstance(w, loss_scale.LossScale) and w.skips_steps for w in wrappers
  ]
  position = skipping.index(True) + 1 if any(skipping) else 0
  outer, inner = wrappers[:position], wrappers[position:]
  is_reduced = stack.reduces_gradients(outer)
  added = accumulate.Accumulate(
    steps, per_replica=per_replica and not is_reduced
  )
  try:
    return stack.check([*outer, added, *inner])
  except ValueError as e:
    raise ValueError(f"config.accumulate_steps={steps}: {e}") from e


def built_in_wrappers() -> tuple[type[base.Base], ...]:
  """Returns the wrapper classes of flaxshard."""
  return tuple(_WRAPPERS.values())


def _build(where: str, entry: Any) -> Any:
  """Builds the wrapper of one entry; `where` is its place, for errors."""
  if isinstance(entry, str):
    entry = (entry, {})
  if (
    not isinstance(entry, Sequence)
    or len(entry) != 2
    or not registry.is_dict(entry[1])
  ):
    raise TypeError(
      f"{where} must be a name or a pair (name, dict of arguments), "
      f"got {entry!r}."
    )
  name, arguments = entry
  cls = registry.lookup(where, name, _WRAPPERS)
  return _construct(f"{where} ({name!r})", cls, arguments)


def _construct(where: str, cls: type, arguments: Any) -> Any:
  """Calls a dataclass with the arguments of a config."""
  if not dataclasses.is_dataclass(cls):
    raise TypeError(f"{where} must name a dataclass, got {cls!r}.")
  values = {
    # The only type of a transport that has arguments.
    k: _parse_value(f"{where}: {k}", v, "store" if k == "transport" else None)
    for k, v in dict(arguments).items()
  }
  return registry.construct(where, cls, values)


def _parse_value(where: str, value: Any, default: str | None) -> Any:
  """Returns the dataclass that a dict with a `type` describes.

  Args:
    where: Its place, for errors.
    value: A value of a config.
    default: The type of a dict without `type`.
  """
  if not registry.is_dict(value):
    return value
  value = dict(value)
  cls = registry.lookup(f"{where}: type", value.pop("type", default), _VALUES)
  if cls is Optimizer:
    name = value.pop("name", None)
    value = {"name": name, "arguments": tuple(value.items())}
  return _construct(where, cls, value)


def _name_in_config(instance: Any) -> str:
  """Returns the short name of a class, or `"package.module:Class"`."""
  cls = type(instance)
  for name, known in (*_WRAPPERS.items(), *_VALUES.items()):
    if cls is known:
      return name
  return f"{cls.__module__}:{cls.__qualname__}"


def _arguments_in_config(instance: Any) -> dict[str, Any]:
  """Returns the arguments that make a dataclass instance, as plain values."""
  arguments = {}
  for i, field in enumerate(dataclasses.fields(instance)):
    value = getattr(instance, field.name)
    # The first argument says the most about a wrapper, so that it is written
    # even if it equals its default.
    if field.init and (value != field.default or i == 0):
      if isinstance(value, Optimizer):
        value = dict(type="optimizer", name=value.name, **dict(value.arguments))
      elif dataclasses.is_dataclass(value):
        value = {
          "type": _name_in_config(value),
          **_arguments_in_config(value),
        }
      elif isinstance(value, (optax.GradientTransformation, optax.MultiSteps)):
        # A transformation is a pair of functions: its arguments are lost.
        raise ValueError(
          f"{_name_in_config(instance)}: {field.name}={value!r} cannot be "
          "written into a config; use "
          "flaxshard.core.optimizer.Optimizer('sgd', (...))."
        )
      arguments[field.name] = value
  return arguments
