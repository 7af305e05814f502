"""NNX modules in the form that Linen models have: variables and an apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

_NAMES: dict[type, str] = {
  nnx.Param: "params",
  nnx.BatchStat: "batch_stats",
  nnx.Cache: "cache",
  nnx.Intermediate: "intermediates",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Apply:
  """Merges an NNX module from its variables and calls it; see `split`.

  Called as a Linen `apply`: `apply_fn({"params": params, ...}, *args)`, with
  every collection that the module has. `mutable` names the collections (True:
  all but `params`) whose new values are returned beside the output.
  """

  graphdef: Any
  treedef: Any
  leaves: tuple[tuple[str, tuple[str, ...]], ...]

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
      method: Another method than `__call__`, or its name.
      mode: `"train"` or `"eval"` calls the module's method of that name first;
        None leaves it in the mode that it was in when it was split.
      **kwargs: Keyword arguments of the module's call.

    Returns:
      The output, or `(output, {name: collection})` where `mutable` asks for it.

    Raises:
      ValueError: A collection is missing or unknown, `mode` is neither, or the
        call changed a collection that `mutable` does not name.
    """
    names = {name for name, _ in self.leaves}
    if isinstance(mutable, bool):
      asked = names - {"params"} if mutable else set()
    else:
      asked = {mutable} if isinstance(mutable, str) else set(mutable)
    for argument, given in (("variables", variables), ("mutable", asked)):
      unknown = set(given) - names
      if unknown:
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
    before = [_get(variables[name], path) for name, path in self.leaves]
    state = jax.tree.unflatten(self.treedef, before)
    module = nnx.merge(self.graphdef, state)
    if mode is not None:
      getattr(module, mode)()
    call = getattr(module, method) if isinstance(method, str) else module
    if callable(method):
      output = method(module, *args, **kwargs)
    else:
      output = call(*args, **kwargs)
    after = jax.tree.leaves(nnx.state(module))
    collections: dict[str, Any] = {}
    for (name, path), old, new in zip(self.leaves, before, after, strict=True):
      if name in asked:
        _put(collections.setdefault(name, {}), path, new)
      elif new is not old:
        raise ValueError(
          f"apply_fn: the call changed {name}[{'/'.join(path)}], which would "
          f"be lost; pass mutable=[{name!r}], or mode='eval'."
        )
    return output if mutable is False else (output, collections)


def is_module(model: Any) -> bool:
  """Whether `model` is an instance of `nnx.Module`."""
  return isinstance(model, nnx.Module)


def split(module: nnx.Module) -> tuple[Apply, dict[str, Any]]:
  """Splits an NNX module into an apply function and its variables.

  Args:
    module: An initialized module; it is not changed.

  Returns:
    `(apply_fn, variables)`. `variables` has a nested dict of arrays for each
    kind of variable: `params`, `batch_stats` and so on as Linen names them, the
    keys and counters of random streams under `rngs`, any other kind under its
    class name.
  """
  graphdef, state = nnx.split(module)
  values, treedef = jax.tree.flatten(state)
  leaves: list[tuple[str, tuple[str, ...]]] = []
  variables: dict[str, Any] = {}
  for (path, variable), value in zip(
    nnx.to_flat_state(state), values, strict=True
  ):
    # Orbax keeps the keys of dicts as strings, so ours are strings already.
    key = (_collection_of(type(variable)), tuple(map(str, path)))
    leaves.append(key)
    # A copy: donating the state must not delete the arrays of the module.
    _put(variables.setdefault(key[0], {}), key[1], jnp.copy(value))
  return Apply(graphdef, treedef, tuple(leaves)), variables


def _collection_of(kind: type) -> str:
  if issubclass(kind, nnx.RngState):
    return "rngs"
  for known, name in _NAMES.items():
    if issubclass(kind, known):
      return name
  return kind.__name__


def _get(tree: Any, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value
