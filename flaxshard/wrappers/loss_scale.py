"""LossScale: scales the loss and skips steps that overflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
import types
from typing import Any, ClassVar
import warnings

import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import tracing
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import logical_shards
from flaxshard.wrappers import base
from flaxshard.wrappers.loss_scale_calls import ScaleCalls
from flaxshard.wrappers.loss_scale_narrow import NarrowGradients
from flaxshard.wrappers.loss_scale_rules import check_scale
from flaxshard.wrappers.loss_scale_rules import DynamicLossScale
from flaxshard.wrappers.loss_scale_rules import FixedLossScale
from flaxshard.wrappers.loss_scale_rules import LossScaleState

PyTree = Any
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
    warn_at_floor: Raise a RuntimeWarning from the compiled step when it skips
      while a dynamic scale is at its floor, `min_scale`. This puts a host
      callback into the step: JAX's persistent compilation cache does not store
      a program with a callback, and `jax.export` cannot write one. The training
      loop warns without a callback, from the metrics. A custom loop can call
      `warning` too.

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
  skips_steps: ClassVar[bool] = True
  # Flax's `DynamicScale`, as its ImageNet and WMT examples keep it.
  foreign_paths: ClassVar[Mapping[str, str]] = types.MappingProxyType(
    {"dynamic_scale/scale": "scale", "dynamic_scale/fin_steps": "good_steps"}
  )

  scale: str | float | DynamicLossScale | FixedLossScale = "dynamic"
  policy: Policy | None = None
  warn_at_floor: bool = False
  # Both change while steps are traced, and are no part of what the wrapper is.
  calls: ScaleCalls = dataclasses.field(
    default_factory=ScaleCalls, init=False, repr=False, compare=False
  )
  narrow: NarrowGradients = dataclasses.field(
    default_factory=NarrowGradients, init=False, repr=False, compare=False
  )

  def __post_init__(self) -> None:
    scale = self.scale
    allowed = (
      "'dynamic', 'auto', a positive number, a DynamicLossScale or a "
      "FixedLossScale"
    )
    if isinstance(scale, str):
      if scale not in ("dynamic", "auto"):
        raise ValueError(
          f"LossScale: scale={scale!r}; allowed: {allowed}."
          f"{checks.did_you_mean(scale, ('dynamic', 'auto'))}"
        )
    elif not isinstance(scale, (DynamicLossScale, FixedLossScale)):
      try:
        value = check_scale("LossScale: scale", scale)
      except TypeError as e:
        raise TypeError(
          f"LossScale: scale={scale!r}; allowed: {allowed}."
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
    """The rule by which the scale changes, if there is a scale."""
    if isinstance(self.scale, str):
      return DynamicLossScale()
    if isinstance(self.scale, float):
      return FixedLossScale(self.scale)
    return self.scale

  def with_policy(self, policy: Policy) -> LossScale:
    """Returns the wrapper with the model's policy, unless it has one."""
    if self.policy is not None:
      return self
    new = dataclasses.replace(self, policy=policy)
    object.__setattr__(new, "calls", self.calls)
    return new

  def check_loss(
    self, state: State, trace: Callable[[], jax_core.ClosedJaxpr]
  ) -> str | None:
    """Warns of a loss in float16 that `"auto"` does not scale."""
    if state or self.scale != "auto" or not self.calls.once("loss"):
      return None
    try:
      program = trace()
    except jax.errors.ConcretizationTypeError:
      # An eager loss may branch on the value of an argument.
      return None
    if not tracing.computes_in(program, jnp.float16):
      return None
    return (
      "LossScale('auto'): the loss computes in float16, but is not scaled: "
      "'auto' saw float16 neither in the parameters nor in a precision policy. "
      "Use LossScale('dynamic'), LossScale('auto', policy='mixed_float16'), or "
      "create_train_state, which looks at the model."
    )

  def check_gradients(self, state: State, grads: PyTree) -> str | None:
    """Warns of gradients that were not scaled, or not unscaled."""
    if not state or self.rule == FixedLossScale(1.0):
      return None
    return self.calls.check(state.scale, grads)

  def check_late_collection(self, state: State, name: str) -> str | None:
    """Warns of a collection that a skipped step would not hold back."""
    if not state or isinstance(self.rule, FixedLossScale):
      return None
    if not self.calls.once("late collection"):
      return None
    return (
      f"LossScale: replace({name}=...) after apply_gradients also takes the "
      "value of a step that overflows and is skipped, which may be infinite. "
      f"Write apply_gradients(grads=grads, {name}=...), which then keeps the "
      "old value."
    )

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
    self.calls.note_scaled(state.scale)
    dtype = _at_least_float32(loss.dtype)
    return loss.astype(dtype) * self._scale_of(state).astype(dtype)

  def unscale_gradients(self, state: State, grads: PyTree) -> PyTree:
    """Returns the gradients divided by the scale, in float32 or wider."""
    if not state:
      return grads
    self.calls.note_unscaled(state.scale)
    divide = _divider(self._scale_of(state))

    def unscale(g: jax.Array) -> jax.Array:
      unscaled = divide(g)
      if isinstance(g, jax.core.Tracer) and g.dtype.itemsize == 2:
        self.narrow.remember(unscaled, g, state.scale)
      return unscaled

    return gradients.map_gradients(unscale, grads)

  def takes_narrow_gradients(self, state: State) -> bool:
    """Returns whether the scale is dynamic: `apply` hands them to a branch."""
    return bool(state) and not isinstance(self.rule, FixedLossScale)

  def apply(
    self, state: State, target: base.Target, grads: PyTree, next: base.Next
  ) -> tuple[base.Target, State]:
    """Calls `next` if all gradients are finite; updates a dynamic scale."""
    if not state:
      return next(target, grads), state
    rule = self.rule
    if isinstance(rule, FixedLossScale):
      # A restored state may have another scale: the configured one replaces it.
      return next(target, grads), state._replace(scale=self._scale_of(state))
    # Once, for the finite check and for the update in the branch.
    grads = gradients.deduplicate(grads)
    finite = replica_context.all_replicas(gradients.all_finite(grads))
    new_state = rule.update(state, finite)
    at_floor = state.scale <= np.float32(rule.min_scale)

    # A gradient enters the branch as the model computed it, if that is in 16
    # bits, and is unscaled there. Outside of it XLA would write it to memory in
    # float32: twice the bytes, on TPU the largest temporary of a step.
    leaves = jax.tree.leaves(grads)
    treedef: Any = jax.tree.structure(grads)
    narrow = [self.narrow.recall(g, state.scale) for g in leaves]
    operands = [
      g if n is None else n for g, n in zip(leaves, narrow, strict=True)
    ]

    def apply(target: Any, operands: Any, skipped_steps: Any) -> Any:
      divide = _divider(state.scale)
      grads = treedef.unflatten(
        x if n is None else divide(x)
        for x, n in zip(operands, narrow, strict=True)
      )
      return next(target, grads), skipped_steps

    def skip(target: Any, operands: Any, skipped_steps: Any) -> Any:
      del operands
      if self.warn_at_floor:
        # XLA removes a callback whose result nobody uses, so the count of
        # skipped steps passes through it.
        skipped_steps = _warn_on_host(at_floor, state.scale, skipped_steps)
      return target, skipped_steps

    # A branch leaves donated buffers in place. To select between new and old
    # values would copy parameters and optimizer state. The branch that updates
    # is the first, which was measured to use less memory.
    target, skipped_steps = tracing.cond(
      finite, apply, skip, target, operands, new_state.skipped_steps
    )
    return target, new_state._replace(skipped_steps=skipped_steps)

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

  def warning(
    self, previous: Mapping[str, float] | None, current: Mapping[str, float]
  ) -> str | None:
    """Warns if steps were skipped while a dynamic scale was at its floor.

    Args:
      previous: `metrics` when they were last logged; None the first time.
      current: `metrics` now.

    Returns:
      A message, or None.

    Example:
      >>> row = {"loss_scale": 1.0, "skipped_steps": 20}
      >>> LossScale("dynamic").warning(row, row)
      >>> LossScale("dynamic").warning(row, {**row, "skipped_steps": 21})[:37]
      'LossScale: the scale is at its floor,'
    """
    rule = self.rule
    if isinstance(rule, FixedLossScale) or "loss_scale" not in current:
      return None
    if current["loss_scale"] > rule.min_scale:
      return None
    if previous is None:
      previous = {"loss_scale": rule.initial_scale, "skipped_steps": 0}
    skipped = current["skipped_steps"] - previous["skipped_steps"]
    # The skipped steps that lowered the scale to its floor are no failure.
    if skipped <= rule.steps_to_floor(previous["loss_scale"]):
      return None
    return _floor_message(current["loss_scale"], current["skipped_steps"])

  def stalled(self, state: State) -> base.Stall | None:
    """Returns the steps skipped in a row, if the scale is at its floor.

    Example:
      >>> wrapper = LossScale(DynamicLossScale(initial_scale=1.0))
      >>> state = wrapper.init({"w": jnp.ones(3)}, None)
      >>> wrapper.stalled(state)
      >>> wrapper.stalled(state._replace(bad_steps=jnp.int32(3))).steps
      3
    """
    rule = self.rule
    if isinstance(rule, FixedLossScale) or not state or not state.bad_steps:
      return None
    if state.scale > np.float32(rule.min_scale):
      return None
    message = _floor_message(float(state.scale), int(state.skipped_steps))
    return base.Stall(int(state.bad_steps), message)

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


def _floor_message(scale: float, skipped_steps: float) -> str:
  return (
    f"LossScale: the scale is at its floor, {scale:g}, and gradients are still "
    f"not finite ({int(skipped_steps)} steps skipped so far). A smaller scale "
    "is not allowed: look for the source with "
    "flaxshard.nonfinite_leaves(grads), or lower min_scale."
  )


def _warn_on_host(
  at_floor: jax.Array, scale: jax.Array, skipped_steps: jax.Array
) -> jax.Array:
  """Warns on the host if `at_floor`; returns `skipped_steps` unchanged."""

  def warn(is_due: Any, scale: Any, skipped_steps: Any) -> Any:
    # vmap turns the branches of a cond into a select and runs both.
    if is_due:
      message = _floor_message(float(scale), int(skipped_steps))
      warnings.warn(message, RuntimeWarning, stacklevel=2)
    return np.asarray(skipped_steps)

  def call_host(*args: jax.Array) -> jax.Array:
    # A pure callback has no effect, so that the step keeps JAX's fast dispatch.
    # A debug callback costs ten microseconds per leaf of the state at each
    # step.
    return jax.pure_callback(
      warn,
      jax.ShapeDtypeStruct((), jnp.int32),
      *args,
      vmap_method="sequential",
    )

  if not isinstance(at_floor, jax.core.Tracer):
    # An eager step is on the host already.
    return jnp.asarray(warn(at_floor, scale, skipped_steps))
  unchanged = jax.lax.cond(
    at_floor,
    logical_shards.fully_manual(call_host),
    lambda *args: args[-1],
    # One replica warns, not each.
    at_floor & replica_context.is_first_replica(),
    scale,
    skipped_steps,
  )
  # Only the warning differs between replicas. `Strategy.run` cannot know that
  # of a callback.
  return replica_context.assume_replicated(unchanged)
