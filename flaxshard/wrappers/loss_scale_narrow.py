"""Remembers the 16-bit gradients that unscaled ones were computed from."""

from __future__ import annotations

from typing import Any
import weakref

import jax


class NarrowGradients:
  """Pairs of unscaled float32 gradients and the scaled 16-bit ones before.

  It holds all of them by weak references, so that it keeps no trace alive. In a
  trace the unscaled gradients keep those that they were computed from alive.
  """

  def __init__(self) -> None:
    # By the id of the unscaled gradient: arrays and tracers have no hash.
    self._pairs: dict[int, tuple[weakref.ref[Any], ...]] = {}

  def __reduce__(self) -> Any:
    # A copy starts anew: pickle cannot write weak references.
    return NarrowGradients, ()

  def remember(
    self, unscaled: jax.Array, scaled: jax.Array, scale: jax.Array
  ) -> None:
    """Notes that `unscaled` was computed as `scaled / scale`."""
    key = id(unscaled)
    self._pairs[key] = (
      weakref.ref(unscaled, lambda _: self._pairs.pop(key, None)),
      weakref.ref(scaled),
      weakref.ref(scale),
    )

  def recall(self, unscaled: jax.Array, scale: jax.Array) -> jax.Array | None:
    """Returns the scaled gradient that `unscaled` was computed from.

    None if it is not known, or if `unscaled` is the result of anything else,
    such as clipping.
    """
    refs = self._pairs.get(id(unscaled))
    if refs is None:
      return None
    known, scaled, used = (ref() for ref in refs)
    return scaled if known is unscaled and used is scale else None
