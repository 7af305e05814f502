"""Precision policies: dtypes of parameters, of computation and of outputs."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, get_args, Literal

import jax.numpy as jnp

from flaxshard.core import checks

# The names of the policies.
Name = Literal["float32", "mixed_float16", "mixed_bfloat16"]


@dataclasses.dataclass(frozen=True)
class Policy:
  """A precision policy by name, after Keras' `mixed_precision.Policy`.

  Modules cast inputs and parameters to the compute dtype: Flax's layers take
  both as `**policy.dtypes`.

  Attributes:
    name: `"float32"`, `"mixed_float16"` or `"mixed_bfloat16"`.
    param_dtype: The dtype in which parameters are stored and updated, float32
      in every policy.
    output_dtype: The dtype of a model's outputs, and so of its loss, float32
      too.

  Raises:
    TypeError: The name is not a string.
    ValueError: The name is unknown.

  Example:
    >>> import flaxshard as fs
    >>> policy = fs.Policy("mixed_float16")
    >>> policy.compute_dtype.name, policy.param_dtype.name
    ('float16', 'float32')
  """

  name: str = "float32"
  # An update is often smaller than half the spacing of 16-bit numbers.
  param_dtype: ClassVar[jnp.dtype] = jnp.dtype(jnp.float32)
  # A float16 sum of losses overflows above 65504.
  output_dtype: ClassVar[jnp.dtype] = jnp.dtype(jnp.float32)

  def __post_init__(self) -> None:
    checks.one_of("Policy: name", self.name, get_args(Name))

  @property
  def compute_dtype(self) -> jnp.dtype:
    """The dtype of activations, and of parameters in the computation."""
    return jnp.dtype(self.name.removeprefix("mixed_"))

  @property
  def dtypes(self) -> dict[str, Any]:
    """The arguments `dtype` and `param_dtype` of Flax's layers."""
    return {"dtype": self.compute_dtype, "param_dtype": self.param_dtype}
