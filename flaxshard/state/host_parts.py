"""Parts of the center, for owners that each update one of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax

from flaxshard.core import dependencies
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state import host_center
from flaxshard.state import host_leaves
from flaxshard.state.host_center import CenterState
from flaxshard.state.train_state import TrainState

PyTree = Any


def get_part(
  center: CenterState, keys: Collection[str]
) -> dict[str, jax.Array]:
  """Returns all arrays of a part of the center: parameters, slots, counts.

  Args:
    center: The center.
    keys: Keys of a commit.

  Returns:
    The arrays by a name such as `params/w` or `opt_state/0/mu/w`. Those that
    belong to no parameter are in every part. Of PRNG keys it is their data.
  """
  return {
    name: jax.random.key_data(x) if trees.is_prng_key(x) else x
    for name, (key, x) in _name_leaves(center).items()
    if key is None or key in keys
  }


def put_part(center: CenterState, part: Mapping[str, Any]) -> CenterState:
  """Returns the center with the arrays that `get_part` has returned."""
  leaves = _name_leaves(center)
  host_leaves.check_keys("part", part, leaves)
  treedef: Any = jax.tree.structure(center)

  def get(name: str, old: Any) -> Any:
    if name in part and trees.is_prng_key(old):
      impl = jax.random.key_impl(old)
      return jax.random.wrap_key_data(part[name], impl=impl)
    return part.get(name, old)

  return treedef.unflatten(get(name, x) for name, (_, x) in leaves.items())


def is_splittable(
  state: TrainState, fragments: tuple[int, ...], commit: Mapping[str, Any]
) -> bool:
  """Returns whether the update of each parameter depends on no other one.

  Args:
    state: A train state.
    fragments: The fragments of the commit.
    commit: A commit, or its shapes and dtypes.
  """
  center = jax.eval_shape(host_center.center_of, state)
  program = jax.make_jaxpr(
    lambda state, center, commit: host_center.update_center(
      state, center, fragments, commit
    )
  )(jax.eval_shape(lambda x: x, state), center, commit)
  owners = [key for key, _ in _name_leaves(center).values()]
  names: list[str | None] = [None] * len(jax.tree.leaves(state))
  names += owners
  names += [None if key.startswith("@") else key for key in commit]
  found = dependencies.find(program, names)
  return all(
    needed <= ({owner} if owner is not None else set())
    for needed, owner in zip(found, owners, strict=True)
  )


def _name_leaves(center: CenterState) -> dict[str, tuple[str | None, Any]]:
  """Returns the leaves of a center by name, each with the key it belongs to."""
  optimized = opt_state_lib.optimized_params(center.params)
  # Beside the statistics of fp8 layers, parameters have paths of their own.
  prefix = "" if optimized is center.params else "params/"

  def name_slots(field: str, tree: PyTree) -> Any:
    owners = opt_state_lib.parameters_of(tree, optimized)
    for (path, x), owner in zip(
      jax.tree_util.tree_leaves_with_path(tree), owners, strict=True
    ):
      key = None if owner is None else prefix + trees.path_string(owner)
      yield f"{field}/{trees.path_string(path)}", (key, x)

  # In the order of the leaves of a CenterState.
  named: dict[str, tuple[str | None, Any]] = {}
  for path, x in host_leaves.by_path(center.params).items():
    named[f"params/{path}"] = path, x
  named |= name_slots("opt_state", center.opt_state)
  named |= name_slots("outer_opt_state", center.outer_opt_state)
  for name, x in sorted(center.fragment_counts.items()):
    named[f"fragment_counts/{name}"] = None, x
  for path, x in sorted(center.collections.items()):
    named[f"collections/{path}"] = path, x
  named["commits"] = None, center.commits
  return named
