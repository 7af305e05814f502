"""The slots of a TrainState, by parameter and name.

A slot is an array that the optimizer, or a wrapper, keeps for one parameter,
such as Adam's first moment. TensorFlow's `Optimizer.get_slot` finds it by the
name that TensorFlow gives it; optax has other names for the same slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from flaxshard.core import checks
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state import tf_surface

PyTree = Any

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


class Slot(NamedTuple):
  """A slot of a parameter.

  Attributes:
    parameter: The path of the parameter.
    name: Its last key, in TensorFlow's words; behind that of its wrapper.
    long_name: The same with all keys, such as `0/m`.
    others: The two with optax's last key, such as `mu` and `0/mu`.
    value: The array.
  """

  parameter: str
  name: str
  long_name: str
  others: tuple[str, ...]
  value: Any


def get_slot_names(
  params: PyTree, opt_state: PyTree, wrapper_states: PyTree
) -> list[str]:
  """Returns the names of all slots; see `TrainState.get_slot_names`."""
  return _names(_find(params, opt_state, wrapper_states))


def get_slot(
  params: PyTree,
  opt_state: PyTree,
  wrapper_states: PyTree,
  parameter: str,
  name: str,
) -> jax.Array | None:
  """Returns a slot by parameter and name; see `TrainState.get_slot`."""
  tf_surface.check_path("get_slot: parameter", parameter, params)
  slots = _find(params, opt_state, wrapper_states)
  found = [s for s in slots if name in (s.name, s.long_name, *s.others)]
  of_parameter = [s for s in found if s.parameter == parameter]
  if len(of_parameter) == 1:
    return of_parameter[0].value
  if of_parameter:
    raise ValueError(
      f"get_slot: {parameter} has several slots {name!r}: give one of "
      f"{', '.join(repr(s.long_name) for s in of_parameter)}."
    )
  if found:
    return None
  names = _names(slots)
  raise ValueError(
    f"get_slot: no parameter has a slot {name!r}; the slots are "
    f"{', '.join(map(repr, names)) or 'none'}."
    f"{checks.did_you_mean(name, names)}"
  )


def _names(slots: list[Slot]) -> list[str]:
  """Returns the names of slots; the long ones where a parameter has two."""
  short = [(s.parameter, s.name) for s in slots]
  return sorted(
    {
      s.name if short.count(key) == 1 else s.long_name
      for key, s in zip(short, slots, strict=True)
    }
  )


def _find(
  params: PyTree, opt_state: PyTree, wrapper_states: PyTree
) -> list[Slot]:
  """Returns the slots, in the order of the states."""
  trained = opt_state_lib.trained_params(params)
  slots: list[Slot] = []
  for group, tree in {"": opt_state, **wrapper_states}.items():
    # By the path of the optax state that a slot is a field of.
    tensorflow_names = {
      path: _TENSORFLOW_NAMES[type(node)]
      for path, node in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: type(x) in _TENSORFLOW_NAMES
      )
      if type(node) in _TENSORFLOW_NAMES
    }
    flat = jax.tree_util.tree_leaves_with_path(tree)
    owners = _owners(tree, trained)
    for (path, leaf), owner in zip(flat, owners, strict=True):
      if owner is None:
        continue
      parameter, length = owner
      prefix = path[: len(path) - length]
      *keys, last = trees.path_strings(prefix) or ("<root>",)
      in_front = [group] if group else []
      names = tensorflow_names.get(prefix[:-1], {})
      tensorflow = names.get(last, last)
      name, long_name, *others = (
        "/".join([*in_front, *middle, end])
        for end in (tensorflow, last)
        for middle in ((), keys)
      )
      slots.append(Slot(parameter, name, long_name, (*others,), leaf))
  return slots


def _owners(tree: PyTree, trained: PyTree) -> list[tuple[str, int] | None]:
  """Returns, for each leaf, its parameter and the length of that path."""
  owners: list[tuple[str, int] | None] = [
    path and (trees.path_string(path), len(path))
    for path in opt_state_lib.parameters_of(tree, trained)
  ]
  optimized = opt_state_lib.optimized_params(trained)
  if optimized is trained:
    return owners
  # Beside the statistics of fp8 layers, optimizers see the parameters alone.
  return [
    owner or (path and (f"params/{trees.path_string(path)}", len(path)))
    for owner, path in zip(
      owners, opt_state_lib.parameters_of(tree, optimized), strict=True
    )
  ]
