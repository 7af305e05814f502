"""TensorFlow's surface: parameters by path, gradient pairs, slots by name.

A slot is an array that the optimizer, or a wrapper, keeps for one parameter,
such as Adam's first moment. TensorFlow's `Optimizer.get_slot` finds it by the
name that TensorFlow gives it; optax has other names for the same slots.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import optax

from flaxshard.core import checks
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import patterns as patterns_lib
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any
Pair = tuple[Any, str]

MISSING: Any = object()

# TensorFlow's names of optax's fields: `get_slot_names()` of the optimizers in
# tf.compat.v1.train, TensorFlow 2.21; `vhat` of Keras.
_TENSORFLOW_NAMES: dict[type, dict[str, str]] = {
  optax.ScaleByAdamState: {"mu": "m", "nu": "v"},
  optax.ScaleByAmsgradState: {"mu": "m", "nu": "v", "nu_max": "vhat"},
  optax.TraceState: {"trace": "momentum"},
  optax.ScaleByRmsState: {"nu": "rms"},
  optax.ScaleByRStdDevState: {"mu": "mg", "nu": "rms"},
  optax.ScaleByRssState: {"sum_of_squares": "accumulator"},
  optax.ScaleByAdaDeltaState: {"e_g": "accum", "e_x": "accum_update"},
}


def check_path(argument: str, path: Any, params: PyTree) -> str:
  """Returns `path` if it is the path of a parameter.

  Args:
    argument: Name of the argument, for errors.
    path: A string such as `Dense_0/kernel`.
    params: The parameters of a state.

  Raises:
    ValueError: No parameter has this path.
  """
  known = trees.names(params)
  if path not in known:
    where = f"{argument}={path!r}"
    raise patterns_lib.no_match(where, str(path), "params", known)
  return path


def select(var_list: Any, params: PyTree) -> set[str]:
  """Returns the paths of the parameters that `var_list` names.

  Args:
    var_list: A sequence of paths of parameters, and of regular expressions
      that are searched in all paths; None for all parameters.
    params: The parameters of a state.

  Raises:
    TypeError: `var_list` is not a sequence of strings.
    ValueError: It is empty, an element selects no parameter or is no regular
      expression, or one is given twice.

  Example:
    >>> params = {"a": 1.0, "ab": 2.0, "c": {"w": 3.0}}
    >>> sorted(select(["a", "^c/"], params)), sorted(select(["a.*"], params))
    (['a', 'c/w'], ['a', 'ab'])
  """
  known = trees.names(params)
  if var_list is None:
    return set(known)
  selected: set[str] = set()
  for element in patterns_lib.check("var_list", var_list):
    if element in known:
      selected.add(element)
    else:
      where = f"var_list: {element!r}"
      selected.update(patterns_lib.find(where, element, "params", known))
  if not selected:
    raise ValueError("var_list must name at least one parameter, got [].")
  return selected


def pairs_of(grads: PyTree, selected: set[str]) -> list[Pair]:
  """Returns the gradients of a tree as (gradient, path) pairs, in its order.

  Args:
    grads: A tree like the parameters, with None where there is no gradient.
    selected: The paths to return.
  """
  flat = jax.tree_util.tree_leaves_with_path(grads, is_leaf=gradients.is_leaf)
  named = ((g, trees.path_string(path)) for path, g in flat)
  return [(g, path) for g, path in named if path in selected]


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
    TypeError: A tree is given by position, or gradients twice, or not at all.
    ValueError: A pair has an unknown path, or one that an earlier pair has.
  """
  given = [*positional, *([] if grads is MISSING else [grads])]
  if len(given) == 1:
    value = list(given[0]) if isinstance(given[0], Iterator) else given[0]
    if _is_pairs(value):
      return _tree_of(value, params)
    if type(value) is tuple and not isinstance(params, tuple):
      raise ValueError(
        f"grads must be a tree like params, got a tuple of {len(value)}; "
        "value_and_grad returns (loss, grads): pass its second element."
      )
    if not positional:
      return value
  raise TypeError(
    "apply_gradients takes gradients by name: write "
    "state.apply_gradients(grads=grads). Only (gradient, path) pairs, as "
    "compute_gradients returns them, may be given by position."
  )


def _is_pairs(given: Any) -> bool:
  # A path is a string, and no tree of gradients has strings.
  return isinstance(given, (list, tuple)) and all(
    isinstance(pair, (list, tuple))
    and len(pair) == 2
    and isinstance(pair[1], str)
    for pair in given
  )


def _tree_of(pairs: Iterable[Pair], params: PyTree) -> PyTree:
  """Returns pairs as a tree of gradients, with None for other parameters."""
  by_path: dict[str, Any] = {}
  for i, (g, path) in enumerate(pairs):
    where = f"apply_gradients: the path of pair {i}"
    if check_path(where, path, params) in by_path:
      raise ValueError(
        f"{where}, {path!r}, is given twice. Add the gradients of a parameter."
      )
    by_path[path] = g
  return jax.tree_util.tree_map_with_path(
    lambda path, _: by_path.get(trees.path_string(path)),
    params,
  )


def check_aggregation(
  aggregation: Any,
  is_skipped: bool,
  wrappers: tuple[base.Base, ...],
  extra: Iterable[str],
) -> str:
  """Returns how gradients are reduced over the replicas.

  Args:
    aggregation: "mean" or "sum".
    is_skipped: Whether gradients are not reduced at all.
    wrappers: The wrappers of the state.
    extra: Names of extra arguments of the optimizer.

  Raises:
    ValueError: It is none of these, or something else decides already.
  """
  checks.one_of("aggregation", aggregation, replica_context.REDUCE_OPS)
  if is_skipped or stack.reduces(wrappers) != "before":
    names = [w.name for w in wrappers]
    other = "skip_gradients_aggregation=True" if is_skipped else f"{names}"
    raise ValueError(
      f"aggregation={aggregation!r} is given, and {other} decides how "
      "gradients are reduced: give one of the two."
    )
  # They are means over the replicas, and must be those of the gradients.
  means = sorted({"grad", "value_fn"} & set(extra))
  if aggregation == "sum" and means:
    raise ValueError(
      f"aggregation='sum': the optimizer uses {' and '.join(means)}, the mean "
      "over the replicas; use aggregation='mean'."
    )
  return aggregation


class Slot(NamedTuple):
  """A slot of a parameter.

  Attributes:
    parameter: The path of the parameter.
    names: Its last key in TensorFlow's words, all keys such as `0/m`, and the
      two in optax's words, such as `mu` and `0/mu`; each behind the name of
      the wrapper that keeps the slot.
    value: The array.
  """

  parameter: str
  names: tuple[str, ...]
  value: Any


def get_slot_names(state: Any) -> list[str]:
  """Returns the names of all slots; see `TrainState.get_slot_names`."""
  slots = _find_slots(state)
  # The long ones where a parameter has two slots of one name.
  counts = collections.Counter((s.parameter, s.names[0]) for s in slots)
  is_shared = lambda s: counts[s.parameter, s.names[0]] > 1
  return sorted({s.names[1] if is_shared(s) else s.names[0] for s in slots})


def get_slot(state: Any, parameter: str, name: str) -> jax.Array | None:
  """Returns a slot by parameter and name; see `TrainState.get_slot`."""
  check_path("get_slot: parameter", parameter, state.params)
  found = [s for s in _find_slots(state) if name in s.names]
  if not found:
    names = get_slot_names(state)
    raise ValueError(
      f"get_slot: no parameter has a slot {name!r}; the slots are "
      f"{', '.join(map(repr, names)) or 'none'}."
      f"{checks.did_you_mean(name, names)}"
    )
  of_parameter = [s for s in found if s.parameter == parameter]
  if len(of_parameter) > 1:
    raise ValueError(
      f"get_slot: {parameter} has several slots {name!r}: give one of "
      f"{', '.join(repr(s.names[1]) for s in of_parameter)}."
    )
  return of_parameter[0].value if of_parameter else None


def _find_slots(state: Any) -> list[Slot]:
  """Returns the slots of a train state, in the order of its states."""
  known = state.params
  optimized = opt_state_lib.optimized_params(known)
  if optimized is not known:
    # Beside the statistics of fp8 layers, optimizers see the parameters alone.
    known = {**known, **optimized}
  slots: list[Slot] = []
  paths = set(trees.names(state.params))
  for group, tree in {"": state.opt_state, **state.wrapper_states}.items():
    # By the path of the optax state that a slot is a field of.
    tensorflow_names = {
      path: _TENSORFLOW_NAMES.get(type(node), {})
      for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: type(x) in _TENSORFLOW_NAMES
      )
    }
    flat = jax.tree_util.tree_leaves_with_path(tree)
    owners = opt_state_lib.parameters_of(tree, known)
    for (path, leaf), owner in zip(flat, owners, strict=True):
      if owner is None:
        continue
      prefix = path[: len(path) - len(owner)]
      *keys, last = trees.path_strings(prefix) or ("<root>",)
      tensorflow = tensorflow_names.get(prefix[:-1], {}).get(last, last)
      names = ([tensorflow], [*keys, tensorflow], [last], [*keys, last])
      in_front = [group] if group else []
      joined = tuple("/".join([*in_front, *name]) for name in names)
      parameter = trees.path_string(owner)
      if parameter not in paths:
        parameter = f"params/{parameter}"
      slots.append(Slot(parameter, joined, leaf))
  return slots
