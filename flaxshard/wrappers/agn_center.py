"""One update of AGN's center, and the step counts of its fragments.

Adam's step count belongs to all parameters. Fragments are committed at
different steps, so each has step counts of its own: those of its commits. The
optimizer's state has the counts of the fragment that was committed last, and
`AGNState.fragment_counts` has by how much those of each fragment lag behind.
Zeros are thus right for a state that has been committed as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.wrappers import agn_commit
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers import base
from flaxshard.wrappers.agn_commit import ModelState
from flaxshard.wrappers.agn_commit import Update

PyTree = Any


def create_update(agn: Any, target: base.Target, next: base.Next) -> Update:
  """Returns the update of the center with accumulated gradients.

  Its `shared` are step counts of the optimizer by path, `{}` for those of the
  center, and the result of `agn_commit.received_gradient`.

  Args:
    agn: An `AGN` wrapper.
    target: The target of this step, for its other fields.
    next: Applies gradients with the wrappers inside and the optimizer.
  """

  def update_center(
    old: ModelState, accum: PyTree, shared: tuple[PyTree, PyTree]
  ) -> ModelState:
    counts, received = shared
    grads = _keep_statistics(old.params, normalize(agn, accum))
    if agn.outer_tx is not None:
      new = agn_commit.apply_outer_tx(agn.outer_tx, old, grads)
    else:
      updated = next(
        target._replace(
          # The target's step is local: `state.step` counts no commits.
          step=jnp.zeros((), jnp.int32),
          params=old.params,
          opt_state=opt_state_lib.with_counts(old.opt_state, counts),
        ),
        grads,
      )
      new = ModelState(updated.params, updated.opt_state)
    return agn_commit.keep_without_gradient(old, new, received)

  return update_center


def _keep_statistics(params: PyTree, grads: PyTree) -> PyTree:
  """Returns gradients with the values of statistics that have none.

  Flax replaces its statistics by their gradients, also by None.
  """
  return jax.tree_util.tree_map_with_path(
    lambda path, p, g: p if g is None and gradients.is_statistic(path) else g,
    params,
    grads,
  )


def normalize(agn: Any, accum: PyTree) -> PyTree:
  """Returns the gradients of a commit: the mean over the period."""
  if agn.commit_delta:
    return accum
  # Divided here and not before it is sent: XLA fuses this into the update,
  # elsewhere it would take memory for a copy.
  return gradients.map_gradients(lambda a: a / agn.communication_period, accum)


def init_fragment_counts(
  agn: Any, opt_state: PyTree, params: PyTree
) -> dict[str, jax.Array]:
  """Returns the first `AGNState.fragment_counts`: no fragment lags behind.

  Args:
    agn: An `AGN` wrapper.
    opt_state: The center's optimizer state.
    params: The parameters.
  """
  if len(agn_schedule.groups_of(agn)) == 1:
    return {}
  return {
    name: jnp.zeros((agn.fragments, *x.shape), x.dtype)
    for name, x in _integers_by_name(opt_state, params).items()
    # Shared counts are those of local steps.
    if not (agn.share_step_count and _is_count(name, opt_state))
  }


def with_fragment_counts(
  center: ModelState,
  fragment_counts: dict[str, jax.Array],
  fragments: Sequence[int],
) -> ModelState:
  """Returns the center with the step counts of some fragments.

  Args:
    center: The center.
    fragment_counts: `AGNState.fragment_counts`.
    fragments: Fragments that are committed together.
  """
  if not fragment_counts:
    return center
  found = _integers_by_name(center.opt_state, center.params)
  new = {
    name: found[name] - lags[fragments[0]]
    for name, lags in fragment_counts.items()
  }
  return center._replace(opt_state=_replace(center.opt_state, new))


def update_fragment_counts(
  old: ModelState,
  new: ModelState,
  fragment_counts: dict[str, jax.Array],
  fragments: Sequence[int],
) -> dict[str, jax.Array]:
  """Returns `AGNState.fragment_counts` after a commit.

  Args:
    old: The center before the commit, without `with_fragment_counts`.
    new: The center after it.
    fragment_counts: The counts before it.
    fragments: The fragments that were committed.
  """
  if not fragment_counts:
    return fragment_counts
  before = _integers_by_name(old.opt_state, old.params)
  after = _integers_by_name(new.opt_state, new.params)
  index = jnp.array(fragments)
  return {
    # Each count is the center's less the lag.
    name: (lags + (after[name] - before[name])).at[index].set(0)
    for name, lags in fragment_counts.items()
  }


def _name_of(path: trees.Path) -> str:
  # Without "/", which would be another level in a checkpoint.
  return trees.path_string(path).replace("/", "-")


def _integers_by_name(opt_state: PyTree, params: PyTree) -> dict[str, Any]:
  """Returns the integers that belong to no parameter."""
  optimized = opt_state_lib.optimized_params(params)
  leaves = jax.tree_util.tree_leaves_with_path(opt_state)
  parameters = opt_state_lib.parameters_of(opt_state, optimized)
  return {
    _name_of(path): x
    for (path, x), parameter in zip(leaves, parameters, strict=True)
    if parameter is None and jnp.issubdtype(trees.dtype_of(x), jnp.integer)
  }


def _is_count(name: str, opt_state: PyTree) -> bool:
  counts = opt_state_lib.counts(opt_state)
  return name in {path.replace("/", "-") for path in counts}


def _replace(opt_state: PyTree, new: dict[str, jax.Array]) -> PyTree:
  return jax.tree_util.tree_map_with_path(
    lambda path, x: new.get(_name_of(path), x), opt_state
  )
