"""Facts about traces, and conditionals that need none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

PyTree = Any

# JAX name scope of AGN's conditional: compiled programs name it.
COMMIT_SCOPE = "agn_commit"
# That of the conditional of Accumulate.
UPDATE_SCOPE = "accumulated_update"
# That of the collectives of row-sparse gradients.
ROWS_SCOPE = "gradient_rows"


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
    >>> int(cond(jax.numpy.array(True), lambda x: x + 1, lambda x: x, 2))
    3
  """
  if isinstance(pred, jax.core.Tracer):
    return jax.lax.cond(pred, true_fn, false_fn, *operands)
  return (true_fn if pred else false_fn)(*operands)


def is_compiling() -> bool:
  """Returns whether operations are traced into a program, as by `jax.jit`.

  They are not under `jax.vmap` or `jax.grad` alone, which run operations on
  other than their own tracers at once.

  Example:
    >>> is_compiling(), bool(jax.jit(is_compiling)())
    (False, True)
    >>> jax.vmap(lambda x: x * is_compiling())(jnp.ones(1))
    Array([0.], dtype=float32)
  """
  return isinstance(jnp.zeros(()), jax.core.Tracer)
