"""Models by name: the built-in ones, and one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx

from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.models.cnn import CNN
from flaxshard.models.resnet import ResNet
from flaxshard.models.transformer import Transformer

__all__ = ["CNN", "MODELS", "ResNet", "Transformer", "create"]

MODELS: Mapping[str, type[nn.Module]] = {
  "cnn": CNN,
  "resnet": ResNet,
  "transformer": Transformer,
}


def create(
  config: Any, *, num_classes: int, policy: Policy, seed: int = 0
) -> nn.Module | nnx.Module:
  """Makes the model that a config names.

  Args:
    config: A dict or ConfigDict with the `"name"` of the model and values of
      its fields; lists become tuples. Names: `"cnn"`, `"resnet"`,
      `"transformer"`, or `"package.module:Class"` for a module of one's own
      that takes `num_classes` and `policy`, an NNX one also `rngs`. A Linen
      module is called with `train=`; an NNX one is put in its mode.
    num_classes: Number of classes of the data, or size of its vocabulary.
    policy: Precision policy.
    seed: Of the random streams that an NNX module is initialized with.

  Returns:
    The module; a Linen one is not initialized.

  Raises:
    TypeError: `config` is not a dict, the name is not that of a module, or an
      argument without a default has no value.
    ValueError: No name, or an unknown name or field; the message lists what
      exists.

  Example:
    >>> create({"name": "cnn", "dense": 64}, num_classes=10, policy=Policy())
    ...     # doctest: +ELLIPSIS
    CNN(...dense = 64...)
  """
  given: dict[str, Any] = {"num_classes": num_classes, "policy": policy}
  if registry.is_dict(config) and "name" in config:
    cls = registry.lookup("config.model.name", config["name"], MODELS)
    if not (isinstance(cls, type) and issubclass(cls, (nn.Module, nnx.Module))):
      raise TypeError(
        f"config.model.name: {config['name']!r} must be a Linen or NNX module "
        f"class, got {cls!r}."
      )
    if issubclass(cls, nnx.Module):
      given["rngs"] = nnx.Rngs(seed)
  # Linen's own fields, for submodules.
  hidden = ("parent", "name")
  return registry.call("config.model", config, MODELS, hidden=hidden, **given)
