"""Tells, while a step is traced, where it goes around a loss scale.

A step scales its loss, unscales the gradients and applies them. The three calls
belong together if they see the same array (or tracer) as the scale.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any
import weakref

import jax
import jax.numpy as jnp

from flaxshard.core import trees

PyTree = Any


@dataclasses.dataclass
class ScaleCalls:
  """The calls that steps made on one `LossScale`, to notice missing ones.

  It remembers the last scale alone, by a weak reference, so that it neither
  grows nor keeps a trace alive.
  """

  # What was called on the scale of `_scale`, and not applied yet.
  _scale: Callable[[], Any] = lambda: None
  _scaled: bool = False
  _unscaled: bool = False
  # (scaled, unscaled) of scales that were never applied: those of functions
  # that are jitted apart, and whose calls are not seen when they are cached.
  _elsewhere: set[tuple[bool, bool]] = dataclasses.field(default_factory=set)
  _told: set[str] = dataclasses.field(default_factory=set)

  def __reduce__(self) -> Any:
    # A copy starts anew: pickle cannot write weak references.
    return ScaleCalls, ()

  def note_scaled(self, scale: jax.Array) -> None:
    """Notes that a loss was multiplied by `scale`."""
    self._switch_to(scale)
    self._scaled = True

  def note_unscaled(self, scale: jax.Array) -> None:
    """Notes that gradients were divided by `scale`."""
    self._switch_to(scale)
    self._unscaled = True

  def once(self, topic: str) -> bool:
    """Returns True the first time that it is asked about a topic."""
    is_first = topic not in self._told
    self._told.add(topic)
    return is_first

  def check(self, scale: jax.Array, grads: PyTree) -> str | None:
    """Returns a warning if gradients to be applied went around the scale.

    Args:
      scale: The scale of the state whose gradients are applied.
      grads: The gradients.
    """
    is_own = self._scale() is scale
    scaled, unscaled = is_own and self._scaled, is_own and self._unscaled
    self._forget(applied=is_own)
    if scaled and not unscaled:
      # Unless a function that is jitted apart unscales.
      if (False, True) not in self._elsewhere and self.once("not unscaled"):
        return _NOT_UNSCALED
    # Unless a function that is jitted apart scales.
    elif not is_own and not any(scaled for scaled, _ in self._elsewhere):
      if _lack_a_scale(grads) and self.once("not scaled"):
        return _NOT_SCALED
    return None

  def _switch_to(self, scale: jax.Array) -> None:
    if self._scale() is scale:
      return
    self._forget(applied=False)
    self._scale = weakref.ref(scale)

  def _forget(self, *, applied: bool) -> None:
    if (self._scaled or self._unscaled) and not applied:
      self._elsewhere.add((self._scaled, self._unscaled))
    self._scale, self._scaled, self._unscaled = lambda: None, False, False


def _lack_a_scale(grads: PyTree) -> bool:
  """Returns whether gradients without a record of a scale are a mistake."""
  # An eager step may take the gradients of a compiled function whose trace
  # left no record. Only float16 shows there that nothing unscaled them.
  return any(
    isinstance(g, jax.core.Tracer) or trees.dtype_of(g) == jnp.float16
    for g in jax.tree.leaves(grads)
  )


_NOT_SCALED = (
  "LossScale: apply_gradients got gradients, but nothing has scaled a loss for "
  "them with this wrapper: jax.grad alone does not. Small float16 gradients "
  "are zero then, and the scale has no effect. Use "
  "state.value_and_grad(loss_fn), or scale the loss with state.scale_loss and "
  "its gradients with state.unscale_gradients."
)
_NOT_UNSCALED = (
  "LossScale: state.scale_loss scaled the loss, but its gradients were not "
  "unscaled: they are too large by the scale. Call grads = "
  "state.unscale_gradients(grads) before apply_gradients, or use "
  "state.value_and_grad(loss_fn), which does both."
)
