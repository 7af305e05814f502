"""Paths of leaves, differences between trees, and buffers of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks

PyTree = Any
Path = tuple[Any, ...]

_ARRAYS = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)


def path_string(path: Path) -> str:
  """Returns a key path as `Dense_0/kernel`; the root is `<root>`."""
  # The path of a tree that is a single leaf is empty.
  return jax.tree_util.keystr(path, simple=True, separator="/") or "<root>"


def path_strings(path: Path) -> tuple[str, ...]:
  """Returns a key path as a tuple of strings, one for each key."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def names(tree: PyTree) -> list[str]:
  """Returns the `path_string` of each leaf of a tree."""
  return [path_string(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]


def leaves_by_path(
  tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> dict[tuple[str, ...], Any]:
  """Returns the leaves of a tree by their `path_strings`, in tree order."""
  flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
  return {path_strings(path): leaf for path, leaf in flat}


def map_both(
  fn: Callable[[Any, Any], Any], first: PyTree, second: PyTree
) -> PyTree:
  """Maps a function over the leaves that two trees both have.

  Args:
    fn: Takes a leaf of each.
    first: A tree; where a leaf of one of both is None, that of `first` stays.
    second: A tree with the same structure, but for None.

  Example:
    >>> map_both(min, {"a": 1, "b": 2, "c": None}, {"a": 0, "b": None, "c": 3})
    {'a': 0, 'b': 2, 'c': None}
  """
  return jax.tree.map(
    lambda x, y: x if x is None or y is None else fn(x, y),
    first,
    second,
    is_leaf=lambda x: x is None,
  )


def is_prng_key(x: Any) -> bool:
  """Returns whether an array is one of typed PRNG keys."""
  return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_data(x: Any) -> Any:
  """Returns an array; of PRNG keys their integers."""
  return jax.random.key_data(x) if is_prng_key(x) else x


def with_key_data(x: Any, data: Any) -> Any:
  """Returns what `key_data(x)` has become, as PRNG keys if these are some."""
  if not is_prng_key(x):
    return data
  return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def dtype_of(leaf: Any) -> Any:
  """Returns the dtype of an array, or the dtype of a Python number in JAX."""
  # `jnp.result_type` of a float64 array of NumPy would be float32.
  return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def is_array(leaf: Any) -> bool:
  """Returns whether a value is an array of numbers, or a number.

  Args:
    leaf: Any value. Arrays of JAX, of NumPy and described ones are arrays.

  Example:
    >>> is_array(2.5), is_array(np.array(["text"]))
    (True, False)
  """
  if not isinstance(leaf, (bool, int, float, complex, *_ARRAYS)):
    return False
  # Objects, texts, bytes and times of NumPy; a PRNG key has no kind.
  return getattr(dtype_of(leaf), "kind", "") not in tuple("OUSMm")


def check_arrays(argument: str, tree: PyTree) -> None:
  """Checks that every leaf of a tree is an array or a number.

  Args:
    argument: Name of the tree, for the error message.
    tree: The tree.

  Raises:
    TypeError: A leaf is something else; the message has its path.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if not is_array(leaf):
      raise TypeError(
        f"{argument}[{path_string(path)}] must be an array, got "
        f"{checks.describe(leaf)}."
      )


def check_integers(argument: str, x: Any) -> None:
  """Raises a ValueError if JAX would wrap integers of an array around.

  JAX casts int64 to int32 without a check, unless `jax_enable_x64` is set.

  Args:
    argument: Name of the array, for the error message.
    x: An array or a number. A JAX array has been cast already.

  Example:
    >>> check_integers("x", np.array([1, 2**31]))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: x is int64 with values from 1 to 2147483648, which do not fit...
  """
  if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) or not np.size(x):
    return
  # An int that no integer of NumPy can hold is an object.
  x = np.asarray(x)
  if x.dtype.kind not in "iuO":
    return
  dtype = jnp.dtype(int) if x.dtype.kind == "O" else x.dtype.newbyteorder("=")
  dtype = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
  if x.dtype.kind != "O" and dtype.itemsize == x.dtype.itemsize:
    return
  low, high, allowed = int(x.min()), int(x.max()), np.iinfo(dtype)
  if low < allowed.min or high > allowed.max:
    raise ValueError(
      f"{argument} is {x.dtype} with values from {low} to {high}, which do not "
      f"fit {dtype}: cast it, or set jax_enable_x64."
    )


def first_difference(given: PyTree, wanted: PyTree) -> str | None:
  """Returns where and how `given` first differs from `wanted`, or None.

  Leaves are compared by path. The types of the containers do not matter.

  Args:
    given: A tree of arrays or `jax.ShapeDtypeStruct`s.
    wanted: The tree to compare it with.

  Returns:
    A clause such as `"a/b: shape (2,), where (3,) is expected"`.

  Example:
    >>> first_difference({"a": {"b": jnp.ones(2)}}, {"a": {"b": jnp.ones(3)}})
    'a/b: shape (2,), where (3,) is expected'
  """
  return difference_by_path(leaves_by_path(given), leaves_by_path(wanted))


def difference_by_path(
  given: Mapping[tuple[str, ...], Any],
  wanted: Mapping[tuple[str, ...], Any],
  *,
  dtypes: bool = True,
) -> str | None:
  """Returns `first_difference` of two trees, each as `leaves_by_path`.

  Args:
    given: Leaves by path; None matches any leaf of `wanted`.
    wanted: Leaves by path.
    dtypes: Whether to compare dtypes as well as shapes.
  """
  # In the order of `wanted`, so that "first" does not depend on `given`.
  for path, wanted_leaf in wanted.items():
    where = "/".join(path) or "<root>"
    if path not in given:
      return (
        f"{where}: missing, where {checks.describe(wanted_leaf)} is expected"
      )
    leaf = given[path]
    if leaf is None:
      continue
    # The dtype first: a PRNG key and its integers differ in shape too.
    for kind, of in (("dtype", dtype_of), ("shape", np.shape)):
      found, expected = of(leaf), of(wanted_leaf)
      if found != expected and (dtypes or kind == "shape"):
        return f"{where}: {kind} {found}, where {expected} is expected"
  for path, leaf in given.items():
    if path not in wanted and leaf is not None:
      where = "/".join(path) or "<root>"
      return f"{where}: {checks.describe(leaf)}, where nothing is expected"
  return None


def conform(
  argument: str,
  given: PyTree,
  wanted: PyTree,
  *,
  dtypes: bool = True,
  is_leaf: Callable[[Any], bool] | None = None,
) -> PyTree:
  """Returns the leaves of `given` in the containers of `wanted`.

  Args:
    argument: Name of `given`, for error messages.
    given: A tree with the same paths as `wanted`. The containers may differ:
      a FrozenDict for a dict, say.
    wanted: A tree of arrays or `jax.ShapeDtypeStruct`s.
    dtypes: Whether to compare dtypes as well as shapes.
    is_leaf: What else in `given` is a leaf. A None matches any leaf of
      `wanted`.

  Raises:
    ValueError: The trees differ; the message has the first path.
    TypeError: A leaf of `given` is not an array.
  """
  check_arrays(argument, given)
  leaves = leaves_by_path(given, is_leaf)
  wanted_leaves = leaves_by_path(wanted)
  difference = difference_by_path(leaves, wanted_leaves, dtypes=dtypes)
  if difference:
    raise ValueError(
      f"{argument} must match the state, but differs at {difference}."
    )
  # By path: a dict and a NamedTuple, say, order their leaves differently.
  return jax.tree.unflatten(
    jax.tree.structure(wanted), [leaves[path] for path in wanted_leaves]
  )


def unshare_buffers(tree: PyTree) -> PyTree:
  """Returns a tree of strongly typed arrays, no two of which share memory.

  Arrays that already satisfy this are returned without a copy.

  Args:
    tree: A tree of arrays and numbers. A `jax.ShapeDtypeStruct` stays.

  Raises:
    ValueError: JAX would wrap integers around; see `check_integers`.
  """
  seen: set[Any] = set()

  def unshare(path: Path, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
      return x
    if not isinstance(x, jax.Array):
      check_integers(path_string(path), x)
    x = drop_weak_type(x)
    # XLA refuses to donate the same buffer twice.
    if not seen.isdisjoint(_buffers_of(x)):
      x = jnp.copy(x)
    seen.update(_buffers_of(x))
    return x

  return jax.tree_util.tree_map_with_path(unshare, tree)


def drop_weak_type(x: Any) -> jax.Array:
  """Returns an array without a weak type.

  A weakly typed state would compile the train step twice: the update returns a
  strongly typed one.
  """
  x = jnp.asarray(x)
  if jax.typeof(x).weak_type:
    x = jax.lax.convert_element_type(x, x.dtype)
  return x


def _buffers_of(x: jax.Array) -> set[Any]:
  """Returns what identifies the memory of an array, on each of its devices."""
  # Under `jit` those of a key are traced, even if the key is a constant.
  data = key_data(x)
  if isinstance(data, jax.core.Tracer):
    return {id(x)}
  # By address: `jax.device_put` may return a second Array for the same memory.
  # The device too: addresses on different devices may be equal.
  return {
    (s.device, s.data.unsafe_buffer_pointer()) for s in data.addressable_shards
  }
