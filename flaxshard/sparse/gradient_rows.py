"""Gradients of which those of embedding tables are `IndexedSlices`."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import narrow_gradients
from flaxshard.core import pullback
from flaxshard.core import source_lines
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices
from flaxshard.sparse import backward
from flaxshard.sparse.row_rules import DENSE

PyTree = Any


def value_and_grad(
  fn: Callable[[PyTree], tuple[jax.Array, Any]],
  params: PyTree,
  mask: PyTree,
  *,
  narrow: bool = False,
) -> tuple[tuple[jax.Array, Any], PyTree]:
  """Differentiates a function; the gradients of tables are `IndexedSlices`.

  The function is called, and its gradient is traced. In that program a
  table's gradient starts as zeros, to which the rows of each lookup are added.
  This function evaluates the program without the zeros, and returns the rows.
  All other gradients are computed as without it.

  A gradient to which something else contributes, such as a product with the
  whole table, is an array, and a UserWarning says what contributes.

  Args:
    fn: Returns a real scalar and auxiliary output.
    params: The argument of `fn`. Integer leaves have gradients of `float0`.
    mask: A tree of booleans like `params`: whether a gradient shall be an
      `IndexedSlices`.
    narrow: Whether to cast other gradients to 16 bits where that is exact, as
      `flaxshard.core.narrow_gradients` does.

  Returns:
    What `jax.value_and_grad(fn, has_aux=True, allow_int=True)(params)` returns,
    but for gradients that are `IndexedSlices`. Their row numbers are int32, may
    occur several times, and may be padding.

  Raises:
    TypeError: The scalar is complex.

  Example:
    >>> import jax.numpy as jnp
    >>> params = {"table": jnp.ones((1000, 2)), "bias": jnp.ones(2)}
    >>> def fn(params):
    ...   rows = params["table"][jnp.array([7, 3])]
    ...   return (rows * params["bias"]).sum(), None
    >>> mask = {"table": True, "bias": False}
    >>> (loss, _), grads = value_and_grad(fn, params, mask)
    >>> grads["table"].indices.tolist(), grads["bias"].tolist()
    ([7, 3], [2.0, 2.0])
  """
  paths = [trees.path_string(path) for path in trees.paths(params)]
  with nn.intercept_methods(_cast_after_lookup):
    traced = pullback.trace(fn, params)
  wanted, dense = _find_rows(traced, mask)
  for leaf, reason in dense:
    checks.warn(_describe_dense(paths[leaf], reason))
  program = traced.program.jaxpr
  outputs = backward.evaluate(
    program, traced.program.consts, [traced.cotangent], wanted
  )
  dtypes: list[Any] = [None] * len(outputs)
  if narrow:
    dtypes = narrow_gradients.dtypes_before_casts(traced.program)
  for i, x in enumerate(outputs):
    if i in wanted:
      indices, rows = x.joined()
      outputs[i] = IndexedSlices(indices, rows, x.shape)
    elif dtypes[i] is not None:
      outputs[i] = x.astype(dtypes[i])
  return (traced.value, traced.aux), traced.gradients(outputs)


def _find_rows(
  traced: pullback.Pullback, mask: PyTree
) -> tuple[list[int], list[tuple[int, Any]]]:
  """Finds the gradients of tables that are rows.

  Args:
    traced: The traced gradients.
    mask: Which parameters are tables.

  Returns:
    Positions of outputs of the program that are rows; and for other tables the
    position of the parameter, and the equation that needs all rows.
  """
  program = traced.program.jaxpr
  is_table = jax.tree.leaves(mask)
  facts = backward.analyze(program, [DENSE] * len(program.invars))
  wanted, dense = [], []
  for i, found in enumerate(facts.outputs()):
    leaf = traced.positions[i]
    if is_table[leaf] and found != DENSE:
      wanted.append(i)
    elif is_table[leaf]:
      dense.append((leaf, facts.reason(program.outvars[i])))
  return wanted, dense


def _describe_dense(path: str, eqn: Any) -> str:
  """Returns the warning for a sparse parameter whose gradient is an array."""
  if eqn is None:
    cause = "something other than lookups"
  else:
    line = source_lines.equation_line(eqn)
    cause = f"{eqn.primitive.name}{f' ({line})' if line else ''}"
  return (
    f"value_and_grad: the gradient of the sparse parameter {path!r} is a whole "
    f"array, not rows: {cause} contributes to all rows. The update is dense, "
    "too. Look rows up outside of loops, conditionals and jax.checkpoint; or "
    "remove the parameter from the sparse patterns if that is intended."
  )


def _cast_after_lookup(
  next_fn: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  context: Any,
) -> Any:
  """Makes `nn.Embed` look up rows first and cast them then.

  `nn.Embed(dtype=jnp.bfloat16)` casts its float32 table and takes rows of the
  result. XLA's CPU backend casts these rows alone. Its TPU backend casts the
  whole table at every step. Rows and derivatives are the same, bit for bit.
  """
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
