"""Paths in pytrees, and where two of them first differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Path = tuple[Any, ...]


def path_string(path: Path) -> str:
  """Returns a key path as `Dense_0/kernel`; the root is `<root>`."""
  return jax.tree_util.keystr(path, simple=True, separator="/") or "<root>"


def path_strings(path: Path) -> tuple[str, ...]:
  """Returns a key path as a tuple of strings."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def dtype_of(leaf: Any) -> Any:
  """Returns the dtype that a leaf has or, a Python number, gets in JAX."""
  return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _shape_of(leaf: Any) -> tuple[int, ...]:
  return tuple(leaf.shape) if hasattr(leaf, "shape") else jnp.shape(leaf)


def _is_key(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def check_arrays(argument: str, tree: PyTree) -> None:
  """Raises a TypeError, with its path, at a leaf that is not an array."""
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    try:
      # The names of dtypes, and dtypes, have a result type too.
      if isinstance(leaf, (str, type, np.dtype)):
        raise TypeError("not an array")
      dtype_of(leaf)
    except (TypeError, ValueError) as e:
      raise TypeError(
        f"{argument}[{path_string(path)}] must be an array, got {leaf!r}."
      ) from e


def first_difference(
  given: PyTree,
  wanted: PyTree,
  *,
  dtypes: bool = True,
  none_is_leaf: bool = False,
) -> str | None:
  """Returns where and how `given` first differs from `wanted`, or None.

  Leaves are told by their paths, whatever the containers on the way.

  Args:
    given: A tree of arrays or `jax.ShapeDtypeStruct`s.
    wanted: The tree to compare it with.
    dtypes: Compare dtypes as well as shapes.
    none_is_leaf: Let None in `given` stand for a leaf of `wanted`.

  Returns:
    A sentence such as `"a/b: shape (2,), where (3,) is expected"`.

  Example:
    >>> first_difference({"a": {"b": jnp.ones(2)}}, {"a": {"b": jnp.ones(3)}})
    'a/b: shape (2,), where (3,) is expected'
  """
  return difference_by_path(
    by_path(given, none_is_leaf), by_path(wanted), dtypes=dtypes
  )


def difference_by_path(
  has: Mapping[tuple[str, ...], Any],
  wants: Mapping[tuple[str, ...], Any],
  *,
  dtypes: bool = True,
) -> str | None:
  """Returns `first_difference` of two trees that are given as `by_path`."""
  for path, want in wants.items():
    where = "/".join(path) or "<root>"
    if path not in has:
      return f"{where}: missing, where {_describe(want)} is expected"
    leaf = has[path]
    if leaf is None:
      continue
    shape, dtype = _shape_of(leaf), dtype_of(leaf)
    told_by_dtype = dtypes and _is_key(dtype) != _is_key(dtype_of(want))
    if not told_by_dtype and shape != _shape_of(want):
      return f"{where}: shape {shape}, where {_shape_of(want)} is expected"
    if dtypes and dtype != dtype_of(want):
      return f"{where}: dtype {dtype}, where {dtype_of(want)} is expected"
  for path, leaf in has.items():
    if path not in wants and leaf is not None:
      where = "/".join(path) or "<root>"
      return f"{where}: {_describe(leaf)}, where nothing is expected"
  return None


def like(
  argument: str,
  given: PyTree,
  wanted: PyTree,
  *,
  dtypes: bool = True,
  none_is_leaf: bool = False,
) -> PyTree:
  """Returns `given` in the containers of `wanted`, once its leaves match.

  A FrozenDict for a dict, say, is no difference worth an error.

  Raises:
    ValueError: `first_difference` finds one; the message names its path.
    TypeError: A leaf of `given` is not an array.
  """
  check_arrays(argument, given)
  difference = first_difference(
    given, wanted, dtypes=dtypes, none_is_leaf=none_is_leaf
  )
  if difference:
    raise ValueError(
      f"{argument} must match the state, but differs at {difference}."
    )
  leaves = by_path(given, none_is_leaf)
  return jax.tree.unflatten(
    jax.tree.structure(wanted),
    [leaves[path] for path in by_path(wanted)],
  )


def by_path(
  tree: PyTree, none_is_leaf: bool = False
) -> dict[tuple[str, ...], Any]:
  """Returns the leaves of a tree by `path_strings`."""
  is_leaf = (lambda x: x is None) if none_is_leaf else None
  flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {path_strings(path): leaf for path, leaf in flat}


def _describe(leaf: Any) -> str:
  return f"{dtype_of(leaf)}{list(_shape_of(leaf))}"


def own_buffers(tree: PyTree) -> PyTree:
  """Makes every leaf a strongly typed array that no other leaf shares.

  A weak type would recompile the second step, and a shared buffer cannot be
  donated twice.
  """
  seen: set[Any] = set()

  def own(x: Any) -> jax.Array:
    x = strong(x)
    if not seen.isdisjoint(_buffers(x)):
      x = jnp.copy(x)
    seen.update(_buffers(x))
    return x

  return jax.tree.map(own, tree)


def strong(x: Any) -> jax.Array:
  """Returns an array without a weak type, which would recompile a step."""
  x = jnp.asarray(x)
  if getattr(x, "weak_type", False):
    x = jax.lax.convert_element_type(x, x.dtype)
  return x


def _buffers(x: jax.Array) -> set[Any]:
  """What tells the memory of an array: two Arrays may lie on the same."""
  traced = {id(x)}
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    # Under `jit` that is traced, though the key may have a value.
    x = jax.random.key_data(x)
  if isinstance(x, jax.core.Tracer):
    return traced
  return {
    (s.device, s.data.unsafe_buffer_pointer()) for s in x.addressable_shards
  }
