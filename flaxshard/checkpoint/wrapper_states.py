"""New states of wrappers, made from the restored parameters.

A checkpoint may have no state of a wrapper, or another one, as that for another
number of replicas. Then the wrapper starts with its first state, or with what
its method `restart` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax

from flaxshard.checkpoint.reader import Asked
from flaxshard.checkpoint.reader import Path
from flaxshard.checkpoint.reader import SavedLeaf
from flaxshard.core import trees
from flaxshard.wrappers import base
from flaxshard.wrappers import stack

PyTree = Any


@dataclasses.dataclass(frozen=True)
class NewState:
  """A state of a wrapper that is not, or not whole, as it was saved.

  All paths are those within the state.

  Attributes:
    wrapper: The wrapper.
    template: Shapes, dtypes and shardings of its state.
    saved: The leaves of the state that was saved, by path.
    difference: How that differs; None if no state was saved.
  """

  wrapper: base.Base
  template: PyTree
  saved: Mapping[Path, SavedLeaf]
  difference: str | None

  def of_any_replicas(self, replicated: Any) -> dict[Path, tuple[Any, Asked]]:
    """Returns the saved leaves that are of use for any number of replicas.

    These are the replicated leaves and the scalars of the replicas.

    Args:
      replicated: The sharding for the scalars of another number of replicas:
        the mesh may not divide that number.

    Returns:
      Each leaf, and the shape, dtype and sharding to read it with, by path.
    """
    found = {}
    for path, (x, is_local) in self._leaves().items():
      leaf = self.saved.get(path)
      shape = x.shape[1:] if is_local else x.shape
      if leaf is None or leaf.dtype != x.dtype or (is_local and shape):
        continue
      if leaf.shape == shape or (not shape and len(leaf.shape) == 1):
        sharding = x.sharding if leaf.shape == x.shape else replicated
        found[path] = leaf, Asked(leaf.shape, x.dtype, sharding=sharding)
    return found

  def make(
    self, tx: Any, target: base.Target, saved: Mapping[Path, jax.Array]
  ) -> PyTree:
    """Returns the state.

    Args:
      tx: The optimizer.
      target: The restored step, parameters, optimizer state and collections.
      saved: The arrays of `of_any_replicas`.

    Raises:
      ValueError: The wrapper's `restart` returns a tree unlike its state.
    """
    wrappers, name = (self.wrapper,), base.name_of(self.wrapper)
    local = [x for x, is_local in self._leaves().values() if is_local]
    replicas = local[0].shape[0] if local else 1

    def make(target: base.Target, saved: Mapping[Path, jax.Array]) -> PyTree:
      first = stack.init(wrappers, target.params, tx, target.collections)
      first = stack.drop_replica_axis(wrappers, first)[name]
      ndim = {p: x.ndim for p, x in trees.leaves_by_path(first).items()}
      # The wrapper sees one replica: the first row stands for all.
      own = {
        "/".join(path): x[0] if x.ndim > ndim[path] else x
        for path, x in saved.items()
      }
      new = {name: self.wrapper.restart(first, target, own)}
      new = stack.add_replica_axis(wrappers, new, replicas)
      new = trees.conform(
        f"wrapper {name!r}: restart", new[name], self.template
      )
      # Not the buffers of the parameters: a step may donate both.
      return trees.unshare_buffers((target, new))[1]

    # Sharded outputs, so that no device ever holds the copies of all replicas.
    shardings = jax.tree.map(lambda x: x.sharding, self.template)
    return jax.jit(make, out_shardings=shardings)(target, dict(saved))

  def _leaves(self) -> dict[Path, tuple[Any, bool]]:
    """Returns each leaf of the template, and whether it is per replica."""
    leaves = trees.leaves_by_path(self.template)
    mask = base.per_replica_mask(self.wrapper, self.template)
    return {
      path: (x, is_local)
      for (path, x), is_local in zip(leaves.items(), mask, strict=True)
    }
