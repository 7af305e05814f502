"""Wrappers from configs and back.

A config holds plain values: a tuple of `(name, arguments)` pairs, outermost
wrapper first. A dataclass among the arguments is a dict whose `type` names it;
an optimizer is `{"type": "optimizer", "name": "sgd", "learning_rate": 0.7}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

from flaxshard.core import registry
from flaxshard.core.optimizer import Optimizer
from flaxshard.core.policy import Policy
from flaxshard.wrappers import agn
from flaxshard.wrappers import base
from flaxshard.wrappers import cross_shard
from flaxshard.wrappers import loss_scale

_WRAPPERS: dict[str, type[base.Base]] = {
  "agn": agn.AGN,
  "cross_shard": cross_shard.CrossShard,
  "loss_scale": loss_scale.LossScale,
}
_VALUES: dict[str, type] = {
  "dynamic": loss_scale.DynamicLossScale,
  "fixed": loss_scale.FixedLossScale,
  "optimizer": Optimizer,
  "policy": Policy,
}


def from_config(config: Iterable[Any]) -> tuple[base.Wrapper, ...]:
  """Builds the wrappers that a config names.

  Args:
    config: A sequence of `(name, arguments)` pairs; a bare name takes the
      defaults. Names: `"agn"`, `"cross_shard"`, `"loss_scale"`, or
      `"package.module:Class"` for one's own. Tuples, lists and dicts may come
      as `ml_collections` holds them.

  Returns:
    The wrappers, outermost first.

  Raises:
    ValueError: An unknown name or argument (the message lists what exists), or
      a value that the wrapper refuses.
    TypeError: An entry of another form.

  Example:
    >>> from_config((("loss_scale", {"scale": 128}),))[0].scale
    128.0
  """
  if isinstance(config, (str, Mapping)) or not isinstance(config, Iterable):
    raise TypeError(
      "wrappers must be a sequence of (name, arguments) pairs such as "
      f"(('loss_scale', {{'scale': 'dynamic'}}),), got {config!r}."
    )
  return base.check(
    [_build(f"wrappers[{i}]", entry) for i, entry in enumerate(config)]
  )


def to_config(
  wrappers: Sequence[base.Wrapper],
) -> tuple[tuple[str, dict[str, Any]], ...]:
  """Returns the config of some wrappers: the inverse of `from_config`.

  Args:
    wrappers: The wrappers, outermost first.

  Returns:
    `(name, arguments)` pairs of plain values, without the arguments that have
    their default.

  Example:
    >>> to_config([loss_scale.LossScale("dynamic")])
    (('loss_scale', {'scale': 'dynamic'}),)
  """
  return tuple((_name(w), _arguments(w)) for w in base.check(wrappers))


def built_in_wrappers() -> tuple[type[base.Base], ...]:
  """Returns the wrapper classes of flaxshard."""
  return tuple(_WRAPPERS.values())


def _build(where: str, entry: Any) -> Any:
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
  if not dataclasses.is_dataclass(cls):
    raise TypeError(f"{where} must name a dataclass, got {cls!r}.")
  values = {k: _value(f"{where}: {k}", v) for k, v in dict(arguments).items()}
  return registry.construct(where, cls, values)


def _value(where: str, value: Any) -> Any:
  if registry.is_dict(value):
    value = dict(value)
    if "type" not in value:
      raise ValueError(
        f"{where}: a dict needs a 'type', one of {', '.join(_VALUES)}; "
        f"got {value!r}."
      )
    cls = registry.lookup(f"{where}: type", value.pop("type"), _VALUES)
    if cls is Optimizer:
      name = value.pop("name", None)
      value = {"name": name, "arguments": tuple(value.items())}
    return _construct(where, cls, value)
  return value


def _name(instance: Any) -> str:
  cls = type(instance)
  for name, known in (*_WRAPPERS.items(), *_VALUES.items()):
    if cls is known:
      return name
  return f"{cls.__module__}:{cls.__qualname__}"


def _arguments(instance: Any) -> dict[str, Any]:
  arguments = {}
  for i, field in enumerate(dataclasses.fields(instance)):
    value = getattr(instance, field.name)
    # A wrapper's first argument is what it is about: it is always written.
    if field.init and (value != field.default or i == 0):
      if isinstance(value, Optimizer):
        value = dict(type="optimizer", name=value.name, **dict(value.arguments))
      elif dataclasses.is_dataclass(value):
        value = {"type": _name(value), **_arguments(value)}
      elif hasattr(value, "update"):
        raise ValueError(
          f"{_name(instance)}: {field.name}={value!r} cannot be written into a "
          "config; flaxshard.core.optimizer.Optimizer('sgd', (...)) can."
        )
      arguments[field.name] = value
  return arguments
