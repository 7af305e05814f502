"""Models by name: the built-in ones, and one's own."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

from flax import linen as nn

from flaxshard import registry
from flaxshard.models.cnn import CNN
from flaxshard.models.resnet import ResNet
from flaxshard.models.transformer import Transformer
from flaxshard.policy import Policy

__all__ = ["CNN", "MODELS", "ResNet", "Transformer", "create"]

MODELS: Mapping[str, type[nn.Module]] = {
  "cnn": CNN,
  "resnet": ResNet,
  "transformer": Transformer,
}


def create(config: Any, *, num_classes: int, policy: Policy) -> nn.Module:
  """Makes the model that a config names.

  Args:
    config: A dict or ConfigDict with the `"name"` of the model and values of
      its fields; lists become tuples. Names: `"cnn"`, `"resnet"`,
      `"transformer"`, or `"package.module:Class"` for a Linen module of one's
      own that has the fields `num_classes` and `policy`.
    num_classes: Number of classes of the data, or size of its vocabulary.
    policy: Precision policy.

  Returns:
    The module, not initialized.

  Raises:
    TypeError: `config` is not a dict, the name is not that of a Linen module,
      or a field without a default has no value.
    ValueError: No name, or an unknown name or field; the message lists what
      exists.

  Example:
    >>> create({"name": "cnn", "dense": 64}, num_classes=10, policy=Policy())
    ...     # doctest: +ELLIPSIS
    CNN(...dense = 64...)
  """
  if not _is_dict(config):
    raise TypeError(
      f"config.model must be a dict such as {{'name': 'cnn'}}, got {config!r}."
    )
  fields = dict(config)
  if "name" not in fields:
    raise ValueError(
      f"config.model needs a 'name', one of {', '.join(MODELS)}, or "
      f"'package.module:Class'; got {fields!r}."
    )
  name = fields.pop("name")
  cls = registry.lookup("config.model.name", name, MODELS)
  if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
    raise TypeError(
      f"config.model.name: {name!r} must be a Linen module class, got {cls!r}."
    )
  given = {"num_classes": num_classes, "policy": policy}
  reserved = {"parent", "name"}  # of Linen, for submodules
  known = [f.name for f in dataclasses.fields(cls) if f.init]
  for field in given:
    if field not in known:
      raise TypeError(
        f"config.model.name: {name!r} must have the field {field!r}; it has "
        f"{', '.join(f for f in known if f not in reserved)}."
      )
  allowed = [f for f in known if f not in reserved and f not in given]
  for field in fields:
    if field not in allowed:
      raise ValueError(
        f"config.model: unknown field {field!r}; {cls.__name__} takes "
        f"{', '.join(allowed)}.{registry.near(field, allowed)}"
      )
  kwargs = {field: _plain(value) for field, value in fields.items()}
  try:
    return cls(**kwargs, **given)
  except TypeError as e:
    raise TypeError(f"config.model ({name!r}): {e}") from e


def _plain(value: Any) -> Any:
  if _is_dict(value):
    return {k: _plain(v) for k, v in dict(value).items()}
  if isinstance(value, (list, tuple)):
    return tuple(_plain(v) for v in value)
  return value


def _is_dict(value: Any) -> bool:
  return isinstance(value, Mapping) or hasattr(value, "to_dict")  # ConfigDict
