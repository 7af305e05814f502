"""Gives NNX modules the interface of Linen modules: variables and `apply`.

`nnx.bridge.ToLinen` is not used. It keeps no random streams, so that each call
draws the same dropout mask. It leaves a `LoRAParam` out of `params`, refuses
the string keys of lists that Orbax restores, ignores the new values of a
parameter that is a tree, and calls the module to initialize it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from flax import linen as nn
from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core import trees

# Linen's names of the collections.
_COLLECTIONS: dict[type, str] = {
  nnx.Param: "params",
  nnx.BatchStat: "batch_stats",
  nnx.Cache: "cache",
  nnx.Intermediate: "intermediates",
  # Keys and counts of streams are variables of several classes.
  nnx.RngState: "rngs",
}

# The name of a collection, and the path of an array in it.
Place = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Apply:
  """Merges an NNX module from its variables and calls it; see `split`.

  It is called like a Linen `apply`: `apply_fn({"params": params, ...}, *args)`,
  with every collection of the module. `mutable` names the collections whose new
  values are returned beside the output; True stands for all but `params`.

  Attributes:
    graphdef: The module without its state.
    treedef: The structure of the state.
    places: The places of its arrays in the collections.
  """

  graphdef: Any
  treedef: Any
  places: tuple[Place, ...]

  def __hash__(self) -> int:
    # `jax.jit` hashes its static arguments at every call. Hashing the graph of
    # a large module takes longer than dispatching a step.
    return hash(self.treedef)

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
    known = {name for name, *_ in self.places}
    if set(variables) != known:
      raise ValueError(
        f"apply_fn: the variables given are {sorted(variables)}; the module "
        f"has {sorted(known)}."
      )
    checks.one_of("apply_fn: mode", mode, ("train", "eval", None))
    state = self.nnx_state(variables)
    old = dict(zip(self.places, jax.tree.leaves(state), strict=True))
    # A new module for each call: calls change modules, but not `variables`.
    module = nnx.merge(self.graphdef, state)
    if mode is not None:
      getattr(module, mode)()
    if callable(method):
      output = method(module, *args, **kwargs)
    else:
      output = getattr(module, method or "__call__")(*args, **kwargs)

    names: Collection[str] = ()
    if not isinstance(mutable, bool):
      names = {mutable} if isinstance(mutable, str) else mutable
    returned: dict[Place, Any] = {}
    for place, _, new in leaves_of(nnx.state(module)):
      name = place[0]
      if name in names or (mutable is True and name != "params"):
        returned[place] = new
      elif (
        name != "params"
        and mode != "eval"
        # Identity: under jit the values are unknown, and a call that writes a
        # variable writes a new array.
        and new is not old.get(place, new)
      ):
        raise ValueError(
          f"apply_fn: the call changed {name}[{'/'.join(place[1:])}], which "
          f"would be lost; pass mutable=[{name!r}], or mode='eval'."
        )
    if mutable is False:
      return output
    return output, traverse_util.unflatten_dict(returned)

  def nnx_state(self, variables: Mapping[str, Any]) -> nnx.State:
    """Returns all collections as a state for `nnx.update` and `nnx.merge`."""
    # They have strings for keys, as Orbax restores them; a module counts the
    # layers of a list with integers.
    flat = traverse_util.flatten_dict(variables)
    state: nnx.State = self.treedef.unflatten([flat[p] for p in self.places])
    return state


def split(module: nnx.Module) -> tuple[Apply, dict[str, Any]]:
  """Splits an NNX module into an apply function and its variables.

  Args:
    module: An initialized module, or one of `nnx.eval_shape`; it is not
      changed.

  Returns:
    `(apply_fn, variables)`. `variables` has a nested dict of arrays for each
    kind of variable: those of the module, in Linen's boxes if they have
    partitioning metadata. The names are Linen's: `params`, `batch_stats`,
    `cache`, `intermediates`. Keys and counters of random streams are in `rngs`,
    arrays outside of variables in `arrays`, and variables of any other kind in
    a collection with the name of their class.
  """
  graphdef, state = nnx.split(module)
  collections: dict[Place, Any] = {}
  for place, variable, value in leaves_of(state):
    # A Python number has no dtype until JAX makes an array of it.
    if isinstance(value, (bool, int, float, complex)):
      value = jnp.asarray(value)
    collections[place] = box(variable, value)
  apply_fn = Apply(graphdef, jax.tree.structure(state), tuple(collections))
  return apply_fn, traverse_util.unflatten_dict(collections)


def leaves_of(state: nnx.State) -> Iterator[tuple[Place, Any, Any]]:
  """Yields the place of each array of a state, its variable, and the array."""
  is_variable = lambda x: isinstance(x, nnx.Variable)
  for path, variable in jax.tree.leaves_with_path(state, is_leaf=is_variable):
    name, value = "arrays", variable
    if is_variable(variable):
      value = variable.get_value()
      # isinstance: a subclass of Param, such as LoRAParam, is a parameter.
      kind = next((k for k in _COLLECTIONS if isinstance(variable, k)), None)
      name = _COLLECTIONS[kind] if kind else type(variable).__name__
    for inner, leaf in jax.tree.leaves_with_path(value):
      # Strings: Orbax restores the keys of dicts as strings.
      yield (name, *trees.path_strings((*path, *inner))), variable, leaf


def box(variable: Any, value: Any) -> Any:
  """Boxes an array with the names of its dimensions, if it has any."""
  if not isinstance(variable, nnx.Variable):
    return value
  metadata = variable.get_metadata()
  # NNX accepts names, a PartitionSpec, a NamedSharding or a Format here.
  names: Any = metadata.get("out_sharding")
  names = getattr(names, "sharding", names)
  names = getattr(names, "spec", names)
  if not names:
    return value
  rules = metadata.get("sharding_rules") or ()
  return nn.LogicallyPartitioned(
    value, tuple(names), rules=tuple(map(tuple, rules))
  )
