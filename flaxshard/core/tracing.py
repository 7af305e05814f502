"""Conditionals that also run eagerly without a compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def cond(
  pred: jax.Array,
  true_fn: Callable[..., Any],
  false_fn: Callable[..., Any],
  *operands: Any,
) -> Any:
  """Returns `jax.lax.cond(...)`, outside of a trace by a Python branch.

  Outside of a trace `jax.lax.cond` compiles its branches, and keeps what it
  compiled. A new closure is compiled at every call, so an eager train step
  would compile, and take more memory, at every step.

  Args:
    pred: A bool scalar.
    true_fn: Called with the operands if `pred` is true.
    false_fn: Called with them if it is false.
    *operands: Trees of arrays.

  Example:
    >>> import jax.numpy as jnp
    >>> int(cond(jnp.array(True), lambda x: x + 1, lambda x: x, 2))
    3
  """
  if isinstance(pred, jax.core.Tracer):
    return jax.lax.cond(pred, true_fn, false_fn, *operands)
  return (true_fn if pred else false_fn)(*operands)
