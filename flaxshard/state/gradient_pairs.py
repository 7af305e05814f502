"""Gradients as (gradient, path) pairs, TensorFlow's (gradient, variable)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.state import parameter_paths

PyTree = Any
Pair = tuple[Any, str]


def from_tree(grads: PyTree, selected: set[str] | None) -> list[Pair]:
  """Returns the gradients of a tree as pairs, in the order of the tree.

  Args:
    grads: A tree like the parameters, with None where there is no gradient.
    selected: The paths to return; None for all of them.
  """
  flat = jax.tree_util.tree_leaves_with_path(
    grads, is_leaf=lambda x: x is None or is_indexed_slices(x)
  )
  named = ((g, trees.path_string(path)) for path, g in flat)
  return [(g, p) for g, p in named if selected is None or p in selected]


def from_argument(given: Any) -> list[Pair] | None:
  """Returns the pairs if a user has given pairs, else None.

  Args:
    given: A sequence or an iterator, such as `zip(grads, paths)`, or a tree of
      gradients. A pair has a string, which no tree of gradients has.
  """
  if isinstance(given, Iterator):
    given = list(given)
  if not isinstance(given, (list, tuple)) or not all(
    isinstance(pair, (list, tuple))
    and len(pair) == 2
    and isinstance(pair[1], str)
    for pair in given
  ):
    return None
  return [(g, path) for g, path in given]


def to_tree(pairs: Iterable[Pair], params: PyTree) -> PyTree:
  """Returns pairs as a tree of gradients, with None for other parameters.

  Args:
    pairs: (gradient, path) pairs; a gradient may be None.
    params: The parameters of a state.

  Raises:
    ValueError: A path is no parameter's, or is given twice.
  """
  by_path: dict[str, Any] = {}
  for i, (g, path) in enumerate(pairs):
    where = f"apply_gradients: the path of pair {i}"
    parameter_paths.check(where, path, params)
    if path in by_path:
      raise ValueError(
        f"{where}, {path!r}, is given twice. Add the gradients of a parameter."
      )
    by_path[path] = g
  return jax.tree_util.tree_map_with_path(
    lambda path, _: by_path.get(trees.path_string(path)),
    opt_state_lib.trained_params(params),
  )
