"""Built-in models, and `create`, which makes a model from a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from flax import nnx
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import registry
from flaxshard.core.policy import Policy
from flaxshard.models.images import CNN
from flaxshard.models.images import ResNet
from flaxshard.models.transformer import Transformer

__all__ = ["CNN", "MODELS", "ResNet", "Transformer", "create"]

MODELS: Mapping[str, type[nn.Module]] = {
  "cnn": CNN,
  "resnet": ResNet,
  "transformer": Transformer,
}


def create(
  config: Any,
  *,
  num_classes: int | None = None,
  policy: Policy,
  seed: int = 0,
  example: Mapping[str, Any] | None = None,
) -> Any:
  """Creates the model that a config names.

  Args:
    config: A dict or ConfigDict with the `"name"` of the model and values of
      its fields; lists become tuples. The name is `"cnn"`, `"resnet"`,
      `"transformer"`, or `"package.module:attribute"` for a Linen or NNX module
      class, or a function that returns a module. It is given those of
      `num_classes`, `policy`, `dtype` (that of the policy's computations),
      `rngs` (an `nnx.Rngs`), `seed` and `example` that its signature names.
    num_classes: Number of classes of the data, or size of its vocabulary; None
      if the data has none.
    policy: Precision policy.
    seed: Seed of `nnx.Rngs`; Linen modules are initialized later.
    example: An example of the data, without the batch dimension.

  Returns:
    The module. An NNX module is initialized, a Linen module is not.

  Raises:
    TypeError: `config` is not a dict, the name is not that of a module class
      or a function that returns a module, or an argument without a default
      has no value.
    ValueError: The name is missing, or a name or field is unknown; the message
      lists the known ones.

  Example:
    >>> import flaxshard as fs
    >>> fs.models.create(  # doctest: +ELLIPSIS
    ...     {"name": "cnn", "dense": 64}, num_classes=10, policy=fs.Policy())
    CNN(...dense = 64...)
  """
  found = registry.find("config.model", config, MODELS)
  known: dict[str, Any] = dict(num_classes=num_classes, example=example)
  return make(*found, policy=policy, seed=seed, **known)


def make(
  where: str,
  function: Any,
  arguments: Mapping[str, Any],
  *,
  policy: Policy,
  seed: int,
  **offered: Any,
) -> Any:
  """Calls a function that makes a model.

  Args:
    where: Name of the function, for errors.
    function: The function or class.
    arguments: Its arguments.
    policy: Precision policy, for its arguments `policy` and `dtype`.
    seed: Its argument `seed`, and that of `rngs`, an `nnx.Rngs`.
    **offered: Further values that it is given if its signature names them. None
      is no value.
  """
  offered |= {"policy": policy, "seed": seed, "rngs": seed}
  if "dtype" not in arguments:
    offered["dtype"] = policy.compute_dtype
  known = {name: x for name, x in offered.items() if x is not None}
  given = registry.accepted(function, known)
  if "rngs" in given:
    given["rngs"] = nnx.Rngs(seed)
  # The method of a task may use what the task was created with, and a function
  # that takes `config` chooses a model by itself.
  task = type(getattr(function, "__self__", None))
  taken = {*given, *arguments, *registry.accepted(task, known)}
  takes_dtype = bool(taken & {"policy", "dtype", "config"})
  if not takes_dtype and policy.compute_dtype != jnp.float32:
    checks.warn(
      f"precision {policy.name!r} has no effect: {where} takes neither "
      "`policy` nor `dtype`."
    )
  return registry.construct(where, function, arguments, given=given)
