"""Batches of images: their check, and max pooling with a local gradient."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def check(inputs: jax.Array) -> None:
  """Raises a ValueError if inputs are no batch of images."""
  # Flax's Conv treats an input of three dimensions as one unbatched image.
  if inputs.ndim != 4:
    raise ValueError(
      "inputs must have shape [batch, height, width, channels], "
      f"got {inputs.shape}."
    )


def max_pool(
  x: jax.Array, window: int, *, stride: int, padding: int = 0
) -> jax.Array:
  """Returns the maxima of square windows, as `flax.linen.max_pool`.

  XLA gathers the whole batch on every device for the gradient of Flax's
  max_pool (select-and-scatter) in float16. Here the maxima are elementwise. As
  in Flax, the first of equal values has the gradient.

  Args:
    x: Images, [batch, height, width, channels].
    window: Height and width of the windows.
    stride: Distance between windows.
    padding: Pixels added on each side, which are no maximum.

  Example:
    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), 2, stride=2).ravel()
    Array([ 5.,  7., 13., 15.], dtype=float32)
  """
  sides = (padding, padding)
  x = jnp.pad(x, ((0, 0), sides, sides, (0, 0)), constant_values=-jnp.inf)
  batch, height, width, channels = x.shape
  # From the first pixel of the first window to that of the last one.
  rows = (height - window) // stride * stride + 1
  columns = (width - window) // stride * stride + 1
  return functools.reduce(
    _first_maximum,
    (
      jax.lax.slice(
        x,
        (0, i, j, 0),
        (batch, i + rows, j + columns, channels),
        (1, stride, stride, 1),
      )
      for i in range(window)
      for j in range(window)
    ),
  )


def _first_maximum(x: jax.Array, y: jax.Array) -> jax.Array:
  # jnp.maximum divides the gradient among equal values. NaN is kept.
  return jnp.where((y > x) | jnp.isnan(y), y, x)
