"""Gradient trees: which leaves have one, and whether all are finite."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core.trees import dtype_of
from flaxshard.core.trees import path_string

# Below this many elements the plain test costs nothing that can be measured.
_LARGE = 1 << 14


def has_gradient(path: tuple[Any, ...], leaf: Any) -> bool:
  """Whether a leaf of a gradient tree is a gradient, to be scaled and applied.

  `None`, `float0`, integer and boolean leaves are not; nor are the leaves of
  Flax's overwrite-with-gradient collection, which are new values (the fp8
  scaling histories), not derivatives.
  """
  if leaf is None or overwrites(path):
    return False
  return jnp.issubdtype(dtype_of(leaf), jnp.inexact)


def overwrites(path: tuple[Any, ...]) -> bool:
  """Whether a path lies in Flax's overwrite-with-gradient collection."""
  return bool(path) and getattr(path[0], "key", None) == OVERWRITE_WITH_GRADIENT


def map_gradients(fn: Callable[[jax.Array], jax.Array], grads: Any) -> Any:
  """Applies `fn` to the leaves that are gradients; the others stay."""
  return jax.tree_util.tree_map_with_path(
    lambda path, g: fn(jnp.asarray(g)) if has_gradient(path, g) else g, grads
  )


def none_without_gradient(grads: Any) -> Any:
  """Puts None for the leaves that are neither gradients nor overwrite."""
  return jax.tree_util.tree_map_with_path(
    lambda path, g: g if overwrites(path) or has_gradient(path, g) else None,
    grads,
  )


def all_finite(grads: Any) -> jax.Array:
  """Returns whether every gradient in a tree is finite.

  Under `jax.jit` over a sharded mesh the answer is that of the whole arrays;
  inside `jax.shard_map` (with its default `check_vma=True`) it is agreed over
  the axes that the gradients vary over. With `check_vma=False` JAX does not
  tell what varies, and the answer is that of each device.

  Args:
    grads: A tree of gradients. Leaves without a gradient are not looked at.

  Returns:
    A bool scalar.

  Example:
    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])}))
    False
  """
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  flags = [
    _leaf_finite(jnp.asarray(g)) for path, g in leaves if has_gradient(path, g)
  ]
  finite = functools.reduce(jnp.logical_and, flags, jnp.array(True))
  axes = tuple(sorted(jax.typeof(finite).manual_axis_type.varying))
  if axes:
    finite = jax.lax.pmin(finite.astype(jnp.int32), axes) == 1
  return finite


def nonfinite_leaves(grads: Any) -> list[str]:
  """Returns the paths of the leaves that hold an infinity or a NaN.

  Nothing is computed until it is asked for: call it outside `jax.jit`, on the
  gradients (or parameters) of a step that went wrong.

  Args:
    grads: A tree of concrete arrays.

  Returns:
    Paths such as `Dense_0/kernel`, in the order of the tree.

  Raises:
    TypeError: A leaf is traced, as everything is inside `jax.jit`.

  Example:
    >>> nonfinite_leaves({"a": jnp.ones(2), "b": {"c": jnp.array([jnp.nan])}})
    ['b/c']
  """
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  for path, leaf in leaves:
    if isinstance(leaf, jax.core.Tracer):
      raise TypeError(
        f"nonfinite_leaves: grads[{path_string(path)}] is traced; call it on "
        "concrete arrays, outside jax.jit."
      )
  return [
    path_string(path)
    for path, leaf in leaves
    if has_gradient(path, leaf) and not bool(jnp.all(jnp.isfinite(leaf)))
  ]


def _leaf_finite(x: jax.Array) -> jax.Array:
  test = lambda x: jnp.all(jnp.isfinite(x))
  if x.ndim < 2 or x.size < _LARGE or x.dtype != np.float32:
    return test(x)
  # On CPU the test as a reduction is one slow pass: a matrix-vector product
  # runs at memory bandwidth, and 0 * x is 0 for finite x and NaN for the rest.
  return jax.lax.platform_dependent(x, cpu=_finite_by_product, default=test)


def _finite_by_product(x: jax.Array) -> jax.Array:
  zeros = jnp.zeros(x.shape[-1:], x.dtype)
  # XLA would fold a product with zeros that it can see.
  zeros = jax.lax.optimization_barrier(zeros)
  return jnp.all(jnp.dot(x, zeros, precision="highest") == 0)
