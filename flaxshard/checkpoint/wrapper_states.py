"""New states of wrappers, made from the restored parameters.

A checkpoint may have no state of a wrapper, or another one, as that for another
number of replicas. Then the wrapper starts with its first state, or with what
its method `restart` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any

import jax

from flaxshard.checkpoint.reader import Asked
from flaxshard.checkpoint.reader import Path
from flaxshard.checkpoint.reader import SavedLeaf
from flaxshard.checkpoint.reader import WRAPPER_STATES
from flaxshard.core import trees
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any


@dataclasses.dataclass(frozen=True)
class NewState:
  """A state of a wrapper that is not, or not whole, as it was saved.

  Attributes:
    wrapper: The wrapper.
    template: Shapes, dtypes and shardings of its state.
    missing: The paths of the leaves that it makes.
    saved: The saved leaves that it can go on from, by path: those that do not
      depend on the number of replicas.
    difference: How the saved state differs; None if there is none.
  """

  wrapper: base.Base
  template: PyTree
  missing: tuple[Path, ...]
  saved: Mapping[Path, SavedLeaf]
  difference: str | None

  def asked(self) -> dict[Path, Asked]:
    """Returns with which shape, dtype and sharding `saved` are read."""
    asked = {}
    for path, x in by_path(self.wrapper, self.template).items():
      if path in self.saved:
        shape, sharding = self.saved[path].shape, x.sharding
        # The mesh of now may not divide the number of saved replicas.
        if shape != x.shape and isinstance(
          sharding, jax.sharding.NamedSharding
        ):
          sharding = jax.sharding.NamedSharding(sharding.mesh, jax.P())
        asked[path] = Asked(shape, x.dtype, sharding=sharding)
    return asked

  def make(
    self, tx: Any, target: base.Target, saved: Mapping[Path, jax.Array]
  ) -> dict[Path, jax.Array]:
    """Returns the missing leaves.

    Args:
      tx: The optimizer.
      target: The restored step, parameters, optimizer state and collections.
      saved: The arrays of `saved`.

    Raises:
      ValueError: The wrapper's `restart` returns a tree unlike its state.
    """
    wrappers, name = (self.wrapper,), base.name_of(self.wrapper)
    leaves, mask = _leaves_and_mask(self.wrapper, self.template)
    local = itertools.compress(leaves.values(), mask)
    replicas = next((x.shape[0] for x in local), 1)
    ndim = {
      path: len(leaves[path].shape) - is_local
      for path, is_local in zip(leaves, mask, strict=True)
    }

    def make(target: base.Target, saved: Any) -> list[jax.Array]:
      first = stack.init(wrappers, target.params, tx, target.collections)
      first = stack.drop_replica_axis(wrappers, first)
      # The wrapper sees one replica: the first row stands for all.
      own = {
        "/".join(path[2:]): x[0] if x.ndim > ndim[path] else x
        for path, x in saved.items()
      }
      new = self.wrapper.restart(first[name], target, own)
      new = stack.add_replica_axis(wrappers, {name: new}, replicas)
      new = trees.conform(
        f"wrapper {name!r}: restart", new[name], self.template
      )
      new = by_path(self.wrapper, new)
      # Not the buffers of the parameters: a step may donate both.
      given = (target, [new[path] for path in self.missing])
      return trees.unshare_buffers(given)[1]

    # Sharded outputs, so that no device ever holds the copies of all replicas.
    shardings = [leaves[path].sharding for path in self.missing]
    made = jax.jit(make, out_shardings=shardings)(target, dict(saved))
    return dict(zip(self.missing, made, strict=True))


def by_path(wrapper: base.Base, state: PyTree) -> dict[Path, Any]:
  """Returns the leaves of a wrapper's state by their path in a train state."""
  return trees.leaves_by_path({WRAPPER_STATES: {base.name_of(wrapper): state}})


def go_on_from(
  wrapper: base.Base, template: PyTree, saved: Mapping[Path, SavedLeaf]
) -> dict[Path, SavedLeaf]:
  """Returns the saved leaves that are of use for any number of replicas.

  These are the replicated leaves and the scalars of the replicas.

  Args:
    wrapper: The wrapper.
    template: Shapes, dtypes and shardings of its state.
    saved: The leaves of the checkpoint, by path.
  """
  found = {}
  leaves, mask = _leaves_and_mask(wrapper, template)
  for (path, x), is_local in zip(leaves.items(), mask, strict=True):
    leaf = saved.get(path)
    shape = x.shape[1:] if is_local else x.shape
    if leaf is None or leaf.dtype != x.dtype or (is_local and shape):
      continue
    if leaf.shape == shape or (not shape and len(leaf.shape) == 1):
      found[path] = leaf
  return found


def _leaves_and_mask(
  wrapper: base.Base, template: PyTree
) -> tuple[dict[Path, Any], list[bool]]:
  """Returns the leaves of a wrapper's state, and which are per replica."""
  return by_path(wrapper, template), base.per_replica_mask(wrapper, template)
