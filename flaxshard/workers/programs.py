"""The compiled functions of a worker's commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flaxshard.core import trees
from flaxshard.state import host_commits
from flaxshard.state.host_commits import CenterState

PyTree = Any
Commit = Mapping[str, Any]

# On one device, states of equal shapes share their programs, also between
# workers in threads of one process.
_take = jax.jit(host_commits.take, static_argnums=1, donate_argnums=0)
_restore = jax.jit(host_commits.add_to_accumulators, donate_argnums=0)
_apply_mean = jax.jit(
  host_commits.apply_mean, static_argnums=1, donate_argnums=0
)
_replace_params = jax.jit(host_commits.replace_params, donate_argnums=0)


class Programs:
  """Calls the functions of `host_commits`, compiled for a state's devices.

  All but `with_center` donate the state.

  Args:
    state: The train state of a worker.
  """

  def __init__(self, state: PyTree):
    self._take, self._restore = _take, _restore
    self._apply_mean, self._replace_params = _apply_mean, _replace_params
    shardings = jax.tree.map(lambda x: x.sharding, state)
    if not all(
      isinstance(s, jax.sharding.NamedSharding)
      for s in jax.tree.leaves(shardings)
    ):
      # Naming the device of an array that is on the default one would pin the
      # array there, and the train step would be compiled again.
      return
    # XLA could shard a result otherwise, for which the train step would be
    # compiled again.
    self._take = jax.jit(
      host_commits.take,
      static_argnums=1,
      donate_argnums=0,
      out_shardings=(shardings, None),
    )
    self._restore = jax.jit(
      host_commits.add_to_accumulators,
      donate_argnums=0,
      out_shardings=shardings,
    )
    self._apply_mean = jax.jit(
      host_commits.apply_mean,
      static_argnums=1,
      donate_argnums=0,
      out_shardings=shardings,
    )
    self._replace_params = jax.jit(
      host_commits.replace_params, donate_argnums=0, out_shardings=shardings
    )

  def warm(self, state: PyTree, groups: tuple[tuple[int, ...], ...]) -> None:
    """Compiles the functions, so that the first commit does not.

    Args:
      state: The train state.
      groups: The groups of fragments that are committed together.
    """
    agn = host_commits.find(state.wrappers)
    assert agn is not None
    for fragments in groups:
      _, commit = jax.eval_shape(
        lambda s, f=fragments: host_commits.take(s, f), state
      )
      self._take.lower(state, fragments).compile()
      if agn.commit != "sequential":
        commit = _as_host_arrays(commit)
        self._apply_mean.lower(state, fragments, commit).compile()
        continue
      center = host_commits.center_of(state)
      keys = host_commits.reductions(state, fragments)
      params = {
        trees.path_string(path): x
        for path, x in jax.tree_util.tree_leaves_with_path(center.params)
      }
      answer = {key: x for key, x in params.items() if key in keys}
      self._replace_params.lower(
        state, _as_host_arrays(answer), _as_host_arrays(center.collections)
      ).compile()

  def take(
    self, state: PyTree, fragments: tuple[int, ...]
  ) -> tuple[PyTree, dict[str, jax.Array]]:
    """See `host_commits.take`. The commit's copy to the host is started."""
    state, commit = self._take(state, fragments)
    for x in commit.values():
      x.copy_to_host_async()
    return state, commit

  def restore(self, state: PyTree, commit: Commit) -> PyTree:
    """See `host_commits.add_to_accumulators`."""
    return self._restore(state, dict(commit)) if commit else state

  def apply_mean(
    self, state: PyTree, fragments: tuple[int, ...], reduced: Commit
  ) -> PyTree:
    """See `host_commits.apply_mean`."""
    return self._apply_mean(state, fragments, dict(reduced))

  def replace_params(
    self, state: PyTree, params: Commit, collections: Commit | None
  ) -> PyTree:
    """See `host_commits.replace_params`."""
    return self._replace_params(
      state, dict(params), None if collections is None else dict(collections)
    )

  def with_center(
    self,
    state: PyTree,
    center: CenterState,
    *,
    local_step: int | None,
    keep_slots: bool,
  ) -> PyTree:
    """See `host_commits.with_center`, with a restart."""
    new = host_commits.with_center(
      state,
      center,
      restart=True,
      local_step=None if local_step is None else np.int32(local_step),
      keep_slots=keep_slots,
    )
    return _place_like(new, state)

  def replace_center(self, state: PyTree, center: CenterState) -> PyTree:
    """Returns the state with a newer center; local parameters stay."""
    new = host_commits.with_center(state, center, restart=False)
    return _place_like(new, state)


def _place_like(tree: PyTree, like: PyTree) -> PyTree:
  def put(x: Any, old: Any) -> Any:
    if isinstance(old.sharding, jax.sharding.NamedSharding):
      return jax.device_put(x, old.sharding)
    return x

  return jax.tree.map(put, tree, like)


def _as_host_arrays(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree)
