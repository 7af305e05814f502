"""The variables of NNX objects as arrays by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax import nnx
import jax

from flaxshard.core import trees

PyTree = Any
# Path of a variable in the module, and the position of an array in it.
Leaves = dict[tuple[tuple[Any, ...], int], Any]


def kinds(state: PyTree) -> set[str]:
  """Returns the names of the classes of the variables in a state."""
  return {
    type(x).__name__ if isinstance(x, nnx.Variable) else "plain arrays"
    for _, x in nnx.to_flat_state(state)
  }


def leaves(module: Any, wrt: Any) -> Leaves:
  """Returns the arrays of a module that are not selected by a filter."""
  _, others = nnx.state(module, wrt, ...)
  return {
    (path, i): leaf
    for path, variable in nnx.to_flat_state(others)
    for i, leaf in enumerate(jax.tree.leaves(variable))
  }


def set_leaves(module: Any, wrt: Any, new: Mapping[str, Any]) -> None:
  """Sets arrays of a module, by the names that `name_of` returns."""
  if not new:
    return
  _, others = nnx.state(module, wrt, ...)
  changed = []
  for path, variable in nnx.to_flat_state(others):
    old, treedef = jax.tree.flatten(variable)
    names = [name_of((path, i)) for i in range(len(old))]
    if not any(name in new for name in names):
      continue
    values = [new.get(name, x) for name, x in zip(names, old, strict=True)]
    changed.append((path, jax.tree.unflatten(treedef, values)))
  nnx.update(module, nnx.from_flat_state(changed))


def name_of(key: tuple[tuple[Any, ...], int]) -> str:
  """Returns the name of a key of `leaves`."""
  path, i = key
  return "/".join([*map(str, path), *([str(i)] if i else [])])


def assign(variables: PyTree, arrays: PyTree) -> None:
  """Sets each variable of a tree to the array at its place."""
  nodes = jax.tree.leaves(
    variables, is_leaf=lambda x: isinstance(x, nnx.Variable)
  )
  values = iter(jax.tree.leaves(arrays))
  for variable in nodes:
    treedef: Any = jax.tree.structure(variable.get_raw_value())
    variable.set_value(
      treedef.unflatten([next(values) for _ in range(treedef.num_leaves)])
    )


def check_gradients(grads: PyTree, params: PyTree, wrt: Any) -> None:
  """Raises a ValueError unless gradients have the paths of the parameters."""
  given = trees.leaves_by_path(grads, True)
  missing = [p for p in trees.leaves_by_path(params) if p not in given]
  if missing:
    raise ValueError(
      f"update: grads have no gradient of {'/'.join(missing[0])}, which wrt="
      f"{describe(wrt)} selects. optimizer.value_and_grad(loss_fn) "
      "differentiates all that wrt selects; nnx.value_and_grad differentiates "
      f"nnx.Param unless its argnums is nnx.DiffState(0, {describe(wrt)})."
    )


def describe(wrt: Any) -> str:
  """Returns a filter in a few words, for messages."""
  return wrt.__name__ if isinstance(wrt, type) else repr(wrt)
