"""Loss scaling, fixed or dynamic, as a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import types
from typing import Any, ClassVar, NamedTuple
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


def _number(argument: str, value: Any) -> float:
  """Checks a positive finite float32; returns it as a Python float."""
  if isinstance(value, (bool, np.bool_)) or not isinstance(
    value, (int, float, np.integer, np.floating)
  ):
    raise TypeError(f"{argument} must be a number, got {value!r}.")
  if not _FLOAT32_TINY <= value <= _FLOAT32_MAX:
    raise ValueError(
      f"{argument} must be positive and finite, a normal float32, "
      f"got {value!r}."
    )
  return float(value)


def _wide(dtype: Any) -> Any:
  """Returns float32 for the dtypes below it; float8 promotes to nothing."""
  return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


@dataclasses.dataclass(frozen=True)
class FixedLossScale:
  """A scale that never changes; non-finite gradients are applied as they are.

  Args:
    loss_scale: Positive and finite.

  Raises:
    ValueError, TypeError: A value that is not.

  Example:
    >>> FixedLossScale(128).loss_scale
    128.0
  """

  loss_scale: float

  def __post_init__(self) -> None:
    value = _number("FixedLossScale: loss_scale", self.loss_scale)
    object.__setattr__(self, "loss_scale", value)


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
  """The rule by which a dynamic scale moves, after TF's `DynamicLossScale`.

  After `growth_interval` finite steps in a row the scale is multiplied by
  `growth_factor`, as long as the product is finite and at most `max_scale`.
  A step with a non-finite gradient is skipped whole; the `hysteresis`-th such
  step in a row, and each further one, multiplies the scale by `backoff_factor`,
  not below `min_scale`.

  Args:
    initial_scale: The first scale, between `min_scale` and `max_scale`.
    growth_interval: Finite steps in a row before the scale grows.
    growth_factor: Greater than 1.
    backoff_factor: Between 0 and 1; None is `1 / growth_factor`.
    min_scale: The floor.
    max_scale: The ceiling; by default the largest finite float32.
    hysteresis: Non-finite steps in a row before the scale backs off.

  Raises:
    ValueError, TypeError: A value outside of these.

  Example:
    >>> DynamicLossScale(initial_scale=2.0**10, growth_interval=100).min_scale
    1.0
  """

  initial_scale: float = 2.0**15
  growth_interval: int = 2000
  growth_factor: float = 2.0
  backoff_factor: float | None = None
  min_scale: float = 1.0
  max_scale: float = _FLOAT32_MAX
  hysteresis: int = 1

  def __post_init__(self) -> None:
    def where(field: str) -> str:
      return f"DynamicLossScale: {field}"

    numbers = ["initial_scale", "growth_factor", "min_scale", "max_scale"]
    if self.backoff_factor is not None:
      numbers.append("backoff_factor")
    for field in numbers:
      value = _number(where(field), getattr(self, field))
      object.__setattr__(self, field, value)
    for field in ("growth_interval", "hysteresis"):
      count = checks.integer(where(field), getattr(self, field), minimum=1)
      object.__setattr__(self, field, count)
    if not np.float32(self.growth_factor) > 1:
      raise ValueError(
        f"{where('growth_factor')} must be greater than 1, "
        f"got {self.growth_factor!r}."
      )
    if (
      self.backoff_factor is not None
      and not np.float32(self.backoff_factor) < 1
    ):
      raise ValueError(
        f"{where('backoff_factor')} must be between 0 and 1, "
        f"got {self.backoff_factor!r}."
      )
    if not self.min_scale <= self.initial_scale <= self.max_scale:
      raise ValueError(
        f"{where('initial_scale')} must lie between min_scale="
        f"{self.min_scale!r} and max_scale={self.max_scale!r}, "
        f"got {self.initial_scale!r}."
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
    """Returns the state after a step whose gradients were `finite` or not.

    Args:
      state: The state before the step.
      finite: bool scalar, agreed by all replicas.
    """
    scale = state.scale
    grown = scale * np.float32(self.growth_factor)
    may_grow = jnp.isfinite(grown) & (grown <= np.float32(self.max_scale))
    due = state.good_steps + 1 >= self.growth_interval
    if self.backoff_factor is None:
      # Behind a barrier, or XLA multiplies with the rounded reciprocal.
      factor = jax.lax.optimization_barrier(jnp.float32(self.growth_factor))
      lower = scale / factor
    else:
      lower = scale * np.float32(self.backoff_factor)
    lower = jnp.maximum(lower, np.float32(self.min_scale))
    bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
    up = jnp.where(due & may_grow, grown, scale)
    down = jnp.where(bad_steps >= self.hysteresis, lower, scale)
    return LossScaleState(
      scale=jnp.where(finite, up, down),
      good_steps=jnp.where(finite & ~due, state.good_steps + 1, 0),
      skipped_steps=state.skipped_steps + jnp.where(finite, 0, 1),
      bad_steps=bad_steps,
    )


class LossScaleState(NamedTuple):
  """The state of `LossScale`.

  Attributes:
    scale: float32 scalar, what the next loss is multiplied by.
    good_steps: int32 scalar, finite steps since the scale last changed.
    skipped_steps: int32 scalar, steps skipped since the beginning.
    bad_steps: int32 scalar, non-finite steps since the last finite one.
  """

  scale: jax.Array
  good_steps: jax.Array
  skipped_steps: jax.Array
  bad_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class LossScale(base.Base):
  """Scales the loss, unscales the gradients, skips steps that overflowed.

  float16 gradients under 6e-8 are lost as zeros; multiplied by a scale they are
  not. A dynamic scale looks for the largest one that does not overflow: a step
  with a non-finite gradient changes nothing but the scale: not parameters,
  optimizer state, `step`, schedules, nor the collections that
  `apply_gradients` was handed.

  Scaling is done in float32, so the loss should be float32 too (a float16 loss
  has a float16 cotangent, in which scales over 2**15 overflow). Unscaled
  gradients are float32 even where parameters are float16, as they would be lost
  otherwise; a few of optax's transformations (`apply_if_finite`, `novograd`)
  need parameters in float32 for that.

  Args:
    scale: `"dynamic"`; `"auto"`, which is dynamic if a parameter or the
      policy's compute dtype is float16, and otherwise no scaling at all; a
      number, a fixed scale; a `DynamicLossScale` or a `FixedLossScale`.
    policy: What `"auto"` reads. None takes the model's `policy`, or else its
      `dtype`, in `create_train_state`.
    warn_at_floor: Raise a RuntimeWarning from the compiled step when it skips
      while a dynamic scale stands at its floor. This puts a host callback into
      the step: JAX's persistent compilation cache does not store a program with
      one, and `jax.export` cannot write it. The training loop warns from the
      metrics without a callback, and so can your loop: see `warning`.

  Raises:
    ValueError, TypeError: A value outside of these.

  Example:
    >>> import flaxshard as fs, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> state, loss = state.minimize(lambda p: (p["w"] ** 2).sum())
    >>> float(loss), float(state.wrapper_states["loss_scale"].scale)
    (3.0, 32768.0)

  References:
    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740);
    `tf.keras.mixed_precision.LossScaleOptimizer`. Hysteresis as in Megatron-LM.
  """

  name: ClassVar[str] = "loss_scale"
  # Flax's `DynamicScale`, as its ImageNet and WMT examples keep it.
  foreign_paths: ClassVar[Mapping[str, str]] = types.MappingProxyType(
    {"dynamic_scale/scale": "scale", "dynamic_scale/fin_steps": "good_steps"}
  )

  scale: str | float | DynamicLossScale | FixedLossScale = "dynamic"
  policy: Policy | None = None
  warn_at_floor: bool = False

  def __post_init__(self) -> None:
    scale = self.scale
    if isinstance(scale, str):
      if scale not in ("dynamic", "auto"):
        raise ValueError(
          f"LossScale: scale={scale!r}; allowed: 'dynamic', 'auto', a positive "
          "number, a DynamicLossScale or a FixedLossScale."
        )
    elif not isinstance(scale, (DynamicLossScale, FixedLossScale)):
      try:
        value = _number("LossScale: scale", scale)
      except TypeError as e:
        raise TypeError(
          f"LossScale: scale={scale!r}; allowed: 'dynamic', 'auto', a positive "
          "number, a DynamicLossScale or a FixedLossScale."
        ) from e
      object.__setattr__(self, "scale", value)
    if isinstance(self.policy, str):
      object.__setattr__(self, "policy", Policy(self.policy))
    if self.policy is not None and not isinstance(self.policy, Policy):
      raise TypeError(
        f"LossScale: policy must be a Policy or its name, got {self.policy!r}."
      )
    checks.boolean("LossScale: warn_at_floor", self.warn_at_floor)

  @property
  def rule(self) -> DynamicLossScale | FixedLossScale:
    """How the scale moves, once `"auto"` has decided that there is one."""
    if isinstance(self.scale, str):
      return DynamicLossScale()
    if isinstance(self.scale, float):
      return FixedLossScale(self.scale)
    return self.scale

  def with_policy(self, policy: Policy) -> LossScale:
    """Returns the wrapper with the model's policy, unless it has one."""
    if self.policy is not None:
      return self
    return dataclasses.replace(self, policy=policy)

  def init(self, params: Any, tx: Any) -> LossScaleState | tuple[()]:
    """Returns the first state; `()` where `"auto"` finds nothing to scale."""
    del tx
    if self.scale == "auto" and not self._finds_float16(params):
      return ()
    rule = self.rule
    if isinstance(rule, FixedLossScale):
      scale = rule.loss_scale
    else:
      scale = rule.initial_scale
    return LossScaleState(
      scale=jnp.array(scale, jnp.float32),
      good_steps=jnp.zeros((), jnp.int32),
      skipped_steps=jnp.zeros((), jnp.int32),
      bad_steps=jnp.zeros((), jnp.int32),
    )

  def scale_loss(self, state: Any, loss: jax.Array) -> jax.Array:
    """Returns the loss times the scale, in float32 (float64 stays)."""
    if not state:
      return loss
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.inexact):
      raise TypeError(f"loss must be floating-point, got {loss.dtype}.")
    dtype = _wide(loss.dtype)
    return loss.astype(dtype) * self._scale(state).astype(dtype)

  def unscale_gradients(self, state: Any, grads: Any) -> Any:
    """Returns the gradients over the scale, in float32 or wider."""
    if not state:
      return grads
    scale = self._scale(state)

    # XLA turns a division by a broadcast scalar into a multiplication with its
    # reciprocal, and that of 2**127 is subnormal and reads as zero: the largest
    # scales are taken off in two steps, which the barrier keeps apart.
    part = jnp.where(scale > 2.0**125, np.float32(0.25), np.float32(1.0))
    part, rest = jax.lax.optimization_barrier((part, scale * part))

    def unscale(g: jax.Array) -> jax.Array:
      g = g.astype(_wide(g.dtype))
      return g * part.astype(g.real.dtype) / rest.astype(g.real.dtype)

    return gradients.map_gradients(unscale, grads)

  def apply(
    self, state: Any, target: base.Target, grads: Any, next: base.Next
  ) -> tuple[base.Target, Any]:
    """Calls `next` if all gradients are finite; moves a dynamic scale."""
    if not state:
      return next(target, grads), state
    rule = self.rule
    if isinstance(rule, FixedLossScale):
      # The configured scale replaces one that a checkpoint brought along.
      return next(target, grads), state._replace(scale=self._scale(state))
    finite = replica_context.all_replicas(gradients.all_finite(grads))

    new_state = rule.update(state, finite)
    at_floor = state.scale <= np.float32(rule.min_scale)

    def apply(target: Any, grads: Any, skipped_steps: Any) -> Any:
      return next(target, grads), skipped_steps

    def skip(target: Any, grads: Any, skipped_steps: Any) -> Any:
      del grads
      if self.warn_at_floor:
        skipped_steps = _warn(at_floor, state.scale, skipped_steps)
      return target, skipped_steps

    # A branch keeps donated buffers in place, where a select of new and old
    # would copy parameters and optimizer state. The update comes first.
    target, skipped_steps = jax.lax.cond(
      finite, apply, skip, target, grads, new_state.skipped_steps
    )
    return target, new_state._replace(skipped_steps=skipped_steps)

  def metrics(self, state: Any) -> dict[str, jax.Array]:
    """Returns `loss_scale` and `skipped_steps`, to be logged."""
    if not state:
      return {}
    return {
      "loss_scale": self._scale(state),
      "skipped_steps": state.skipped_steps,
    }

  def warning(
    self, previous: Mapping[str, float] | None, current: Mapping[str, float]
  ) -> str | None:
    """Warns if steps were skipped while the scale stood at its floor.

    Args:
      previous: `metrics` when they were last logged; None the first time.
      current: `metrics` now.
    """
    rule = self.rule
    if isinstance(rule, FixedLossScale) or "loss_scale" not in current:
      return None
    if current["loss_scale"] > rule.min_scale:
      return None
    if previous is None:
      previous = {"loss_scale": rule.initial_scale, "skipped_steps": 0}
    skipped = current["skipped_steps"] - previous["skipped_steps"]
    # Skipped steps that only took the scale down to its floor are no failure.
    if skipped <= rule.steps_to_floor(previous["loss_scale"]):
      return None
    return _floor_message(current["loss_scale"], current["skipped_steps"])

  def _scale(self, state: LossScaleState) -> jax.Array:
    rule = self.rule
    if isinstance(rule, FixedLossScale):
      return jnp.array(rule.loss_scale, jnp.float32)
    return state.scale

  def _finds_float16(self, params: Any) -> bool:
    if self.policy is not None and self.policy.compute_dtype == jnp.float16:
      return True
    return any(
      getattr(x, "dtype", None) == jnp.float16 for x in jax.tree.leaves(params)
    )


def _floor_message(scale: float, skipped_steps: float) -> str:
  return (
    f"LossScale: the scale stands at its floor, {scale:g}, and gradients are "
    f"still not finite ({int(skipped_steps)} steps skipped so far). Scaling "
    "cannot help here: look for the source with "
    "flaxshard.nonfinite_leaves(grads), or lower min_scale."
  )


def _warn(
  at_floor: jax.Array, scale: jax.Array, skipped_steps: jax.Array
) -> jax.Array:
  """Warns on the host where `at_floor`; returns `skipped_steps` unchanged."""

  def on_host(tell: Any, scale: Any, skipped_steps: Any) -> Any:
    if tell:  # vmap turns branches into selects and calls both
      message = _floor_message(float(scale), int(skipped_steps))
      warnings.warn(message, RuntimeWarning, stacklevel=2)
    return np.asarray(skipped_steps)

  def call(*args: jax.Array) -> jax.Array:
    # Pure, so that the step keeps JAX's fast dispatch; a debug callback costs
    # ten microseconds per leaf of the state on every step.
    return jax.pure_callback(
      on_host,
      jax.ShapeDtypeStruct((), jnp.int32),
      *args,
      vmap_method="sequential",
    )

  unchanged = jax.lax.cond(
    at_floor,
    replica_context.fully_manual(call),
    lambda *args: args[-1],
    at_floor & replica_context.is_first_replica(),
    scale,
    skipped_steps,
  )
  # Only the warning differs between replicas. `Strategy.run` cannot know that
  # of a callback.
  return replica_context.assume_replicated(unchanged)
