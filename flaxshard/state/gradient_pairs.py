"""Gradients as (gradient, path) pairs, TensorFlow's (gradient, variable)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.state import parameter_paths

PyTree = Any
Pair = tuple[Any, str]

MISSING: Any = object()
GLOBAL_STEP_HINT = " state.step, which it increments, stands for global_step."


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


def gradients_argument(
  positional: Sequence[Any], grads: Any, params: PyTree
) -> PyTree:
  """Returns the gradients that a call of `apply_gradients` was given.

  Args:
    positional: The positional arguments.
    grads: The argument `grads`, or `MISSING`.
    params: The parameters of the state.

  Returns:
    A tree of gradients, not checked against `params`.

  Raises:
    TypeError: Gradients are given by position, twice, or not at all.
    ValueError: A pair has an unknown path, or they are the result of
      `value_and_grad`.
  """
  by_position = grads is MISSING and len(positional) == 1
  given = positional[0] if by_position else grads
  if isinstance(given, Iterator):
    given = list(given)
  if (by_position or not positional) and is_pairs(given):
    return to_tree(given, params)
  if positional or grads is MISSING:
    hint = GLOBAL_STEP_HINT if len(positional) > 1 else ""
    if by_position and _are_pairs(given):
      other = next(x for _, x in given if not isinstance(x, str))
      hint = (
        f" A pair has {checks.describe(other)} in place of its path, such as "
        f"{next(iter(parameter_paths.leaves(params)))!r}."
      )
    raise TypeError(
      "apply_gradients takes gradients by name: write "
      "state.apply_gradients(grads=grads). Only (gradient, path) pairs, as "
      f"compute_gradients returns them, may be given by position.{hint}"
    )
  if isinstance(given, (tuple, list)) and isinstance(params, Mapping):
    raise ValueError(
      f"grads must be a tree like params, got a {type(given).__name__} of "
      f"{len(given)}; value_and_grad returns (loss, grads): pass its second "
      "element. A list of pairs has a path in each: (gradient, 'Dense_0/bias')."
    )
  return given


def is_pairs(given: Any) -> bool:
  """Returns whether a value is a sequence of (gradient, path) pairs.

  A path is a string, and no tree of gradients has strings.
  """
  return _are_pairs(given) and all(isinstance(path, str) for _, path in given)


def _are_pairs(given: Any) -> bool:
  return isinstance(given, (list, tuple)) and all(
    isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in given
  )


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
