"""Casts the rows that `flax.linen.Embed` looks up, not its table.

`nn.Embed(dtype=jnp.bfloat16)` casts its float32 table and takes rows of the
result. XLA's CPU backend casts these rows alone. Its TPU backend casts the
whole table at every step.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp


def cast_after_lookup() -> contextlib.AbstractContextManager[None]:
  """Makes `nn.Embed` look up rows first and cast them then.

  Rows and derivatives are the same, bit for bit.

  Example:
    >>> embed, ids = nn.Embed(9, 2, dtype=jnp.bfloat16), jnp.array([3])
    >>> variables = embed.init(jax.random.key(0), ids)
    >>> with cast_after_lookup():
    ...   rows = embed.apply(variables, ids)
    >>> bool((rows == embed.apply(variables, ids)).all()), rows.dtype
    (True, dtype(bfloat16))
  """
  return nn.intercept_methods(_intercept)


def _intercept(
  next_fn: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  context: Any,
) -> Any:
  module = context.module
  # An interceptor of the user's is not skipped.
  is_next = next_fn is context.orig_method
  is_lookup = context.method_name == "__call__" and len(args) == 1
  if not (is_next and is_lookup and _narrows_table(module)):
    return next_fn(*args, **kwargs)
  (ids,) = args
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    # The module raises an error.
    return next_fn(*args, **kwargs)
  return _take(module.embedding, ids, module.dtype)


def _narrows_table(module: Any) -> bool:
  """Returns whether a module is an `nn.Embed` that casts its table to 16 bits.

  With one row `nn.Embed` ignores the ids. A subclass may do something else.
  """
  if (
    type(module) is not nn.Embed
    or module.promote_dtype is not nn.dtypes.promote_dtype
    or module.dtype is None
    or module.num_embeddings == 1
  ):
    return False
  narrow, wide = jnp.dtype(module.dtype), module.embedding.dtype
  is_wide = wide in (jnp.float32, jnp.float64)
  return is_wide and narrow in (jnp.float16, jnp.bfloat16)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _take(table: jax.Array, ids: jax.Array, dtype: Any) -> jax.Array:
  return jnp.take(table, ids, axis=0).astype(dtype)


@_take.defjvp
def _take_tangent(dtype: Any, primals: Any, tangents: Any) -> Any:
  # The derivative of `nn.Embed`: the gradient sums rows in `dtype`, as there.
  (table, ids), (tangent, _) = primals, tangents
  rows = jnp.take(tangent.astype(dtype), ids, axis=0, fill_value=0)
  return _take(table, ids, dtype), rows
