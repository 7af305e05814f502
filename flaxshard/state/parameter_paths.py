"""Parameters of a TrainState by path, by pattern, or by the array itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from flaxshard.core import checks
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees

PyTree = Any


def leaves(params: PyTree) -> dict[str, Any]:
  """Returns the parameters that have gradients, by path.

  Args:
    params: The parameters of a state. Of a pair for `optax.lookahead`, the fast
      ones are returned.

  Raises:
    ValueError: Two parameters have the same path.

  Example:
    >>> leaves({"Dense_0": {"kernel": 1.0}})
    {'Dense_0/kernel': 1.0}
  """
  trained = opt_state_lib.trained_params(params)
  by_path: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
    name = trees.path_string(path)
    # {"a": {"b": x}, "a/b": y}
    if name in by_path:
      raise ValueError(
        f"params: two parameters have the path {name!r}, so none can be named "
        "by its path. Names in params must have no '/'."
      )
    by_path[name] = leaf
  return by_path


def check(argument: str, path: Any, params: PyTree) -> str:
  """Returns `path` if it is the path of a parameter.

  Args:
    argument: Name of the argument, for errors.
    path: A string such as `Dense_0/kernel`.
    params: The parameters of a state.

  Raises:
    TypeError: It is not a string.
    ValueError: No parameter has this path.
  """
  if not isinstance(path, str):
    raise checks.ArgumentTypeError(
      f"{argument} must be the path of a parameter, such as "
      f"'Dense_0/kernel', got {checks.describe(path)}."
    )
  known = list(leaves(params))
  if path not in known:
    raise ValueError(
      patterns_lib.describe_no_match(
        f"{argument}={path!r}", path, "params", known
      )
    )
  return path


def find(argument: str, parameter: Any, params: PyTree) -> str:
  """Returns the path of a parameter.

  Args:
    argument: Name of the argument, for errors.
    parameter: A path, or the parameter itself: the very object in `params`.
    params: The parameters of a state.

  Raises:
    TypeError: It is neither a string nor an array.
    ValueError: No parameter has this path; or the array is none of `params`, or
      several of them.
  """
  if not isinstance(parameter, jax.Array):
    return check(argument, parameter, params)
  # By identity: equal arrays may be different parameters.
  known = leaves(params)
  found = [path for path, leaf in known.items() if leaf is parameter]
  if len(found) == 1:
    return found[0]
  given = f"{argument} is an array, {checks.describe(parameter)}, "
  if found:
    raise ValueError(
      f"{given}that is the parameters {', '.join(found)} at once: give the "
      "path of one of them."
    )
  raise ValueError(
    f"{given}that is not a leaf of state.params. A parameter is found by "
    "identity: take it from this state, inside jax.jit from the state that is "
    f"traced there. Or give its path, such as {next(iter(known), '')!r}."
  )


def select(argument: str, var_list: Any, params: PyTree) -> set[str]:
  """Returns the paths of the parameters that a list names.

  Args:
    argument: Name of the list, for errors.
    var_list: A sequence. Each element is the path of a parameter, or the
      parameter itself, or else a regular expression that is searched in all
      paths.
    params: The parameters of a state.

  Raises:
    TypeError: `var_list` is not a sequence of strings and parameters.
    ValueError: It is empty, an element selects no parameter or is no regular
      expression, or one is given twice.

  Example:
    >>> params = {"a": {"w": 1.0, "b": 2.0}, "c": {"w": 3.0}}
    >>> sorted(select("var_list", ["a/b", "^c/"], params))
    ['a/b', 'c/w']
  """
  if isinstance(var_list, str) or not isinstance(var_list, Sequence):
    raise checks.ArgumentTypeError(
      f"{argument} must be a sequence of paths of parameters and regular "
      f"expressions such as ('^encoder/',), got {checks.describe(var_list)}."
    )
  if not var_list:
    raise ValueError(f"{argument} must name at least one parameter, got [].")
  known = list(leaves(params))
  given = [x for x in var_list if isinstance(x, str)]
  patterns_lib.check(argument, [x for x in given if x not in known])
  selected: set[str] = set()
  for i, element in enumerate(var_list):
    where = f"{argument}[{i}]"
    if isinstance(element, str) and element not in known:
      selected.update(
        patterns_lib.find(f"{where}={element!r}", element, "params", known)
      )
    else:
      selected.add(find(where, element, params))
  return selected


def keep_selected(selected: set[str], tree: PyTree) -> PyTree:
  """Returns a tree like the parameters, with None for those not selected.

  Args:
    selected: The paths to keep.
    tree: A tree like the parameters. None may stand for a leaf.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, x: x if trees.path_string(path) in selected else None, tree
  )
