"""Commits of some of the parameters, as conditionals of the compiled step.

A conditional gets and returns the leaves of its own fragments, so that the
other parameters are not touched by it. At most one group of fragments is
committed in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import tracing
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.sparse import row_accumulator
from flaxshard.wrappers import agn_center
from flaxshard.wrappers import agn_commit
from flaxshard.wrappers import agn_delay
from flaxshard.wrappers import agn_quantized
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers import agn_sequential
from flaxshard.wrappers.agn_commit import ModelState
from flaxshard.wrappers.agn_commit import Update

PyTree = Any


class CommitState(NamedTuple):
  """The arrays that commits change.

  Attributes:
    center: The center, with the state of `tx` or of `outer_tx`.
    local: This replica's parameters and optimizer state.
    accum: See `AGNState.grad_accum`.
    touched: See `AGNState`.
    collections: This replica's collections.
    committed: The collections as they were last committed.
    fragment_counts: See `AGNState`.
    sent: See `AGNState`.
  """

  center: ModelState
  local: ModelState
  accum: PyTree
  touched: PyTree
  collections: dict[str, PyTree]
  committed: dict[str, PyTree]
  fragment_counts: dict[str, jax.Array]
  sent: PyTree


def run_commits(
  agn: Any,
  update: Update,
  state: CommitState,
  grads: PyTree,
  local_step: jax.Array,
  applied: jax.Array,
) -> tuple[CommitState, jax.Array]:
  """Applies the commits that arrive at this step, and commits what is due.

  Args:
    agn: An `AGN` wrapper.
    update: One update of the center.
    state: The state after the local step.
    grads: The gradients of the local step.
    local_step: The number of local steps.
    applied: Whether the last one was not skipped.

  Returns:
    The new state, and the number of commits, int32.
  """
  numbers = agn_schedule.fragments_by_path(state.accum, agn.fragments)
  groups = agn_schedule.groups_of(agn)
  # All collectives are in these conditionals. Their predicates are replicated:
  # a per-replica one would become a select, with the collectives in every step.
  if agn.delay:
    for fragments in groups:
      arrives = agn_delay.arrival_steps(agn, state.sent)[fragments[0]]
      mask = _mask(state, numbers, fragments)._replace(
        center=_all(False, state.center),
        accum=_all(False, state.accum),
        touched=_all(False, state.touched),
        sent=_all(False, state.sent),
      )
      state = _cond(
        applied & (arrives == local_step),
        functools.partial(agn_delay.receive, agn, fragments=fragments),
        state,
        mask,
      )
  num_commits = jnp.zeros((), jnp.int32)
  for fragments in groups:
    phase = agn_schedule.phase_of(agn, fragments[0])
    is_due = applied & (local_step % agn.communication_period == phase)
    mask = _mask(state, numbers, fragments)
    if agn.delay:
      mask = mask._replace(local=_all(False, state.local))
    if agn.share_step_count:
      counts = _mask_counts(state.local.opt_state)
      mask = mask._replace(local=mask.local._replace(opt_state=counts))
    state = _cond(
      is_due,
      functools.partial(
        _commit,
        agn,
        update,
        grads=grads,
        numbers=numbers,
        fragments=fragments,
        local_step=local_step,
      ),
      state,
      mask,
    )
    num_commits += is_due
  return state, num_commits


def _commit(
  agn: Any,
  update: Update,
  state: CommitState,
  grads: PyTree,
  numbers: Mapping[str, int],
  fragments: Sequence[int],
  local_step: jax.Array,
) -> CommitState:
  """Commits what all replicas have accumulated for some fragments."""
  grads = agn_schedule.select(grads, numbers, fragments)
  taken = row_accumulator.take(
    agn_schedule.select(state.accum, numbers, fragments),
    state.touched,
    grads,
    agn.communication_period,
  )
  commit = agn_commit.commit_gradients(taken, grads, state.local.params)
  received = agn_commit.received_gradient(commit, grads)
  counts = {}
  if agn.share_step_count:
    # Equal on all replicas, but JAX does not know: the maximum makes it so.
    counts = replica_context.reduce_over_replicas(
      "max", opt_state_lib.counts(state.local.opt_state)
    )
  old = agn_center.with_fragment_counts(
    state.center, state.fragment_counts, fragments
  )
  # Commits are the same on all replicas: wrappers inside must not reduce.
  remainders = None
  with replica_context.gradients_already_reduced():
    if agn.commit == "sequential":
      center, new_params = agn_sequential.commit_sequentially(
        update, old, commit, (counts, received)
      )
    else:
      center, new_params, remainders = agn_commit.commit_combined(
        agn.commit, update, old, commit, (counts, received), agn.commit_dtype
      )
  accum, touched = row_accumulator.clear(state.accum, state.touched, taken)
  if remainders is not None:
    accum = agn_quantized.keep_remainders(accum, remainders)
  local_opt_state = state.local.opt_state
  if agn.share_step_count:
    local_opt_state = opt_state_lib.with_counts(
      local_opt_state, opt_state_lib.counts(center.opt_state)
    )
  committed = {
    name: replica_context.mean_collection(x)
    for name, x in state.collections.items()
  }
  state = state._replace(
    center=center,
    local=state.local._replace(opt_state=local_opt_state),
    accum=accum,
    touched=touched,
    committed=committed,
    fragment_counts=agn_center.update_fragment_counts(
      state.center, center, state.fragment_counts, fragments
    ),
  )
  return agn_delay.send(agn, state, new_params, fragments, local_step)


def _cond(
  pred: jax.Array,
  fn: Callable[[CommitState], CommitState],
  state: CommitState,
  mask: CommitState,
) -> CommitState:
  """Returns `fn(state)` if `pred` is true; only masked leaves may change."""
  leaves = jax.tree.leaves(state)
  treedef: Any = jax.tree.structure(state)
  is_given = treedef.flatten_up_to(mask)

  def merge(given: list[Any]) -> CommitState:
    new = iter(given)
    return treedef.unflatten(
      [next(new) if m else x for x, m in zip(leaves, is_given, strict=True)]
    )

  def pick(state: CommitState) -> list[Any]:
    new = treedef.flatten_up_to(state)
    return [x for x, m in zip(new, is_given, strict=True) if m]

  with jax.named_scope(tracing.COMMIT_SCOPE):
    return merge(
      tracing.cond(
        pred,
        lambda given: pick(fn(merge(given))),
        lambda given: given,
        pick(state),
      )
    )


def _mask(
  state: CommitState, numbers: Mapping[str, int], fragments: Sequence[int]
) -> CommitState:
  """Returns which leaves a commit of some fragments may change.

  Slots, accumulators and local parameters of those fragments, and what belongs
  to no parameter. Of the replica's optimizer state nothing.
  """

  def is_mine(path: trees.Path) -> bool:
    return agn_schedule.fragment_of(path, numbers) in fragments

  def by_path(tree: PyTree) -> PyTree:
    return jax.tree_util.tree_map_with_path(lambda path, _: is_mine(path), tree)

  params, opt_state = state.center
  # The paths of slots are those in what the optimizer gets.
  optimized = opt_state_lib.optimized_params(params)
  prefix = () if optimized is params else (jax.tree_util.DictKey("params"),)
  slots = [
    parameter is None or is_mine((*prefix, *parameter))
    for parameter in opt_state_lib.parameters_of(opt_state, optimized)
  ]
  masked = by_path(params)
  sent = _all(True, state.sent)
  if isinstance(sent, dict) and "params" in sent:
    sent["params"] = masked
  return CommitState(
    center=ModelState(
      masked, jax.tree.unflatten(jax.tree.structure(opt_state), slots)
    ),
    local=ModelState(masked, _all(False, state.local.opt_state)),
    accum=by_path(state.accum),
    touched=by_path(state.touched),
    collections=_all(True, state.collections),
    committed=_all(True, state.committed),
    fragment_counts=_all(True, state.fragment_counts),
    sent=sent,
  )


def _mask_counts(opt_state: PyTree) -> PyTree:
  counts = opt_state_lib.counts(opt_state)
  return jax.tree_util.tree_map_with_path(
    lambda path, _: trees.path_string(path) in counts, opt_state
  )


def _all(value: bool, tree: PyTree) -> PyTree:
  return jax.tree.map(lambda _: value, tree)
