"""Refuses what Orbax cannot save, or cannot give back, before it is written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import trees

_KINDS = (jnp.number, jnp.bool_, jax.dtypes.prng_key)


def check(argument: str, tree: Any) -> None:
  """Raises an error, with its path, at a leaf that cannot be saved.

  Orbax finds some of these out in the middle of a save, some never: a Python
  number, say, is saved and does not come back as one.

  Args:
    argument: What the tree is called in the error.
    tree: A tree of arrays.

  Raises:
    TypeError: A leaf is not an array of numbers, booleans or random keys, or
      of a dtype that JAX would change.
    ValueError: An array has no elements, or was deleted: donated, for example.

  Example:
    >>> check("state", {"a": jnp.ones(2), "b": jnp.zeros((0, 3))})
    Traceback (most recent call last):
    ValueError: state[b] has no elements, shape (0, 3): Orbax cannot save that.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    name = f"{argument}[{trees.path_string(path)}]"
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic))
    if not is_array or isinstance(leaf, jax.core.Tracer):
      raise TypeError(f"{name} must be an array, got {leaf!r}.")
    if not any(jnp.issubdtype(leaf.dtype, kind) for kind in _KINDS):
      raise TypeError(
        f"{name} must be an array of numbers, booleans or random keys, got "
        f"dtype {leaf.dtype}."
      )
    if isinstance(leaf, jax.Array):
      if leaf.is_deleted():
        raise ValueError(
          f"{name} was deleted: save a state before it is donated, or what "
          "came of it."
        )
    elif jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
      raise TypeError(
        f"{name} is {leaf.dtype}, which JAX has only with jax_enable_x64: it "
        "would not come back."
      )
    if 0 in np.shape(leaf):
      raise ValueError(
        f"{name} has no elements, shape {np.shape(leaf)}: Orbax cannot save "
        "that."
      )
