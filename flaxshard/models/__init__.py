"""Built-in models, and `create`, which makes a model from a config."""

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
  """Creates the model that a config names.

  Args:
    config: A dict or ConfigDict with the `"name"` of the model and values of
      its fields; lists become tuples. The name is `"cnn"`, `"resnet"`,
      `"transformer"`, or `"package.module:Class"` for a module class that takes
      `num_classes` and `policy`, and `rngs` if it is an NNX class. The training
      loop calls a Linen module with `train=`, and calls `train()` or `eval()`
      of an NNX module.
    num_classes: Number of classes of the data, or size of its vocabulary.
    policy: Precision policy.
    seed: Seed of `nnx.Rngs`; Linen modules are initialized later.

  Returns:
    The module. An NNX module is initialized, a Linen module is not.

  Raises:
    TypeError: `config` is not a dict, the name is not that of a module
      class, or an argument without a default has no value.
    ValueError: The name is missing, or a name or field is unknown; the message
      lists the known ones.

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
  # Every Linen module has the fields `parent` and `name`, set by Flax.
  hidden = ("parent", "name")
  return registry.call("config.model", config, MODELS, hidden=hidden, **given)


def __dir__() -> list[str]:
  return sorted(__all__)
