"""The center of `AGN(transport="host")`: what the workers have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import optimizer_update
from flaxshard.core import trees
from flaxshard.core.indexed_slices import is_indexed_slices
from flaxshard.replicas import context as replica_context
from flaxshard.sparse import row_accumulator
from flaxshard.state import host_leaves
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn_center
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers import base
from flaxshard.wrappers import stack
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState
from flaxshard.wrappers.agn_commit import ModelState

PyTree = Any
Fragments = tuple[int, ...]
S = TypeVar("S", bound=TrainState)

# Keys of the step counts in a commit begin with this.
COUNTS = "@counts/"
# Key of the flags of the parameters that had a gradient.
RECEIVED = "@received"


class CenterState(NamedTuple):
  """The center: what the workers have in common.

  Attributes:
    params: The parameters.
    opt_state: The state of `tx` for the center; as it was created if there is
      an `outer_tx`.
    outer_opt_state: The state of `outer_tx`; `()` without.
    fragment_counts: See `AGNState`.
    collections: The floating-point arrays of the other collections at the last
      commit, by path. Others, such as PRNG keys, belong to a worker.
    commits: int32 scalar, number of commits; of sequential ones, those of all
      workers.
  """

  params: PyTree
  opt_state: PyTree
  outer_opt_state: PyTree
  fragment_counts: dict[str, jax.Array]
  collections: dict[str, jax.Array]
  commits: jax.Array


def center_of(state: TrainState) -> CenterState:
  """Returns the center in a train state; its arrays are those of the state."""
  agn, own = host_leaves.agn_state(state)
  is_sequential = agn.commit == "sequential"
  collections = {name: getattr(state, name) for name in own.collections}
  return CenterState(
    params=state.params,
    opt_state=state.opt_state,
    outer_opt_state=own.outer_opt_state,
    fragment_counts=own.fragment_counts,
    collections=host_leaves.floating(collections),
    commits=own.center_commits if is_sequential else own.commits,
  )


def with_center(
  state: S,
  center: CenterState,
  *,
  restart: bool,
  local_step: Any = None,
  keep_slots: bool = False,
) -> S:
  """Returns a train state with another center.

  Args:
    state: The train state of a worker.
    center: The center.
    restart: Whether the worker starts from the center: local parameters and
      collections are those of the center, and accumulators are zero. If False,
      they stay.
    local_step: With `restart`, the local step to go on from. `state.step` and
      the step counts of the local optimizer advance by as many. None: the start
      of the period, as `AGN.restart`.
    keep_slots: With `restart`, whether the local optimizer keeps its slots, as
      of a worker that comes back. If False they are those of the center.
  """
  agn, own = host_leaves.agn_state(state)

  def as_arrays(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, old: jnp.asarray(x, old.dtype), tree, like)

  # The center may also be one of NumPy arrays, as it was received.
  state = state.replace(
    params=as_arrays(center.params, state.params),
    opt_state=as_arrays(center.opt_state, state.opt_state),
  )
  own = own._replace(
    outer_opt_state=as_arrays(center.outer_opt_state, own.outer_opt_state),
    fragment_counts=as_arrays(center.fragment_counts, own.fragment_counts),
  )
  commits = jnp.asarray(center.commits, jnp.int32)
  if agn.commit == "sequential":
    own = own._replace(center_commits=commits)
  else:
    own = own._replace(commits=commits)
  if not restart:
    state = host_leaves.with_collections(
      state, center.collections, committed=True
    )
    return trees.unshare_buffers(host_leaves.with_agn_state(state, own))
  period = agn.communication_period
  counts = opt_state_lib.counts(own.local_opt_state)
  if local_step is None:
    new_step = own.local_step - own.local_step % period
  else:
    new_step = jnp.asarray(local_step, jnp.int32)
    shift = new_step - own.local_step
    state = state.replace(step=state.step + shift)
    counts = {path: x + shift for path, x in counts.items()}
  if agn.share_step_count:
    counts = opt_state_lib.counts(state.opt_state)
    steps = agn_schedule.steps_after_commit(agn, new_step)
    counts = {path: x + steps for path, x in counts.items()}
  slots = own.local_opt_state if keep_slots else state.opt_state
  own = own._replace(
    local_params=state.params,
    local_opt_state=opt_state_lib.with_counts(slots, counts),
    grad_accum=jax.tree.map(jnp.zeros_like, own.grad_accum),
    touched=jax.tree.map(jnp.zeros_like, own.touched),
    received=jnp.zeros_like(own.received),
    local_step=new_step,
  )
  state = host_leaves.with_agn_state(state, own)
  return trees.unshare_buffers(
    host_leaves.with_collections(state, center.collections)
  )


def update_center(
  state: TrainState,
  center: CenterState,
  fragments: Fragments,
  commit: Mapping[str, Any],
) -> CenterState:
  """Updates the center with one commit, or with the part of it that is given.

  Only the parameters among the keys change, and their slots. So if
  `is_splittable`, several owners may each update a part of the center. Every
  call advances the step counts: an owner of two parts has a center for each,
  and each part gets every commit, if only its keys with `@`.

  As in compiled commits, a parameter that had no gradient in the period keeps
  its value and its slots.

  Args:
    state: A train state, for its optimizer and wrappers.
    center: The center.
    fragments: The fragments that are committed.
    commit: The result of `take`, or some of its keys and those with `@`.
  """
  agn, own = host_leaves.agn_state(state)
  center = CenterState(*(jax.tree.map(jnp.asarray, x) for x in center))
  has_outer = agn.outer_tx is not None
  old = ModelState(
    center.params, center.outer_opt_state if has_outer else center.opt_state
  )
  grads = _to_gradients(own, center.params, commit)
  update = agn_center.create_update(agn, *_inner_update(state, agn, center))
  # Commits are reduced: wrappers inside must not reduce them.
  with replica_context.gradients_already_reduced():
    new = update(
      agn_center.with_fragment_counts(old, center.fragment_counts, fragments),
      grads,
      (
        _commit_counts(agn, center, fragments, commit),
        _received_by_path(own, grads, commit),
      ),
    )
  return CenterState(
    params=new.params,
    opt_state=center.opt_state if has_outer else new.opt_state,
    outer_opt_state=new.opt_state if has_outer else (),
    fragment_counts=agn_center.update_fragment_counts(
      old, new, center.fragment_counts, fragments
    ),
    collections={
      path: jnp.asarray(commit.get(path, x), x.dtype)
      for path, x in center.collections.items()
    },
    commits=center.commits + 1,
  )


def _inner_update(
  state: TrainState, agn: AGN, center: CenterState
) -> tuple[base.Target, base.Next]:
  """Returns a target, and the update of the wrappers inside of AGN and `tx`."""
  inner = state.wrappers[state.wrappers.index(agn) + 1 :]
  names = [base.name_of(w) for w in inner]

  def update(target: base.Target, grads: PyTree) -> base.Target:
    current = state.replace(
      step=target.step, params=target.params, opt_state=target.opt_state
    )
    new = optimizer_update.flax_update(current, grads, {})
    return target._replace(
      step=new.step,
      params=new.params,
      opt_state=optimizer_update.keep_dtypes(new.opt_state, target.opt_state),
    )

  target = base.Target(
    step=jnp.asarray(state.step, jnp.int32),
    params=center.params,
    opt_state=center.opt_state,
    collections={},
    wrapper_states=stack.local_states(
      inner, {name: state.wrapper_states[name] for name in names}
    ),
  )
  return target, lambda target, grads: stack.apply(inner, target, grads, update)


def _to_gradients(
  own: AGNState, params: PyTree, commit: Mapping[str, Any]
) -> PyTree:
  """Returns the arrays of a commit as gradients like the parameters."""
  touched = own.touched
  if not jax.tree.leaves(touched):
    touched = jax.tree.map(lambda _: None, params)

  def to_gradient(path: trees.Path, p: Any, total: Any, rows: Any) -> Any:
    given = commit.get(trees.path_string(path))
    if gradients.is_statistic(path):
      # Flax takes the gradient of a statistic as its new value.
      return p if given is None else jnp.asarray(given, p.dtype)
    if given is None or total is None:
      return None
    given = host_leaves.from_wire(given, total)
    if rows is None:
      return given
    # As rows, which leave the other rows of a table and its slots alone.
    rows = host_leaves.nonzero_rows(given, rows)
    return row_accumulator.take([given], [rows], [None], 1)[0]

  return jax.tree_util.tree_map_with_path(
    to_gradient, params, own.grad_accum, touched
  )


def _received_by_path(
  own: AGNState, grads: PyTree, commit: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """Returns which parameters of a commit had a gradient, by path."""
  if RECEIVED not in commit:
    raise ValueError(
      f"commit: {RECEIVED!r} is missing; every part of a commit must have it."
    )
  given = commit[RECEIVED]
  tables = {
    trees.path_string(path)
    for path, g in jax.tree_util.tree_leaves_with_path(
      grads, is_leaf=is_indexed_slices
    )
    if is_indexed_slices(g)
  }
  return {
    path: jnp.asarray(given[i]) > 0
    for i, path in enumerate(host_leaves.by_path(own.grad_accum))
    # The update of a table changes the rows that it is given alone.
    if path in commit and path not in tables
  }


def _commit_counts(
  agn: AGN, center: CenterState, fragments: Fragments, commit: Mapping[str, Any]
) -> dict[str, jax.Array]:
  """Returns the step counts that a commit sets before it updates the center."""
  if not agn.share_step_count:
    return {}
  counts = opt_state_lib.counts(center.opt_state)
  if agn.commit == "sequential":
    return {path: jnp.asarray(commit[COUNTS + path]) for path in counts}
  # Not those of this worker: one that has come back may have others, and all
  # must compute the same center. Local steps go on from the last commit.
  steps = agn_schedule.steps_since_last_commit(agn, fragments)
  return {path: x + steps for path, x in counts.items()}
