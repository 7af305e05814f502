"""Linen modules: how they are initialized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp


def prepare(
  model: nn.Module, rng: Any, sample_input: Any
) -> tuple[Callable[..., dict[str, Any]], tuple[Any, dict[int, Any]]]:
  """Returns a function that initializes a Linen module, and its arguments.

  Args:
    model: The module.
    rng: A PRNG key, or a dict of keys by stream name.
    sample_input: One input, arrays or `jax.ShapeDtypeStruct`s; a tuple is a
      list of positional arguments.

  Returns:
    `(initialize, args)`; `jax.jit(initialize)(*args)` returns the variables, in
    the boxes of their partitioning metadata where they have any. The
    overwrite-with-gradient collection of Flax's fp8 modules is with the
    parameters, as they are trained together.

  Raises:
    TypeError: `rng` is no key.
    ValueError: `sample_input` is empty.
  """
  check_rng(rng)
  # A NamedTuple is one argument.
  inputs = sample_input if type(sample_input) is tuple else (sample_input,)
  leaves, treedef = jax.tree.flatten(inputs)
  if not leaves:
    raise ValueError(
      f"sample_input must be one input of the model, got {sample_input!r}."
    )
  leaves = [
    jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
    for x in leaves
  ]
  # A flag among the inputs, such as train=True, is not to be traced.
  traced = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape")}

  def initialize(rng: Any, traced: dict[int, Any]) -> dict[str, Any]:
    every = [traced.get(i, x) for i, x in enumerate(leaves)]
    variables = dict(model.init(rng, *jax.tree.unflatten(treedef, every)))
    if OVERWRITE_WITH_GRADIENT in variables:
      owg = variables.pop(OVERWRITE_WITH_GRADIENT)
      params = {"params": variables["params"], OVERWRITE_WITH_GRADIENT: owg}
      variables["params"] = params
    return variables

  return initialize, (rng, traced)


def check_rng(rng: Any) -> None:
  """Raises a TypeError unless `rng` is a PRNG key, or a dict of keys."""
  message = f"rng must be a PRNG key or a dict of keys, got {rng!r}."
  if not jax.tree.leaves(rng):
    raise TypeError(message)
  try:
    jax.tree.map(jax.random.key_data, rng)
  except TypeError as e:
    raise TypeError(message) from e
