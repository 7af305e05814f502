"""Gives NNX modules the interface of Linen modules: variables and `apply`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx
import jax
from jax.experimental import layout
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import trees

# Linen's names of the collections.
_COLLECTIONS: dict[type, str] = {
  nnx.Param: "params",
  nnx.BatchStat: "batch_stats",
  nnx.Cache: "cache",
  nnx.Intermediate: "intermediates",
}


class _Variable(NamedTuple):
  """The place of a variable of the module in the collections."""

  path: tuple[Any, ...]  # in the NNX state
  collection: str
  treedef: Any  # of the variable with its metadata
  leaves: tuple[tuple[str, ...], ...]  # paths in the collection


@dataclasses.dataclass(frozen=True)
class Apply:
  """Merges an NNX module from its variables and calls it; see `split`.

  It is called like a Linen `apply`: `apply_fn({"params": params, ...}, *args)`,
  with every collection of the module. `mutable` names the collections whose new
  values are returned beside the output; True stands for all but `params`.
  """

  graphdef: Any
  variables: tuple[_Variable, ...]

  @functools.cached_property
  def _hash(self) -> int:
    return hash((self.graphdef, self.variables))

  def __hash__(self) -> int:
    # `jax.jit` hashes its static arguments at every call. Hashing the graph of
    # a large module takes longer than dispatching a step.
    return self._hash

  def __getstate__(self) -> dict[str, Any]:
    # Without the hash: hashes of strings differ between processes.
    return {"graphdef": self.graphdef, "variables": self.variables}

  def __call__(
    self,
    variables: Mapping[str, Any],
    *args: Any,
    mutable: bool | str | Sequence[str] = False,
    method: str | Callable[..., Any] | None = None,
    mode: str | None = None,
    **kwargs: Any,
  ) -> Any:
    """Calls the merged module.

    Args:
      variables: The collections, by name.
      *args: Arguments of the module's call.
      mutable: Names of the collections to return; True for all but `params`.
        They may be new ones, of variables that the call makes, such as
        `"intermediates"` with the values that it sows.
      method: The method to call, or its name; None for `__call__`.
      mode: `"train"` or `"eval"` calls the module's method of that name first.
        None keeps the mode that the module had when it was split.
      **kwargs: Keyword arguments of the module's call.

    Returns:
      The output; `(output, {name: collection})` if `mutable` is not False.

    Raises:
      ValueError: A collection is missing or unknown, `mode` is unknown, or the
        call changed a collection that `mutable` does not name. In the mode
        "eval" such changes are dropped. New variables, such as sown values, are
        dropped in any mode, as in Linen.
    """
    # A variable with the value None has no leaves, so it needs no collection.
    known = {v.collection for v in self.variables if v.leaves}
    if set(variables) != known:
      raise ValueError(
        f"apply_fn: the variables given are {sorted(variables)}; the module "
        f"has {sorted(known)}."
      )
    if isinstance(mutable, bool):
      to_return = known - {"params"} | {"intermediates"} if mutable else set()
    else:
      to_return = {mutable} if isinstance(mutable, str) else set(mutable)
    checks.one_of("apply_fn: mode", mode, ("train", "eval", None))
    # A new module for each call: calls change modules, but not `variables`.
    module, given = self._merge(variables)
    if mode == "train":
      module.train()
    elif mode == "eval":
      module.eval()
    if callable(method):
      output = method(module, *args, **kwargs)
    else:
      output = getattr(module, method or "__call__")(*args, **kwargs)

    variables_after = nnx.to_flat_state(nnx.state(module))
    returned: dict[str, Any] = {}
    # By path: after the call the module may have more variables than before.
    for path, variable in variables_after:
      # A variable that was not given is new: the call made or sowed it.
      name, old_values = given.get(path, (_collection_of(variable), None))
      for i, (key, new) in enumerate(leaves_of(path, variable)):
        is_new = mutable is True and old_values is None and name != "params"
        if name in to_return or is_new:
          set_leaf(returned.setdefault(name, {}), key, new)
        elif (
          old_values is not None
          # Identity: under jit the values are unknown, and a call that writes
          # a variable writes a new array.
          and new is not old_values[i]
          and name != "params"
          and mode != "eval"
        ):
          raise ValueError(
            f"apply_fn: the call changed {name}[{'/'.join(key)}], which would "
            f"be lost; pass mutable=[{name!r}], or mode='eval'."
          )
    return output if mutable is False else (output, returned)

  def nnx_state(self, variables: Mapping[str, Any]) -> nnx.State:
    """Returns variables as a state for `nnx.update`.

    The collections have strings for keys, as Orbax restores them; a module
    counts the layers of a list with integers.

    Args:
      variables: Some or all of the collections, by name.
    """
    return nnx.from_flat_state(
      [
        (
          path,
          jax.tree.unflatten(
            treedef, [get_leaf(variables[collection], leaf) for leaf in leaves]
          ),
        )
        for path, collection, treedef, leaves in self.variables
        if collection in variables and leaves
      ]
    )

  def _merge(
    self, collections: Mapping[str, Any]
  ) -> tuple[nnx.Module, dict[tuple[Any, ...], tuple[str, list[Any]]]]:
    """Returns the module, and each variable's collection and leaves by path."""
    flat, given = [], {}
    for path, collection, treedef, leaves in self.variables:
      values = [get_leaf(collections[collection], leaf) for leaf in leaves]
      flat.append((path, jax.tree.unflatten(treedef, values)))
      given[path] = (collection, values)
    return nnx.merge(self.graphdef, nnx.from_flat_state(flat)), given


def split(
  module: nnx.Module, *, boxed: bool = False, copy: bool = True
) -> tuple[Apply, dict[str, Any]]:
  """Splits an NNX module into an apply function and its variables.

  Args:
    module: An initialized module, or one of `nnx.eval_shape` with
      `copy=False`; it is not changed.
    boxed: Whether to box arrays that have partitioning metadata, as Linen does.
    copy: Whether to copy the arrays, so that donating them does not delete
      those of the module. Without copies nothing is allocated.

  Returns:
    `(apply_fn, variables)`. `variables` has a nested dict of arrays for each
    kind of variable. The names are Linen's: `params`, `batch_stats`, `cache`,
    `intermediates`. Keys and counters of random streams are in `rngs`, arrays
    outside of variables in `arrays`, and variables of any other kind in a
    collection with the name of their class.
  """
  graphdef, state = nnx.split(module)
  found: list[_Variable] = []
  collections: dict[str, Any] = {}
  for path, variable in nnx.to_flat_state(state):
    name = _collection_of(variable)
    leaves = leaves_of(path, variable)
    keys = tuple(key for key, _ in leaves)
    found.append(_Variable(path, name, jax.tree.structure(variable), keys))
    for key, value in leaves:
      # A Python number has no dtype until JAX makes an array of it.
      if copy or isinstance(value, (bool, int, float, complex)):
        value = jnp.copy(value)
      if boxed:
        value = box(variable, value)
      set_leaf(collections.setdefault(name, {}), key, value)
  return Apply(graphdef, tuple(found)), collections


def _collection_of(variable: Any) -> str:
  """Returns the name of the collection of a variable or bare array."""
  if not isinstance(variable, nnx.Variable):
    return "arrays"
  # Keys and counts of streams are variables of several classes.
  if isinstance(variable, nnx.RngState):
    return "rngs"
  # isinstance: a subclass of Param, such as LoRAParam, is a parameter.
  for kind, name in _COLLECTIONS.items():
    if isinstance(variable, kind):
      return name
  return type(variable).__name__


def box(variable: Any, value: Any) -> Any:
  """Boxes an array with the names of its dimensions, if it has any."""
  if not isinstance(variable, nnx.Variable):
    return value
  metadata = variable.get_metadata()
  # NNX accepts names, a PartitionSpec, a NamedSharding or a Format here.
  names: Any = metadata.get("out_sharding")
  if isinstance(names, layout.Format):
    names = names.sharding
  if isinstance(names, jax.sharding.NamedSharding):
    names = names.spec
  if not names:
    return value
  rules = metadata.get("sharding_rules") or ()
  return nn.LogicallyPartitioned(
    value, tuple(names), rules=tuple(map(tuple, rules))
  )


def leaves_of(
  path: tuple[Any, ...], variable: Any
) -> list[tuple[tuple[str, ...], Any]]:
  """Returns the arrays of a variable, with their paths in its collection."""
  value = (
    variable.get_value() if isinstance(variable, nnx.Variable) else variable
  )
  # String keys: Orbax restores the keys of dicts as strings.
  return [
    ((*map(str, path), *trees.path_strings(inner)), leaf)
    for inner, leaf in jax.tree_util.tree_leaves_with_path(value)
  ]


def get_leaf(tree: Any, path: tuple[str, ...]) -> Any:
  """Returns the leaf of nested dicts at a path."""
  for key in path:
    tree = tree[key]
  return tree


def set_leaf(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
  """Sets the leaf of nested dicts at a path."""
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value
