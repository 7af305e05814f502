"""Precision policies: what is stored, what is computed in, what comes out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

_COMPUTE_DTYPES = {
  "float32": jnp.float32,
  "mixed_float16": jnp.float16,
  "mixed_bfloat16": jnp.bfloat16,
}
# The names of the policies.
NAMES = tuple(_COMPUTE_DTYPES)


@dataclasses.dataclass(frozen=True)
class Policy:
  """A precision policy by name, after Keras' `mixed_precision.Policy`.

  Parameters are float32 in every policy; the compute dtype is what modules cast
  inputs and parameters to. Flax modules take both as `dtype=` and
  `param_dtype=`.

  Args:
    name: `"float32"`, `"mixed_float16"` or `"mixed_bfloat16"`.

  Raises:
    ValueError: Another name.
    TypeError: The name is not a string.

  Example:
    >>> policy = Policy("mixed_float16")
    >>> policy.compute_dtype.name, policy.param_dtype.name
    ('float16', 'float32')
  """

  name: str = "float32"

  def __post_init__(self) -> None:
    allowed = ", ".join(map(repr, _COMPUTE_DTYPES))
    if not isinstance(self.name, str):
      raise TypeError(
        f"Policy: name must be a string, got {self.name!r}; allowed: {allowed}."
      )
    if self.name not in _COMPUTE_DTYPES:
      raise ValueError(
        f"Policy: unknown name {self.name!r}; allowed: {allowed}."
      )

  @property
  def compute_dtype(self) -> jnp.dtype:
    """The dtype of activations and of parameters as they are used."""
    return jnp.dtype(_COMPUTE_DTYPES[self.name])

  @property
  def param_dtype(self) -> jnp.dtype:
    """The dtype that parameters are stored and updated in: float32."""
    return jnp.dtype(jnp.float32)

  @property
  def output_dtype(self) -> jnp.dtype:
    """The dtype of a model's outputs, so of its loss: float32."""
    return jnp.dtype(jnp.float32)

  def cast_to_compute(self, tree: Any) -> Any:
    """Casts the floating-point leaves of `tree` to the compute dtype."""
    return _cast_floating(tree, self.compute_dtype)

  def cast_to_output(self, tree: Any) -> Any:
    """Casts the floating-point leaves of `tree` to the output dtype."""
    return _cast_floating(tree, self.output_dtype)


def _cast_floating(tree: Any, dtype: jnp.dtype) -> Any:
  def cast(x: Any) -> Any:
    x = jnp.asarray(x)
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

  return jax.tree.map(cast, tree)
