"""`sparse_rows`: an optimizer that updates the rows that a gradient has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from flaxshard.core import checks
from flaxshard.core import parameter_groups
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.core.parameter_groups import SparseRows
from flaxshard.sparse import row_update
from flaxshard.sparse import table_parts

PyTree = Any

SEMANTICS = ("lazy",)


def sparse_rows(
  tx: Any,
  patterns: Sequence[str],
  semantics: str = "lazy",
  *,
  argument: str = "sparse_rows: patterns",
) -> SparseRows:
  """Returns an optimizer that updates the rows of tables that a step used.

  A `TrainState` with this optimizer computes an `IndexedSlices` as the gradient
  of a table. The update takes the rows of the parameter and of its slots,
  passes them to `tx` in place of the whole arrays, and puts the results back in
  place. Other parameters are updated by `tx` as usual. Step counts and
  schedules count steps, not uses of a row.

  Call it last, around the whole optimizer.

  Args:
    tx: The optax optimizer.
    patterns: Regular expressions. A parameter is a table if one of them is
      found in its path, such as `embed/embedding`.
    semantics: What happens to the rows that a step did not use. With `"lazy"`
      they and their slots stay as they are.
    argument: Name of `patterns` for errors.

  Returns:
    An optax optimizer. Its state is that of `tx`. Its updates have an
    `IndexedSlices` where the gradients have one; `optax.apply_updates` adds
    the rows.

  Raises:
    TypeError: `patterns` is not a sequence of strings.
    ValueError: There is no pattern, one is not a regular expression, or
      `semantics` does not exist. From `init`: a pattern matches no parameter,
      or a parameter that is not a table: a floating-point array with two
      dimensions.

  Example:
    >>> import flaxshard as fs
    >>> params = {"table": jnp.ones((4, 1)), "bias": jnp.ones(1)}
    >>> tx = fs.sparse_rows(optax.sgd(0.5), ["table"])
    >>> slices = fs.IndexedSlices([2, 2], jnp.ones((2, 1)), (4, 1))
    >>> grads = {"table": slices, "bias": jnp.ones(1)}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> optax.apply_updates(params, updates)["table"].ravel().tolist()
    [1.0, 1.0, 0.0, 1.0]

  References:
    `tf.train.Optimizer`, whose sparse kernels update rows.
  """
  if isinstance(tx, SparseRows):
    raise ValueError(
      "sparse_rows: tx updates tables by rows already; give all patterns in "
      "one call."
    )
  patterns = patterns_lib.check(argument, patterns)
  if not patterns:
    raise ValueError(f"{argument} must have at least one pattern.")
  semantics = checks.one_of("semantics", semantics, SEMANTICS)
  inner = optax.with_extra_args_support(tx)

  def init(params: PyTree) -> PyTree:
    _check_tables(argument, patterns, params)
    return inner.init(params)

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
  ) -> tuple[PyTree, PyTree]:
    if not any(map(is_indexed_slices, row_update.leaves(updates))):
      return inner.update(updates, state, params, **extra)
    if params is None:
      raise ValueError("sparse_rows: update needs params, got None.")
    updates = table_parts.split(updates, params, new.parts)
    return row_update.update(inner, updates, state, params, extra)

  new = SparseRows(init, update)
  new.patterns = patterns
  new.semantics = semantics
  new.inner = tx
  return new


def with_parts(tx: Any, params: PyTree) -> Any:
  """Returns an optimizer that knows how the rows of its tables are split.

  Args:
    tx: An optimizer; others than those of `sparse_rows` are returned.
    params: The parameters of a train state with their shardings.
  """
  if not isinstance(tx, SparseRows):
    return tx
  parts = table_parts.from_shardings(params)
  if parts == tx.parts:
    return tx
  # A new object: JAX compares optimizers by their functions.
  new = sparse_rows(tx.inner, tx.patterns, tx.semantics)
  new.parts = parts
  return new


def wrap(tx: Any, sparse: Any, semantics: Any) -> Any:
  """Returns `sparse_rows` around an optimizer if there are patterns.

  Args:
    tx: The optax optimizer.
    sparse: Patterns; none leaves `tx` as it is.
    semantics: See `sparse_rows`.
  """
  sparse = patterns_lib.check("sparse", sparse)
  semantics = checks.one_of("sparse_semantics", semantics, SEMANTICS)
  if sparse:
    return sparse_rows(tx, sparse, semantics, argument="sparse")
  if semantics != "lazy":
    raise ValueError(
      f"sparse_semantics={semantics!r} needs sparse, the patterns of the "
      "tables."
    )
  return tx


def _check_tables(
  argument: str, patterns: tuple[str, ...], params: PyTree
) -> None:
  """Raises unless each pattern matches tables alone."""
  parameter_groups.check_used(argument, patterns, params)
  for path, p in jax.tree_util.tree_leaves_with_path(params):
    name = trees.path_string(path)
    i = patterns_lib.first_match(patterns, name)
    if i is None:
      continue
    dtype, shape = trees.dtype_of(p), jnp.shape(p)
    if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.floating):
      raise patterns_lib.PatternError(
        f"{argument}[{i}]={patterns[i]!r} matches {name}, {dtype}"
        f"{list(shape)}, which is not a table: a floating-point array with "
        "two dimensions."
      )
