"""Rules for a loss scale: `FixedLossScale` and `DynamicLossScale`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


class LossScaleState(NamedTuple):
  """The state of `LossScale`.

  Attributes:
    scale: float32 scalar, the factor of the next loss.
    good_steps: int32 scalar, finite steps since the scale last changed.
    skipped_steps: int32 scalar, steps skipped since the beginning.
    bad_steps: int32 scalar, non-finite steps since the last finite one.
  """

  scale: jax.Array
  good_steps: jax.Array
  skipped_steps: jax.Array
  bad_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
  """A scale that never changes. Non-finite gradients are applied as they are.

  Args:
    loss_scale: The scale, positive and finite.

  Raises:
    TypeError: `loss_scale` is not a number.
    ValueError: `loss_scale` is not positive and finite.

  Example:
    >>> FixedLossScale(128).loss_scale
    128.0
  """

  loss_scale: float

  def __post_init__(self) -> None:
    value = check_scale("FixedLossScale: loss_scale", self.loss_scale)
    object.__setattr__(self, "loss_scale", value)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
  """A scale that grows after finite steps and backs off after non-finite ones.

  After `growth_interval` finite steps in a row the scale is multiplied by
  `growth_factor`, if the product is finite and at most `max_scale`. A step with
  a non-finite gradient is skipped. After `hysteresis` skipped steps in a row,
  and after each further one, the scale is multiplied by `backoff_factor`, but
  not below `min_scale`. A finite step starts that count of skipped steps again.

  Args:
    initial_scale: The first scale, between `min_scale` and `max_scale`.
    growth_interval: Number of finite steps in a row before the scale grows.
    growth_factor: A factor above 1.
    backoff_factor: A factor between 0 and 1; None is `1 / growth_factor`.
    min_scale: The smallest scale.
    max_scale: The largest scale; the default is the largest finite float32.
    hysteresis: Number of skipped steps in a row before the scale backs off.

  Raises:
    TypeError: An argument is not a number, or a count is not an integer.
    ValueError: An argument is out of range.

  Example:
    >>> DynamicLossScale(initial_scale=2.0**10, growth_interval=100).min_scale
    1.0

  References:
    `tf.keras.mixed_precision.LossScaleOptimizer`, for growth and backoff.
  """

  initial_scale: float = 2.0**15
  growth_interval: int = 2000
  growth_factor: float = 2.0
  backoff_factor: float | None = None
  min_scale: float = 1.0
  max_scale: float = _FLOAT32_MAX
  hysteresis: int = 1

  def __post_init__(self) -> None:
    name = "DynamicLossScale: "
    for field in (
      "initial_scale",
      "growth_factor",
      "backoff_factor",
      "min_scale",
      "max_scale",
    ):
      value = getattr(self, field)
      if field != "backoff_factor" or value is not None:
        object.__setattr__(self, field, check_scale(name + field, value))
    for field in ("growth_interval", "hysteresis"):
      count = checks.integer(name + field, getattr(self, field), minimum=1)
      object.__setattr__(self, field, count)
    # As float32, in which the scale is computed: 1 + 1e-9 is 1 there.
    if not np.float32(self.growth_factor) > 1:
      raise ValueError(
        f"{name}growth_factor must be above 1, got {self.growth_factor!r}."
      )
    if not np.float32(self.backoff_factor or 0) < 1:
      raise ValueError(
        f"{name}backoff_factor must be below 1, got {self.backoff_factor!r}."
      )
    if not self.min_scale <= self.initial_scale <= self.max_scale:
      raise ValueError(
        f"{name}initial_scale must be between min_scale={self.min_scale!r} and "
        f"max_scale={self.max_scale!r}, got {self.initial_scale!r}."
      )

  def steps_to_floor(self, scale: float) -> int:
    """Returns how many skipped steps in a row take a scale to `min_scale`."""
    if scale <= self.min_scale:
      return 0
    factor = 1 / self.growth_factor
    if self.backoff_factor is not None:
      factor = self.backoff_factor
    backoffs = math.log(self.min_scale / scale) / math.log(factor)
    # The first `hysteresis - 1` skipped steps leave the scale as it is.
    return math.ceil(backoffs) + self.hysteresis - 1

  def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
    """Returns the state after a step.

    Args:
      state: The state before the step.
      finite: bool scalar, whether all gradients of all replicas are finite.
    """
    scale = state.scale
    grown = scale * np.float32(self.growth_factor)
    may_grow = jnp.isfinite(grown) & (grown <= np.float32(self.max_scale))
    due = state.good_steps + 1 >= self.growth_interval
    if self.backoff_factor is None:
      # An array, also under `vmap`: XLA would multiply by the reciprocal of a
      # constant or of a scalar, which is rounded.
      factor = 0 * scale + np.float32(self.growth_factor)
      backed_off = scale / jax.lax.optimization_barrier(factor)
    else:
      backed_off = scale * np.float32(self.backoff_factor)
    backed_off = jnp.maximum(backed_off, np.float32(self.min_scale))
    bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
    if_finite = jnp.where(due & may_grow, grown, scale)
    if_not = jnp.where(bad_steps >= self.hysteresis, backed_off, scale)
    return LossScaleState(
      scale=jnp.where(finite, if_finite, if_not),
      # Also 0 where the scale could not grow: it is tried again later.
      good_steps=jnp.where(finite & ~due, state.good_steps + 1, 0),
      skipped_steps=state.skipped_steps + jnp.where(finite, 0, 1),
      bad_steps=bad_steps,
    )


def check_scale(argument: str, value: Any) -> float:
  """Returns a positive number that is a normal float32, as a Python float.

  Raises:
    TypeError: `value` is not a number.
    ValueError: `value` is zero, negative, not finite or subnormal in float32.
  """
  number = checks.number(argument, value, above=0)
  # A subnormal float32 reads as zero on many devices.
  if not _FLOAT32_TINY <= number <= _FLOAT32_MAX:
    raise ValueError(
      f"{argument} must be between {_FLOAT32_TINY:g} and {_FLOAT32_MAX:g}, the "
      f"normal float32 numbers, got {value!r}."
    )
  return number
