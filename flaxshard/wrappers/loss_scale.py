"""LossScale: scales the loss and skips steps that overflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
import types
from typing import Any, ClassVar
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import tracing
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base
from flaxshard.wrappers.loss_scale_rules import check_scale
from flaxshard.wrappers.loss_scale_rules import DynamicLossScale
from flaxshard.wrappers.loss_scale_rules import FixedLossScale
from flaxshard.wrappers.loss_scale_rules import LossScaleState

PyTree = Any
# `()` where `"auto"` finds nothing to scale: nothing is compiled then.
State = LossScaleState | tuple[()]

# For an unscaled gradient, by its id: itself, the gradient that it was computed
# from, and the scale. Arrays and tracers have no hash. Weak references keep no
# trace alive.
_unscaled: dict[int, tuple[weakref.ref[Any], ...]] = {}
# The scale of the last scaled loss, if no gradients were unscaled since.
_scaled: list[weakref.ref[Any]] = []
_NO_REFS = (lambda: None,) * 3
_DYNAMIC = DynamicLossScale()


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
    >>> import flaxshard as fs, optax
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
  # Flax's `DynamicScale`, as its ImageNet and WMT examples keep it.
  foreign_paths: ClassVar[Mapping[str, str]] = types.MappingProxyType(
    {"dynamic_scale/scale": "scale", "dynamic_scale/fin_steps": "good_steps"}
  )

  scale: str | float | DynamicLossScale | FixedLossScale = "dynamic"
  policy: Policy | None = None

  def __post_init__(self) -> None:
    scale, argument = self.scale, "LossScale: scale"
    if isinstance(scale, str):
      checks.one_of(argument, scale, ("dynamic", "auto"))
    elif not isinstance(scale, (DynamicLossScale, FixedLossScale)):
      object.__setattr__(self, "scale", check_scale(argument, scale))
    if isinstance(self.policy, str):
      object.__setattr__(self, "policy", Policy(self.policy))

  @property
  def skips_steps(self) -> bool:
    """Whether a step with a non-finite gradient is skipped."""
    return not isinstance(self.rule, FixedLossScale)

  @property
  def rule(self) -> DynamicLossScale | FixedLossScale:
    """The rule by which the scale changes, if there is a scale."""
    if isinstance(self.scale, str):
      return _DYNAMIC
    if isinstance(self.scale, float):
      return FixedLossScale(self.scale)
    return self.scale

  def init(self, params: PyTree, tx: Any) -> State:
    """Returns the first state; `()` if `"auto"` finds nothing to scale."""
    del tx
    if self.scale == "auto" and not self._uses_float16(params):
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
    _scaled[:] = [weakref.ref(state.scale)]
    dtype = _at_least_float32(loss.dtype)
    return loss.astype(dtype) * self._scale_of(state).astype(dtype)

  def unscale_gradients(self, state: State, grads: PyTree) -> PyTree:
    """Returns the gradients divided by the scale, in float32 or wider.

    Raises:
      ValueError: They are the result of such a division already.
    """
    if not state:
      return grads
    _scaled.clear()
    divide = _divider(self._scale_of(state))

    def unscale(g: jax.Array) -> jax.Array:
      if _find(g, state.scale) is not None:
        raise ValueError(
          "unscale_gradients: the gradients are unscaled already, as "
          "value_and_grad returns them. Pass them to apply_gradients."
        )
      unscaled = divide(g)
      key = id(unscaled)
      _unscaled[key] = (
        weakref.ref(unscaled, lambda _: _unscaled.pop(key, None)),
        weakref.ref(g),
        weakref.ref(state.scale),
      )
      return unscaled

    return gradients.map_gradients(unscale, grads)

  def apply(
    self, state: State, target: base.Target, grads: PyTree, next: base.Next
  ) -> tuple[base.Target, State]:
    """Calls `next` if all gradients are finite; updates a dynamic scale."""
    if not state:
      return next(target, grads), state
    if _scaled and _scaled[0]() is state.scale:
      _scaled.clear()
      checks.warn(
        "LossScale: state.scale_loss scaled the loss, but its gradients were "
        "not unscaled: they are too large by the scale. Call grads = "
        "state.unscale_gradients(grads) before apply_gradients, or use "
        "state.value_and_grad(loss_fn), which does both."
      )
    rule = self.rule
    if isinstance(rule, FixedLossScale):
      # A restored state may have another scale: the configured one replaces it.
      return next(target, grads), state._replace(scale=self._scale_of(state))
    # Once, for the finite check and for the update in the branch.
    grads = gradients.deduplicate(grads)
    finite = replica_context.all_replicas(gradients.all_finite(grads))
    new_state = rule.update(state, finite)

    # A gradient enters the branch as the model computed it, if that is in 16
    # bits, and is unscaled there. Outside of it XLA would write it to memory in
    # float32: twice the bytes, on TPU the largest temporary of a step.
    leaves = jax.tree.leaves(grads)
    treedef: Any = jax.tree.structure(grads)
    narrow = [_source_in_16_bits(g, state.scale) for g in leaves]
    operands = [
      g if n is None else n for g, n in zip(leaves, narrow, strict=True)
    ]

    def apply(target: Any, operands: Any) -> Any:
      divide = _divider(state.scale)
      grads = treedef.unflatten(
        x if n is None else divide(x)
        for x, n in zip(operands, narrow, strict=True)
      )
      return next(target, grads)

    # A branch leaves donated buffers in place. To select between new and old
    # values would copy parameters and optimizer state. The branch that updates
    # is the first, which was measured to use less memory.
    target = tracing.cond(
      finite, apply, lambda target, operands: target, target, operands
    )
    return target, new_state

  def adjust_restored(self, state: State) -> tuple[State, str | None]:
    """Moves a restored scale into the configured bounds.

    Args:
      state: The restored state.

    Returns:
      The state with a scale between `min_scale` and `max_scale`, or with the
      fixed scale, and a sentence if that is another one than was saved.
    """
    if not state:
      return state, None
    saved, rule = float(state.scale), self.rule
    if isinstance(rule, FixedLossScale):
      new, allowed = rule.loss_scale, "is not the fixed scale"
    else:
      # NaN is in no bounds.
      new = saved if math.isfinite(saved) else rule.initial_scale
      new = min(max(new, rule.min_scale), rule.max_scale)
      allowed = (
        f"is outside of min_scale={rule.min_scale:g} and "
        f"max_scale={rule.max_scale:g}"
      )
    scale = np.float32(new)
    if scale == saved:
      return state, None
    placed = jax.device_put(scale, state.scale.sharding)
    return state._replace(scale=placed), (
      f"LossScale: the saved scale {saved:g} {allowed}: training goes on with "
      f"{scale:g}."
    )

  def metrics(self, state: State) -> dict[str, jax.Array]:
    """Returns `loss_scale` (float32) and `skipped_steps` (int32), scalars."""
    if not state:
      return {}
    return {
      "loss_scale": self._scale_of(state),
      "skipped_steps": state.skipped_steps,
    }

  def _scale_of(self, state: LossScaleState) -> jax.Array:
    rule = self.rule
    if isinstance(rule, FixedLossScale):
      return jnp.array(rule.loss_scale, jnp.float32)
    return state.scale

  def _uses_float16(self, params: PyTree) -> bool:
    if self.policy is not None and self.policy.compute_dtype == jnp.float16:
      return True
    leaves = jax.tree.leaves(params)
    return any(trees.dtype_of(x) == jnp.float16 for x in leaves)


def _find(unscaled: jax.Array, scale: jax.Array) -> tuple[Any] | None:
  """Returns the scaled gradient that `unscaled` was computed from, in a tuple.

  None in it if nothing holds that gradient any more. None if `unscaled` is the
  result of anything else, such as clipping.
  """
  known, scaled, used = (ref() for ref in _unscaled.get(id(unscaled), _NO_REFS))
  return (scaled,) if known is unscaled and used is scale else None


def _source_in_16_bits(
  unscaled: jax.Array, scale: jax.Array
) -> jax.Array | None:
  """Returns the scaled gradient of a trace, if it has 16 bits."""
  (found,) = _find(unscaled, scale) or (None,)
  is_narrow = isinstance(found, jax.core.Tracer) and found.dtype.itemsize == 2
  return found if is_narrow else None


def _divider(scale: jax.Array) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that divides by a scale, in float32 or wider."""
  # XLA turns a division by a broadcast scalar into a multiplication by its
  # reciprocal. The reciprocal of 2**127 is subnormal and reads as zero. So the
  # largest scales are divided out in two steps, which the barrier keeps apart.
  factor = jnp.where(scale > 2.0**125, np.float32(0.25), np.float32(1.0))
  factor, divisor = jax.lax.optimization_barrier((factor, scale * factor))

  def divide(x: jax.Array) -> jax.Array:
    x = x.astype(_at_least_float32(x.dtype))
    return x * factor.astype(x.real.dtype) / divisor.astype(x.real.dtype)

  return divide


def _at_least_float32(dtype: Any) -> Any:
  """Returns float32 for narrower dtypes, others as they are."""
  # Not by jnp.promote_types: JAX does not promote float8 to other dtypes.
  return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype
