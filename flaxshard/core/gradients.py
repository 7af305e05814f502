"""Gradient trees: what a leaf is, what an optimizer trains, and finite tests.

A tree of gradients is a tree like the parameters. A leaf is one of:

* a gradient: an array of a floating-point or complex dtype, or the rows of one,
  an `IndexedSlices`;
* a statistic: a leaf of Flax's overwrite-with-gradient collection. It is not a
  derivative but a new value that replaces the parameter (fp8 scaling factors);
* no gradient: None, `float0`, an integer or a boolean.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
import functools
from typing import Any, Self

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.core import indexed_slices
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import IndexedSlices

PyTree = Any

# Below this many elements the plain finite test costs nothing measurable.
_LARGE = 1 << 14


def has_gradient(path: trees.Path, leaf: Any) -> bool:
  """Returns whether a leaf is a gradient, to be scaled and applied.

  Args:
    path: The key path of the leaf in the tree of gradients.
    leaf: An array, a number, or None.
  """
  if leaf is None or is_statistic(path):
    return False
  # Python numbers have no dtype.
  return jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact)


def is_statistic(path: trees.Path) -> bool:
  """Returns whether a path is in Flax's overwrite-with-gradient collection."""
  # Flax looks for the collection at the root only.
  return bool(path) and path[0] == jax.tree_util.DictKey(
    OVERWRITE_WITH_GRADIENT
  )


def is_leaf(x: Any) -> bool:
  """Returns whether a value stands for a leaf in a tree of gradients."""
  # To JAX, None is a tree without leaves, and rows are one with two.
  return x is None or isinstance(x, IndexedSlices)


def find_rows(tree: PyTree) -> dict[trees.Path, IndexedSlices]:
  """Returns the `IndexedSlices` of a tree, by path."""
  flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {path: x for path, x in flat if isinstance(x, IndexedSlices)}


def widen(x: Any) -> Any:
  """Returns an array, or rows, in the dtype that they are summed in."""
  return x.astype(indexed_slices.accumulator_dtype(x.dtype))


def map_gradients(
  fn: Callable[[jax.Array], jax.Array], grads: PyTree
) -> PyTree:
  """Applies `fn` to the gradients of a tree; other leaves stay as they are.

  Of an `IndexedSlices` it gets the rows: row numbers are integers. It must map
  zeros to zeros.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, g: fn(jnp.asarray(g)) if has_gradient(path, g) else g, grads
  )


def conform(tx: Any, grads: PyTree, params: PyTree) -> PyTree:
  """Returns the gradients of what is trained, in the containers of parameters.

  Args:
    tx: The optimizer.
    grads: A tree of gradients with the paths of `params`. Leaves may also be
      NumPy arrays or numbers.
    params: The parameters.

  Returns:
    A tree in which a leaf is a `jax.Array` or an `IndexedSlices` if it is a
    gradient, and None if it is not. Statistics stay as they are.

  Raises:
    ValueError: The trees differ; the message has the first path.
    TypeError: A leaf is not an array, or row numbers are not integers.

  Example:
    >>> params = {"w": jnp.ones(()), "step": jnp.int32(0)}
    >>> grads = {"w": np.float32(1), "step": np.int32(2)}
    >>> conform(optax.sgd(0.1), grads, params)
    {'step': None, 'w': Array(1., dtype=float32)}
  """
  leaves, given = jax.tree.flatten(grads, is_leaf=is_leaf)
  structure: Any = jax.tree.structure(params)
  # Most trees have the containers of the parameters, and arrays alone. This is
  # quicker than to compare paths, at each eager step.
  if given != structure or not all(
    g is None or (isinstance(g, jax.Array) and g.shape == np.shape(p))
    for g, p in zip(leaves, jax.tree.leaves(params), strict=True)
  ):
    for path, g in find_rows(grads).items():
      g.check(f"grads[{trees.path_string(path)}]")
    grads = trees.conform("grads", grads, params, dtypes=False, is_leaf=is_leaf)
    # Numbers and NumPy arrays become arrays.
    grads = map_gradients(lambda g: g, grads)
  return trained(tx, grads)


def deduplicate(grads: PyTree) -> PyTree:
  """Sums the rows of equal numbers of each `IndexedSlices` in a tree."""
  return jax.tree.map(
    lambda g: g.deduplicated() if isinstance(g, IndexedSlices) else g,
    grads,
    is_leaf=is_leaf,
  )


# -- What an optimizer trains.


class _WithAttributes(optax.GradientTransformationExtraArgs):
  """An optimizer with attributes, which a named tuple alone cannot have."""

  function: str

  def __new__(cls, init: Any, update: Any, **attributes: Any) -> Self:
    """Returns an optimizer with attributes."""
    new = super().__new__(cls, init, update)
    vars(new).update(attributes)
    return new


class Frozen(_WithAttributes):
  """The optimizer that `flaxshard.freeze` returns.

  Attributes:
    frozen: The patterns of the frozen parameters.
  """

  function = "freeze"
  frozen: tuple[str, ...]


class SparseRows(_WithAttributes):
  """The optimizer that `flaxshard.sparse_rows` returns.

  Attributes:
    inner: The optimizer that updates the rows.
    frozen: The patterns of the parameters that `inner` does not train.
    patterns: The patterns of the tables.
    semantics: `"lazy"` or `"tf"`.
    argument: The name of the patterns, for errors.
    shardings: Those of the parameters whose rows a mesh splits, by path.
  """

  function = "sparse_rows"
  inner: Any
  frozen: tuple[str, ...]
  patterns: tuple[str, ...]
  semantics: str
  argument: str
  shardings: Mapping[trees.Path, jax.sharding.NamedSharding]


def trained(
  tx: Any, tree: PyTree, selected: Container[str] | None = None
) -> PyTree:
  """Returns a tree like the parameters, with None for what is not trained.

  Args:
    tx: An optimizer. It does not train what `freeze` freezes.
    tree: The parameters, or their gradients. None may stand for a leaf.
    selected: The paths of those to train; None for all.

  Example:
    >>> import flaxshard as fs
    >>> tx = fs.freeze(optax.sgd(0.1), ["a"])
    >>> trained(tx, {"a": 1.0, "b": 2.0, "c": 3})
    {'a': None, 'b': 2.0, 'c': None}
  """
  frozen = tx.frozen if isinstance(tx, (Frozen, SparseRows)) else ()

  def choose(path: trees.Path, x: Any) -> Any:
    if not (has_gradient(path, x) or is_statistic(path)):
      return None
    if selected is not None and trees.path_string(path) not in selected:
      return None
    return None if frozen and matches(frozen, tree, path) else x

  return jax.tree_util.tree_map_with_path(choose, tree, is_leaf=is_leaf)


def tables(tx: Any, tree: PyTree) -> dict[trees.Path, Any]:
  """Returns the tables whose rows an optimizer updates, by path.

  Args:
    tx: An optimizer.
    tree: The parameters, or their gradients.
  """
  if not isinstance(tx, SparseRows):
    return {}
  return {
    path: x
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    if matches(tx.patterns, tree, path) and not matches(tx.frozen, tree, path)
  }


def matching(patterns: Sequence[str], params: PyTree) -> PyTree:
  """Returns which leaves of a tree like the parameters match a pattern."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: matches(patterns, params, path), params
  )


def matches(patterns: Sequence[str], params: PyTree, path: trees.Path) -> bool:
  """Returns whether a path in a tree like the parameters matches a pattern."""
  # Of the collections of Flax's fp8 layers the optimizer sees one. The other
  # has scaling factors, whose new values come as gradients.
  if opt_state_lib.optimized_params(params) is not params:
    if is_statistic(path):
      return False
    path = path[1:]
  return patterns_lib.first_match(patterns, trees.path_string(path)) is not None


def zero_accumulators(tx: Any, params: PyTree) -> PyTree:
  """Returns zeros to add gradients or averages to; None where neither exists.

  Args:
    tx: An optimizer. What it freezes has no accumulator.
    params: The parameters. Those of 16 bits have accumulators in float32.
  """

  def zeros(path: trees.Path, p: Any) -> jax.Array | None:
    if is_statistic(path):
      return None
    dtype = indexed_slices.accumulator_dtype(trees.dtype_of(p))
    return jnp.zeros(jnp.shape(p), dtype)

  return jax.tree_util.tree_map_with_path(zeros, trained(tx, params))


# -- The finite test.


def all_finite(grads: PyTree) -> jax.Array:
  """Returns whether every gradient in a tree is finite.

  Under `jax.jit` over a sharded mesh the result covers the global arrays.
  Inside `jax.shard_map`, with its default `check_vma=True`, it is reduced over
  the axes along which the gradients vary. With `check_vma=False` JAX does not
  know along which axes they vary, and the devices may get different results.

  Args:
    grads: A tree of gradients. Leaves without a gradient do not count. Rows are
      those that `deduplicate` returns.

  Returns:
    A bool scalar.

  Example:
    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
  """
  finite = jnp.array(True)
  for path, x in jax.tree_util.tree_leaves_with_path(grads):
    if has_gradient(path, x):
      finite &= _is_finite(jnp.asarray(x))
  axes = tuple(sorted(jax.typeof(finite).manual_axis_type.varying))
  if axes:
    # pmin takes numbers, not booleans.
    finite = jax.lax.pmin(finite.astype(jnp.int32), axes) == 1
  return finite


def nonfinite_leaves(grads: PyTree) -> list[str]:
  """Returns the paths of the leaves that hold an infinity or a NaN.

  Call it outside of `jax.jit`, on the gradients or the parameters of a step
  that went wrong.

  Args:
    grads: A tree of concrete arrays.

  Returns:
    Paths such as `Dense_0/kernel`, in the order of the tree.

  Raises:
    jax.errors.TracerBoolConversionError: A leaf is traced by `jax.jit`.

  Example:
    >>> import flaxshard as fs, jax.numpy as jnp
    >>> grads = {"a": jnp.ones(2), "b": {"c": jnp.array([jnp.nan])}}
    >>> fs.nonfinite_leaves(grads)
    ['b/c']
  """
  flat = jax.tree_util.tree_leaves_with_path(
    deduplicate(grads), is_leaf=is_leaf
  )
  return [
    trees.path_string(path)
    for path, g in flat
    if has_gradient(path, g) and not bool(all_finite(g))
  ]


# One program in an eager step too, which would dispatch each operation.
@functools.partial(jax.jit, inline=True)
def _is_finite(x: jax.Array) -> jax.Array:
  """Returns whether all elements of an array are finite."""
  if x.ndim >= 2 and x.size >= _LARGE and x.dtype == np.float32:
    # XLA's CPU backend compiles the reduction to one slow pass. A matrix-vector
    # product runs at memory bandwidth.
    return jax.lax.platform_dependent(
      x,
      cpu=_is_finite_by_product,
      default=lambda x: jnp.all(jnp.isfinite(x)),
    )
  return jnp.all(jnp.isfinite(x))


def _is_finite_by_product(x: jax.Array) -> jax.Array:
  """Multiplies by zeros: 0 * x is 0 for finite x and NaN for the others."""
  zeros = jnp.zeros(x.shape[-1:], x.dtype)
  # Without the barrier XLA sees the zeros and removes the product.
  zeros = jax.lax.optimization_barrier(zeros)
  return jnp.all(jnp.dot(x, zeros, precision="highest") == 0)
