"""Gradient trees: what a leaf is, exact casts to 16 bits, and finite tests.

A tree of gradients is a tree like the parameters. A leaf is one of:

* a gradient: an array of a floating-point or complex dtype, or the rows of one,
  an `IndexedSlices`;
* a statistic: a leaf of Flax's overwrite-with-gradient collection. It is not a
  derivative but a new value that replaces the parameter (fp8 scaling factors);
* no gradient: None, `float0`, an integer or a boolean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
from jax.extend import core as jax_core
import jax.numpy as jnp
import numpy as np

from flaxshard.core import indexed_slices
from flaxshard.core import jaxprs
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices

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


def optimized_params(params: PyTree) -> PyTree:
  """Returns the parameters that Flax passes to the optimizer.

  These are all parameters, without Flax's overwrite-with-gradient collection
  (the statistics of fp8 layers) if there is one.
  """
  if isinstance(params, Mapping) and OVERWRITE_WITH_GRADIENT in params:
    return params["params"]
  return params


def accumulator_dtype(dtype: Any) -> Any:
  """Returns the dtype that values of a dtype are summed or averaged in."""
  # A sum in float16 or bfloat16 rounds away small gradients.
  return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


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


def conform(grads: PyTree, params: PyTree) -> PyTree:
  """Returns gradients in the containers of the parameters.

  Args:
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
    >>> conform({"w": np.float32(1), "step": np.int32(2)}, params)
    {'step': None, 'w': Array(1., dtype=float32)}
  """
  leaves, given = jax.tree.flatten(grads, is_leaf=is_leaf)
  wanted = jax.tree_util.tree_leaves_with_path(params)
  structure: Any = jax.tree.structure(params)
  # Most trees have the containers of the parameters, and arrays alone. This is
  # quicker than to compare paths, at each eager step.
  if given != structure or not all(
    g is None or (isinstance(g, jax.Array) and g.shape == np.shape(p))
    for g, (_, p) in zip(leaves, wanted, strict=True)
  ):
    for path, g in indexed_slices.find(grads).items():
      g.check(f"grads[{trees.path_string(path)}]")
    grads = trees.conform("grads", grads, params, dtypes=False, is_leaf=is_leaf)
    leaves = structure.flatten_up_to(grads)
  for i, (path, _) in enumerate(wanted):
    g = leaves[i]
    if has_gradient(path, g):
      leaves[i] = g if is_indexed_slices(g) else jnp.asarray(g)
    elif not is_statistic(path):
      leaves[i] = None
  return structure.unflatten(leaves)


def is_leaf(x: Any) -> bool:
  """Returns whether a value stands for a leaf in a tree of gradients."""
  # To JAX, None is a tree without leaves, and rows are one with two.
  return x is None or is_indexed_slices(x)


def deduplicate(grads: PyTree) -> PyTree:
  """Sums the rows of equal numbers of each `IndexedSlices` in a tree.

  Sums of float16 and bfloat16 are computed in float32.
  """

  def deduplicate_leaf(g: Any) -> Any:
    if not is_indexed_slices(g) or g.is_unique:
      return g
    wide = g.astype(accumulator_dtype(g.dtype))
    return wide.deduplicated().astype(g.dtype)

  return jax.tree.map(deduplicate_leaf, grads, is_leaf=is_indexed_slices)


def narrow_value_and_grad(
  fn: Callable[[PyTree], tuple[jax.Array, Any]], params: PyTree
) -> tuple[tuple[jax.Array, Any], PyTree]:
  """Differentiates a function; casts gradients to 16 bits where that is exact.

  A model in mixed precision casts its float32 parameters to 16 bits. Then the
  last operation on a gradient casts it from 16 bits to float32. Such a gradient
  fits into 16 bits without rounding.

  Args:
    fn: Returns a real scalar and auxiliary output. Its gradient is traced once,
      and the traced program is evaluated.
    params: The argument of `fn`.

  Returns:
    What `jax.value_and_grad(fn, has_aux=True)(params)` returns, but the
    gradients that it casts from float16 or bfloat16 as its last operation are
    cast back.

  Raises:
    TypeError: The scalar is complex.

  Example:
    >>> loss = lambda w: ((w.astype(jnp.bfloat16) ** 2).astype("float32"), None)
    >>> (value, _), grad = narrow_value_and_grad(loss, jnp.float32(3))
    >>> float(value), float(grad), grad.dtype
    (9.0, 6.0, dtype(bfloat16))
  """
  # Outside of the trace below, so that `fn` may store what it computes.
  value, pullback, aux = jax.vjp(fn, params, has_aux=True)
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise TypeError(f"loss_fn must return a real scalar, got {value.dtype}.")
  one = jnp.ones_like(value)
  program = jax.make_jaxpr(pullback)(one)
  grads = list(jax_core.jaxpr_as_fun(program)(one))
  sources: jaxprs.Sources = {}
  for i, variable in enumerate(program.jaxpr.outvars):
    dtype = jaxprs.dtype_before_cast(program.jaxpr, variable, sources)
    if dtype is not None:
      grads[i] = grads[i].astype(dtype)
  return (value, aux), jax.tree.unflatten(jax.tree.structure(params), grads)


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
    >>> nonfinite_leaves({"a": jnp.ones(2), "b": {"c": jnp.array([jnp.nan])}})
    ['b/c']
  """
  flat = jax.tree_util.tree_leaves_with_path(
    deduplicate(grads), is_leaf=is_indexed_slices
  )
  return [
    trees.path_string(path)
    for path, g in flat
    if has_gradient(path, g) and not bool(all_finite(g))
  ]


def _is_finite(x: jax.Array) -> jax.Array:
  """Returns whether all elements of an array are finite."""
  is_large = x.ndim >= 2 and x.size >= _LARGE and x.dtype == np.float32
  if is_large and isinstance(x, jax.core.Tracer):
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
