"""Casts the rows that `flax.linen.Embed` looks up, not its table.

`nn.Embed(dtype=jnp.bfloat16)` casts its float32 table and takes rows of the
result. XLA's CPU backend casts these rows alone. Its TPU backend casts the
whole table at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
from typing import Any

from flax import linen as nn
import jax.numpy as jnp


@contextlib.contextmanager
def cast_after_lookup(
  tables: Sequence[str], others: Sequence[str] = ()
) -> Iterator[list[Any]]:
  """Makes `nn.Embed` look up rows first and cast them then.

  The rows are the same, bit for bit.

  Args:
    tables: The paths of the parameters for which to do so, such as
      `encoder/embed/embedding`. They may begin above the model.
    others: The paths of the other parameters.

  Yields:
    A list of the modules that did so.

  Example:
    >>> import jax
    >>> embed, ids = nn.Embed(9, 2, dtype=jnp.bfloat16), jnp.array([3])
    >>> variables = embed.init(jax.random.key(0), ids)
    >>> with cast_after_lookup(["embedding"]) as changed:
    ...   rows = embed.apply(variables, ids)
    >>> rows.dtype, len(changed)
    (dtype(bfloat16), 1)
    >>> bool((rows == embed.apply(variables, ids)).all())
    True
  """
  changed: list[Any] = []

  def intercept(
    next_fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Any,
  ) -> Any:
    module = context.module
    if context.method_name != "__call__" or not _casts_table(module):
      return next_fn(*args, **kwargs)
    path = "/".join(("", *module.path, "embedding"))
    ends = lambda paths: any(f"/{x}".endswith(path) for x in paths)
    if not ends(tables) or ends(others):
      return next_fn(*args, **kwargs)
    changed.append(module)
    dtype = module.dtype
    # Without a dtype the module does not cast. A bound module refuses ordinary
    # assignments, and a copy of it would have no parameters.
    object.__setattr__(module, "dtype", None)
    try:
      return next_fn(*args, **kwargs).astype(dtype)
    finally:
      object.__setattr__(module, "dtype", dtype)

  with nn.intercept_methods(intercept):
    yield changed


def _casts_table(module: Any) -> bool:
  """Returns whether a module is an `nn.Embed` that casts its table."""
  # A subclass may use its `dtype` for other things.
  if type(module) is not nn.Embed or module.dtype is None:
    return False
  narrow, wide = jnp.dtype(module.dtype), jnp.dtype(module.param_dtype)
  is_float = all(jnp.issubdtype(d, jnp.floating) for d in (narrow, wide))
  return is_float and narrow.itemsize < wide.itemsize
