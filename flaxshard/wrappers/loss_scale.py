"""LossScale: scales the loss and skips steps that overflow."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base

PyTree = Any

_FLOAT32_MAX = float(np.finfo(np.float32).max)
# A subnormal float32 reads as zero on many devices.
_check_scale = functools.partial(
  checks.number,
  minimum=float(np.finfo(np.float32).tiny),
  maximum=_FLOAT32_MAX,
)


class _Unscaled(NamedTuple):
  """The scale of an unscaled gradient, and its value before.

  Attributes:
    scale: What it was divided by.
    narrow: The scaled gradient if that is traced and has 16 bits, else None.
  """

  scale: jax.Array
  narrow: jax.Array | None


# By the id of the gradient, as arrays and tracers have no hash. A gradient that
# is gone has no entry: a new one may have its id.
_unscaled: dict[int, _Unscaled] = {}


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
    >>> import flaxshard as fs
    >>> fs.FixedLossScale(128).loss_scale
    128.0
  """

  loss_scale: float

  def __post_init__(self) -> None:
    checks.fields(self, _check_scale, "loss_scale")


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
    >>> import flaxshard as fs
    >>> rule = fs.DynamicLossScale(initial_scale=2.0**10, growth_interval=100)
    >>> rule.min_scale
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
    scales = ("initial_scale", "min_scale", "max_scale")
    checks.fields(self, _check_scale, *scales)
    counts = ("growth_interval", "hysteresis")
    checks.fields(self, checks.integer, *counts, minimum=1)
    # Not 1 as a float32 either, in which the scale is computed.
    checks.fields(self, _check_scale, "growth_factor", above=1 + 2.0**-24)
    if self.backoff_factor is not None:
      checks.fields(self, _check_scale, "backoff_factor", below=1 - 2.0**-25)
    if not self.min_scale <= self.initial_scale <= self.max_scale:
      raise ValueError(
        f"DynamicLossScale: initial_scale must be between "
        f"min_scale={self.min_scale!r} and max_scale={self.max_scale!r}, got "
        f"{self.initial_scale!r}."
      )

  # One program in an eager step too, which would dispatch each operation.
  @functools.partial(jax.jit, static_argnums=0, inline=True)
  def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
    """Returns the state after a step.

    Args:
      state: The state before the step.
      finite: bool scalar, whether all gradients of all replicas are finite.
    """
    scale = state.scale
    grown = scale * np.float32(self.growth_factor)
    # Infinity is above the largest scale.
    may_grow = grown <= np.float32(self.max_scale)
    due = state.good_steps + 1 >= self.growth_interval
    if self.backoff_factor is None:
      # An array, also under `vmap`: XLA would multiply by the reciprocal of a
      # constant or of a scalar, which is rounded.
      factor = 0 * scale + np.float32(self.growth_factor)
      backed_off = scale / jax.lax.optimization_barrier(factor)
    else:
      backed_off = scale * np.float32(self.backoff_factor)
    bad_steps = jnp.where(finite, 0, state.bad_steps + 1)
    if_finite = jnp.where(due & may_grow, grown, scale)
    if_not = jnp.where(bad_steps >= self.hysteresis, backed_off, scale)
    new_scale = jnp.where(finite, if_finite, if_not)
    low, high = np.float32(self.min_scale), np.float32(self.max_scale)
    return LossScaleState(
      # That of a checkpoint may have been out of these bounds.
      scale=jax.lax.clamp(low, new_scale, high),
      # Also 0 where the scale could not grow: it is tried again later.
      good_steps=jnp.where(finite & ~due, state.good_steps + 1, 0),
      skipped_steps=state.skipped_steps + jnp.where(finite, 0, 1),
      bad_steps=bad_steps,
    )


_DYNAMIC = DynamicLossScale()
# `()` where `"auto"` finds nothing to scale: nothing is compiled then.
State = LossScaleState | tuple[()]


@dataclasses.dataclass(frozen=True)
class LossScale(base.Base):
  """Scales the loss, unscales the gradients and skips steps that overflow.

  float16 gradients below 3e-8 round to zero. A loss that is multiplied by a
  scale has gradients that do not. A dynamic scale searches for the largest
  scale that does not overflow. A step with a non-finite gradient changes the
  scale and nothing else: not the parameters, the optimizer state, `step`, the
  schedules, or the collections that `apply_gradients` received.

  Scaling is done in float32. The loss should be float32 too: the cotangent of a
  float16 loss is float16, in which a scale above 2**15 overflows. Unscaled
  gradients are float32 even if parameters are float16, because small ones would
  round to zero again. A few transformations of optax (`apply_if_finite`,
  `novograd`) therefore need float32 parameters.

  Args:
    scale: One of

      * `"dynamic"`: a `DynamicLossScale()`;
      * `"auto"`: dynamic if a parameter or the policy's compute dtype is
        float16, or `create_train_state` finds that the model computes in it;
        otherwise no scaling at all;
      * a number: a fixed scale;
      * a `DynamicLossScale` or a `FixedLossScale`.
    policy: The precision policy that `"auto"` looks at. With None,
      `create_train_state` takes the model's `policy`, or else its `dtype`.

  Raises:
    TypeError: An argument has a wrong type.
    ValueError: An argument is out of range.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp, optax
    >>> state = fs.TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1),
    ...     wrappers=[fs.LossScale("dynamic")])
    >>> state, loss = state.minimize(lambda p: (p["w"] ** 2).sum())
    >>> float(loss), float(state.wrapper_states["loss_scale"].scale)
    (3.0, 32768.0)

  References:
    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740);
    `tf.keras.mixed_precision.LossScaleOptimizer`.
  """

  name: ClassVar[str] = "loss_scale"
  takes_indexed_slices: ClassVar[bool] = True

  scale: str | float | DynamicLossScale | FixedLossScale = "dynamic"
  policy: Policy | None = None

  def __post_init__(self) -> None:
    if isinstance(self.scale, str):
      modes = ("dynamic", "auto")
      checks.fields(self, checks.one_of, "scale", allowed=modes)
    elif not isinstance(self.scale, (DynamicLossScale, FixedLossScale)):
      checks.fields(self, _check_scale, "scale")
    if self.policy is not None and not isinstance(self.policy, Policy):
      object.__setattr__(self, "policy", Policy(self.policy))

  @property
  def rule(self) -> DynamicLossScale | FixedLossScale:
    """The rule by which the scale changes, if there is a scale."""
    if isinstance(self.scale, str):
      return _DYNAMIC
    if isinstance(self.scale, float):
      return FixedLossScale(self.scale)
    return self.scale

  @property
  def skips_steps(self) -> bool:
    """Whether a step with a non-finite gradient is skipped."""
    return isinstance(self.rule, DynamicLossScale)

  def init(self, params: PyTree, tx: Any) -> State:
    """Returns the first state; `()` if `"auto"` finds nothing to scale."""
    del tx
    if self.scale == "auto":
      dtypes = {trees.dtype_of(x) for x in jax.tree.leaves(params)}
      if self.policy is not None:
        dtypes.add(self.policy.compute_dtype)
      if jnp.dtype(jnp.float16) not in dtypes:
        return ()
    rule = self.rule
    scale = (
      rule.loss_scale
      if isinstance(rule, FixedLossScale)
      else rule.initial_scale
    )
    zero = jnp.zeros((), jnp.int32)
    return LossScaleState(jnp.array(scale, jnp.float32), zero, zero, zero)

  def scale_loss(self, state: State, loss: jax.Array) -> jax.Array:
    """Returns the loss times the scale, in float32 (float64 stays).

    Raises:
      TypeError: The loss is not floating-point.
    """
    if not state:
      return loss
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.inexact):
      raise TypeError(f"loss must be floating-point, got {loss.dtype}.")
    loss = gradients.widen(loss)
    return loss * state.scale.astype(loss.dtype)

  def unscale_gradients(self, state: State, grads: PyTree) -> PyTree:
    """Returns the gradients divided by the scale, in float32 or wider.

    Raises:
      ValueError: They are the result of such a division already.
    """
    if not state:
      return grads
    by = _divisor(state.scale)

    def unscale(g: jax.Array) -> jax.Array:
      if _known(g, state.scale):
        raise ValueError(
          "unscale_gradients: the gradients are unscaled already, as "
          "value_and_grad returns them. Pass them to apply_gradients."
        )
      unscaled = _divide(g, by)
      is_narrow = isinstance(g, jax.core.Tracer) and g.dtype.itemsize == 2
      _unscaled[id(unscaled)] = _Unscaled(state.scale, g if is_narrow else None)
      end = weakref.finalize(unscaled, _unscaled.pop, id(unscaled), None)
      end.atexit = False
      return unscaled

    return gradients.map_gradients(unscale, grads)

  def apply(
    self, state: State, target: base.Target, grads: PyTree, next: base.Next
  ) -> tuple[base.Target, State]:
    """Calls `next` if all gradients are finite; updates a dynamic scale."""
    if not state:
      return next(target, grads), state
    rule = self.rule
    if isinstance(rule, FixedLossScale):
      # A restored state may have another scale: the configured one replaces it.
      scale = jnp.array(rule.loss_scale, jnp.float32)
      return next(target, grads), state._replace(scale=scale)
    # Once, for the finite check and for the update in the branch.
    grads = gradients.deduplicate(grads)
    finite = gradients.all_finite(grads)
    context = replica_context.current.get()
    if context is not None and not context.gradients_reduced:
      # A replica alone may have an infinity. Reduced gradients have it on all.
      overflows = (~finite).astype(jnp.int32)
      finite = replica_context.reduce_over_replicas("sum", overflows) == 0

    def narrow(g: jax.Array) -> jax.Array:
      known = _known(g, state.scale)
      return g if known is None or known.narrow is None else known.narrow

    # A gradient enters the branch as the model computed it, if that is in 16
    # bits, and is unscaled there. Outside of it XLA would write it to memory in
    # float32: twice the bytes, on TPU the largest temporary of a step.
    given = jax.tree.map(narrow, grads)

    def update(target: base.Target, given: PyTree) -> base.Target:
      by = _divisor(state.scale)
      unscaled = jax.tree.map(
        lambda x, g: x if x.dtype == g.dtype else _divide(x, by), given, grads
      )
      return next(target, unscaled)

    # A branch leaves donated buffers in place. To select between new and old
    # values would copy parameters and optimizer state. The branch that updates
    # is the first, which was measured to use less memory.
    target = base.cond(
      finite, update, lambda target, given: target, target, given
    )
    return target, rule.update(state, finite)

  def metrics(self, state: State) -> dict[str, jax.Array]:
    """Returns `loss_scale` (float32) and `skipped_steps` (int32), scalars."""
    if not state:
      return {}
    return {"loss_scale": state.scale, "skipped_steps": state.skipped_steps}


def _known(g: jax.Array, scale: jax.Array) -> _Unscaled | None:
  """Returns what is known of a gradient that was divided by this scale.

  None if it was not, or was changed since, for example by clipping.
  """
  known = _unscaled.get(id(g))
  return known if known and known.scale is scale else None


# One program in an eager step too, which would dispatch each operation.
@functools.partial(jax.jit, inline=True)
def _divisor(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns a factor and a divisor: together they divide by a scale."""
  # XLA turns a division by a broadcast scalar into a multiplication by its
  # reciprocal. The reciprocal of 2**127 is subnormal and reads as zero. So the
  # largest scales are divided out in two steps, which the barrier keeps apart.
  factor = jnp.where(scale > 2.0**125, np.float32(0.25), np.float32(1.0))
  return jax.lax.optimization_barrier((factor, scale * factor))


@functools.partial(jax.jit, inline=True)
def _divide(x: jax.Array, by: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Divides an array by what `_divisor` returns, in float32 or wider."""
  x = gradients.widen(x)
  factor, divisor = by
  return x * factor.astype(x.real.dtype) / divisor.astype(x.real.dtype)
