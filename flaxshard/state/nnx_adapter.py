"""NNX modules in the form that Linen models have: variables and an apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp

from flaxshard.core import trees

_NAMES: dict[type, str] = {
  nnx.Param: "params",
  nnx.BatchStat: "batch_stats",
  nnx.Cache: "cache",
  nnx.Intermediate: "intermediates",
}


class _Variable(NamedTuple):
  """Where a variable of the module lies in the collections."""

  path: tuple[Any, ...]  # in the NNX state
  collection: str
  treedef: Any  # of the variable with its metadata
  leaves: tuple[tuple[str, ...], ...]  # paths in the collection


@dataclasses.dataclass(frozen=True)
class Apply:
  """Merges an NNX module from its variables and calls it; see `split`.

  Called as a Linen `apply`: `apply_fn({"params": params, ...}, *args)`, with
  every collection that the module has. `mutable` names the collections (True:
  all but `params`) whose new values are returned beside the output.
  """

  graphdef: Any
  variables: tuple[_Variable, ...]

  def __hash__(self) -> int:
    # jit asks at every call, and the graph of a large module takes a while.
    if "_hash" not in self.__dict__:
      object.__setattr__(self, "_hash", hash((self.graphdef, self.variables)))
    return self.__dict__["_hash"]

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
      mutable: The collections to return, by name; True for all but `params`.
        `"intermediates"` may be new: what the call sows.
      method: Another method than `__call__`, or its name.
      mode: `"train"` or `"eval"` calls the module's method of that name first;
        None leaves it in the mode that it was in when it was split.
      **kwargs: Keyword arguments of the module's call.

    Returns:
      The output, or `(output, {name: collection})` where `mutable` asks for it.

    Raises:
      ValueError: A collection is missing or unknown, `mode` is neither, or the
        call changed a collection that `mutable` does not name (in the mode
        "eval", and where it sows, that is dropped as in Linen).
    """
    names = {v.collection for v in self.variables if v.leaves}
    if isinstance(mutable, bool):
      asked = names - {"params"} | {"intermediates"} if mutable else set()
    else:
      asked = {mutable} if isinstance(mutable, str) else set(mutable)
    for argument, given in (
      ("variables", set(variables)),
      ("mutable", asked - {"intermediates"}),
    ):
      if unknown := given - names:
        raise ValueError(
          f"apply_fn: {argument} names {sorted(unknown)}; the module has "
          f"{sorted(names)}."
        )
    if missing := names - set(variables):
      raise ValueError(
        f"apply_fn: variables lack {sorted(missing)}; the module has "
        f"{sorted(names)}."
      )
    if mode not in (None, "train", "eval"):
      raise ValueError(
        f"apply_fn: mode={mode!r}; allowed: 'train', 'eval', None."
      )
    module, before = self._merge(variables)
    if mode is not None:
      getattr(module, mode)()
    if callable(method):
      output = method(module, *args, **kwargs)
    else:
      output = getattr(module, method or "__call__")(*args, **kwargs)

    collections: dict[str, Any] = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
      known = before.get(path)
      name = known[0] if known else _collection_of(variable)
      for i, (key, new) in enumerate(_leaves_of(path, variable)):
        if name in asked:
          _put(collections.setdefault(name, {}), key, new)
        elif (
          known
          and name != "params"
          and mode != "eval"
          and new is not known[1][i]
        ):
          raise ValueError(
            f"apply_fn: the call changed {name}[{'/'.join(key)}], which would "
            f"be lost; pass mutable=[{name!r}], or mode='eval'."
          )
    return output if mutable is False else (output, collections)

  def _merge(
    self, collections: Mapping[str, Any]
  ) -> tuple[nnx.Module, dict[tuple[Any, ...], tuple[str, list[Any]]]]:
    """Returns the module, and what went in by path: collection and leaves."""
    flat, before = [], {}
    for path, collection, treedef, leaves in self.variables:
      values = [_get(collections[collection], leaf) for leaf in leaves]
      flat.append((path, jax.tree.unflatten(treedef, values)))
      before[path] = (collection, values)
    return nnx.merge(self.graphdef, nnx.from_flat_state(flat)), before


def is_module(model: Any) -> bool:
  """Whether `model` is an instance of `nnx.Module`."""
  return isinstance(model, nnx.Module)


def construct(function: Callable[[nnx.Rngs], Any], rng: Any) -> nnx.Module:
  """Calls a function of `nnx.Rngs` that returns a module.

  Args:
    function: The function.
    rng: A PRNG key, or a dict of keys by stream name.

  Raises:
    TypeError: The function returns something else.
  """
  module = function(
    nnx.Rngs(**rng) if isinstance(rng, Mapping) else nnx.Rngs(rng)
  )
  if not is_module(module):
    raise TypeError(
      "model must be an instance of flax.linen.Module or flax.nnx.Module, or a "
      f"function that returns the latter, got {function!r}, which returned "
      f"{module!r}."
    )
  return module


def split(
  module: nnx.Module, *, boxed: bool = False, copy: bool = True
) -> tuple[Apply, dict[str, Any]]:
  """Splits an NNX module into an apply function and its variables.

  Args:
    module: An initialized module; it is not changed.
    boxed: Whether to box arrays that have partitioning metadata, as Linen does.
    copy: Whether to copy the arrays, so that donating them does not delete
      those of the module. Without copies nothing is allocated.

  Returns:
    `(apply_fn, variables)`. `variables` has a nested dict of arrays for each
    kind of variable: `params`, `batch_stats` and so on as Linen names them, the
    keys and counters of random streams under `rngs`, arrays that are no
    variables under `arrays`, any other kind under its class name.
  """
  graphdef, state = nnx.split(module)
  found: list[_Variable] = []
  collections: dict[str, Any] = {}
  for path, variable in nnx.to_flat_state(state):
    name = _collection_of(variable)
    leaves = _leaves_of(path, variable)
    keys = tuple(key for key, _ in leaves)
    found.append(_Variable(path, name, jax.tree.structure(variable), keys))
    for key, value in leaves:
      if copy:
        value = jnp.copy(value)
      if boxed:
        value = _box(variable, value)
      _put(collections.setdefault(name, {}), key, value)
  return Apply(graphdef, tuple(found)), collections


def _collection_of(variable: Any) -> str:
  if not isinstance(variable, nnx.Variable):
    return "arrays"
  if isinstance(variable, nnx.RngState):
    return "rngs"
  for kind, name in _NAMES.items():
    if isinstance(variable, kind):
      return name
  return type(variable).__name__


def _box(variable: Any, value: Any) -> Any:
  """Boxes an array with the names of its dimensions, if it has any."""
  if not isinstance(variable, nnx.Variable):
    return value
  metadata = variable.get_metadata()
  names = metadata.get("out_sharding")
  names = getattr(names, "sharding", names)  # of a jax.experimental Format
  names = getattr(names, "spec", names)  # of a NamedSharding
  if not names:
    return value
  rules = metadata.get("sharding_rules") or ()
  return nn.LogicallyPartitioned(
    value, tuple(names), rules=tuple(map(tuple, rules))
  )


def _leaves_of(
  path: tuple[Any, ...], variable: Any
) -> list[tuple[tuple[str, ...], Any]]:
  """Returns the arrays of a variable, with their paths in its collection."""
  value = (
    variable.get_value() if isinstance(variable, nnx.Variable) else variable
  )
  # Orbax keeps the keys of dicts as strings, so ours are strings already.
  return [
    ((*map(str, path), *trees.path_strings(inner)), leaf)
    for inner, leaf in jax.tree_util.tree_leaves_with_path(value)
  ]


def _get(tree: Any, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value
