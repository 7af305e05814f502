"""The slots of a TrainState by parameter and name, and all its variables.

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
from flaxshard.state import parameter_paths

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
    group: Name of the wrapper that has the slot; "" for the optimizer.
    path: The path in the state of the group, without that of the parameter.
    tensorflow_path: The same, with TensorFlow's name at its end.
    value: The array.
  """

  parameter: str
  group: str
  path: str
  tensorflow_path: str
  value: Any

  def matches(self, name: str) -> bool:
    """Returns whether a name is the end of one of the slot's paths."""
    if self.group:
      group, _, name = name.partition("/")
      if group != self.group or not name:
        return False
    return any(
      f"/{path}".endswith(f"/{name}")
      for path in (self.path, self.tensorflow_path)
    )


def get_slot_names(
  params: PyTree, opt_state: PyTree, wrapper_states: PyTree
) -> list[str]:
  """Returns the names of all slots; see `TrainState.get_slot_names`."""
  slots = _find(params, opt_state, wrapper_states)
  return sorted({name for of_one in _named(slots).values() for name in of_one})


def get_slot(
  params: PyTree,
  opt_state: PyTree,
  wrapper_states: PyTree,
  parameter: Any,
  name: str,
) -> jax.Array | None:
  """Returns a slot by parameter and name; see `TrainState.get_slot`."""
  parameter = parameter_paths.find("get_slot: parameter", parameter, params)
  name = checks.string("get_slot: name", name)
  slots = _find(params, opt_state, wrapper_states)
  named = _named(slots)
  of_parameter = named.get(parameter, {})
  if name in of_parameter:
    return of_parameter[name].value
  found = {n: s for n, s in of_parameter.items() if s.matches(name)}
  if len(found) == 1:
    return next(iter(found.values())).value
  if found:
    raise ValueError(
      f"get_slot: {parameter} has several slots {name!r}: give one of "
      f"{', '.join(map(repr, found))}."
    )
  if any(slot.matches(name) for slot in slots):
    return None
  names = sorted({name for of_one in named.values() for name in of_one})
  listed = ", ".join(map(repr, names)) or "none"
  # optax's names are known as well.
  known = [*names, *(s.path.rpartition("/")[2] for s in slots)]
  raise ValueError(
    f"get_slot: no parameter has a slot {name!r}; the slots are {listed}."
    f"{checks.did_you_mean(name, known)}"
  )


def variables(
  opt_state: PyTree, wrapper_states: PyTree
) -> dict[str, jax.Array]:
  """Returns the arrays of the optimizer and the wrappers, by path."""
  tree = {"opt_state": opt_state, "wrapper_states": dict(wrapper_states)}
  flat = jax.tree_util.tree_leaves_with_path(tree)
  return {trees.path_string(path): leaf for path, leaf in flat}


def _find(
  params: PyTree, opt_state: PyTree, wrapper_states: PyTree
) -> list[Slot]:
  """Returns the slots, in the order of the states."""
  parameter_paths.leaves(params)  # raises if a path is not unique
  trained = opt_state_lib.trained_params(params)
  slots: list[Slot] = []
  for group, tree in {"": opt_state, **wrapper_states}.items():
    flat = jax.tree_util.tree_leaves_with_path(tree)
    owners = _owners(tree, trained)
    for (path, leaf), owner in zip(flat, owners, strict=True):
      if owner is None:
        continue
      parameter, length = owner
      prefix = path[: len(path) - length]
      keys = trees.path_strings(prefix) or ("<root>",)
      slots.append(
        Slot(
          parameter,
          group,
          "/".join(keys),
          "/".join([*keys[:-1], _tensorflow_name(tree, prefix) or keys[-1]]),
          leaf,
        )
      )
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


def _named(slots: list[Slot]) -> dict[str, dict[str, Slot]]:
  """Returns the slots of each parameter by their shortest distinct names."""
  by_parameter: dict[str, list[Slot]] = {}
  for slot in slots:
    by_parameter.setdefault(slot.parameter, []).append(slot)
  named: dict[str, dict[str, Slot]] = {}
  for parameter, of_one in by_parameter.items():
    short = [(s.group, s.tensorflow_path.rpartition("/")[2]) for s in of_one]
    named[parameter] = {
      "/".join(
        filter(
          None, key if short.count(key) == 1 else (s.group, s.tensorflow_path)
        )
      ): s
      for key, s in zip(short, of_one, strict=True)
    }
  return named


def _tensorflow_name(tree: PyTree, prefix: trees.Path) -> str | None:
  """Returns TensorFlow's name of a field, or None if it has no other one."""
  for key in prefix[:-1]:
    match key:
      case jax.tree_util.GetAttrKey(name=name):
        tree = getattr(tree, name)
      case jax.tree_util.SequenceKey(idx=i):
        tree = tree[i]
      case jax.tree_util.DictKey(key=k):
        tree = tree[k]
      case _:
        return None
  names = _TENSORFLOW_NAMES.get(type(tree), {})
  return names.get(trees.path_string(prefix[-1:])) if prefix else None
