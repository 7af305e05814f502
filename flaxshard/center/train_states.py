"""Commits and centers in the train state of a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.center import encoding
from flaxshard.center import update as update_lib
from flaxshard.center.update import Arrays
from flaxshard.center.update import CenterUpdate
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers.agn import AGNState

PyTree = Any
S = TypeVar("S", bound=TrainState)


class Center(NamedTuple):
  """One version of a fragment of the center.

  Attributes:
    version: Its number.
    params: The parameters by path.
    collections: Other collections by path; of the last fragment only.
    slots: The optimizer's slots by path, if they were read.
    remainders: With the slots: what encoding has cut off, by path.
  """

  version: int
  params: Arrays
  collections: Arrays
  slots: Arrays | None = None
  remainders: Arrays | None = None


def take(
  update: CenterUpdate, state: S, fragment: int
) -> tuple[S, dict[str, Any]]:
  """Takes a commit out of the accumulators.

  Args:
    update: The center's update.
    state: The train state of a worker.
    fragment: The fragment that is committed.

  Returns:
    The state with what encoding has cut off in the accumulators; and the
    commit: `steps`, the local step `step`, the `version` that it started from,
    and arrays by path in `grads`, `statistics` and `collections`.

  Raises:
    FloatingPointError: An accumulator has NaN or infinity.
  """
  _, own = update_lib.find(state)
  is_last = fragment == update.agn.transport.fragments - 1
  accum, received = own.grad_accum, np.asarray(own.received).copy()
  remainders, sent = {}, {}
  for i, (path, x) in enumerate(update_lib.by_path(accum).items()):
    if update.fragment_of[path] != fragment:
      continue
    total = np.asarray(x)
    if not np.isfinite(total).all():
      raise FloatingPointError(
        f"Worker: the accumulated gradients of {path} have NaN or infinity at "
        f"local step {int(own.local_step)}. They are not committed. A "
        "LossScale around AGN skips such steps."
      )
    if received[i]:
      # No copy: these arrays are in no state any more.
      sent[path] = encoding.encode(total, update.agn.transport.commit_dtype)
      remainders[path] = np.zeros_like(total)
      if sent[path] is not total:
        remainders[path] += total - encoding.decode(sent[path])
    received[i] = False
  commit = {
    "steps": int(own.local_step) - int(own.sent[fragment]),
    "step": int(own.local_step),
    "version": int(own.versions[fragment]),
    "grads": sent,
    "statistics": {},
    "collections": {},
  }
  if is_last:
    params = update_lib.by_path(own.local_params)
    collections = update_lib.by_path(own.collections)
    commit["statistics"] = {p: np.array(params[p]) for p in update.statistics}
    commit["collections"] = {
      p: np.array(collections[p]) for p in update.collections
    }
  own = own._replace(
    grad_accum=_put(accum, remainders),
    received=_place(received, own.received),
    sent=_place(_with(own.sent, fragment, own.local_step), own.sent),
  )
  return _with_agn(state, own), commit


def put_center(update: CenterUpdate, state: S, fragment: int, new: Center) -> S:
  """Returns the state with another center; local parameters stay.

  Args:
    update: The center's update.
    state: The train state of a worker.
    fragment: The number of the fragment.
    new: Its center.
  """
  agn, own = update_lib.find(state)
  state = _put_collections(state, own, new, committed=True)
  state = state.replace(params=_put(state.params, new.params))
  versions = _with(own.versions, fragment, new.version)
  own = own._replace(versions=_place(versions, own.versions))
  if new.slots is not None:
    if agn.outer_tx is None:
      state = state.replace(opt_state=_put(state.opt_state, new.slots))
    else:
      outer = _put(own.outer_opt_state, new.slots)
      own = own._replace(outer_opt_state=outer)
  return _with_agn(state, own)


def pull(update: CenterUpdate, state: S, fragment: int, new: Center) -> S:
  """Returns the state after a commit: it goes on from the center.

  Args:
    update: The center's update.
    state: The train state of a worker.
    fragment: The fragment that was committed.
    new: Its center, whose parameters the local ones are blended with.
  """
  state = put_center(update, state, fragment, new)
  agn, own = update_lib.find(state)
  local = update_lib.by_path(own.local_params)
  weight, blended = agn.transport.blend, {}
  for path, x in new.params.items():
    blended[path] = x
    if weight and path in update.accumulators:
      old = np.asarray(local[path])
      dtype = gradients.accumulator_dtype(old.dtype)
      mixed = weight * old.astype(dtype) + (1 - weight) * x.astype(dtype)
      blended[path] = mixed.astype(old.dtype)
  own = own._replace(local_params=_put(own.local_params, blended))
  if fragment == agn.transport.fragments - 1:
    own = own._replace(commits=own.commits + 1)
  return _put_collections(_with_agn(state, own), own, new, committed=False)


def restart(
  update: CenterUpdate, state: S, centers: list[Center], local_step: int
) -> S:
  """Returns the state of a worker that starts from the center.

  Args:
    update: The center's update.
    state: The train state of a worker.
    centers: The center of each fragment.
    local_step: The local step to go on from. `state.step` and the step counts
      of the local optimizer advance by as many.
  """
  _, own = update_lib.find(state)
  is_new = not int(own.local_step)
  for fragment, new in enumerate(centers):
    state = put_center(update, state, fragment, new)
    _, own = update_lib.find(state)
    state = _put_collections(state, own, new, committed=False)
  agn, own = update_lib.find(state)
  shift = local_step - int(own.local_step)
  slots = own.local_opt_state
  counts = opt_state_lib.counts(slots)
  if is_new and agn.outer_tx is None:
    # A worker that joins late begins with the moments of the center.
    slots = jax.tree.map(_copy, state.opt_state)
  counts = {
    path: _place(np.asarray(x) + shift, x) for path, x in counts.items()
  }
  own = own._replace(
    local_params=jax.tree.map(_copy, state.params),
    local_opt_state=opt_state_lib.with_counts(slots, counts),
    grad_accum=jax.tree.map(_zeros, own.grad_accum),
    received=_zeros(own.received),
    local_step=_place(local_step, own.local_step),
    sent=_place(np.full(own.sent.shape, local_step), own.sent),
  )
  state = state.replace(step=_place(np.asarray(state.step) + shift, state.step))
  return _with_agn(state, own)


def first_center(
  update: CenterUpdate, state: TrainState, fragment: int
) -> Center:
  """Returns the center in a train state, with its slots."""
  agn, own = update_lib.find(state)
  slots = own.outer_opt_state if agn.outer_tx is not None else state.opt_state
  collections = {}
  if fragment == agn.transport.fragments - 1:
    fields = {name: getattr(state, name) for name in own.collections}
    found = update_lib.by_path(fields)
    collections = {p: update_lib.to_host(found[p]) for p in update.collections}
  return Center(
    version=int(own.versions[fragment]),
    params=update.params_of(fragment, state.params),
    collections=collections,
    slots=update.slots_of(fragment, slots),
  )


def _with_agn(state: S, own: AGNState) -> S:
  states = {**state.wrapper_states, update_lib.find(state)[0].name: own}
  return state.replace(wrapper_states=states)


def _put_collections(
  state: S, own: AGNState, new: Center, *, committed: bool
) -> S:
  """Replaces the collections of the state, or of this worker's local steps."""
  if not new.collections:
    return state
  if not committed:
    collections = _put(own.collections, new.collections)
    return _with_agn(state, own._replace(collections=collections))
  fields = {name: getattr(state, name) for name in own.collections}
  return state.replace(**_put(fields, new.collections))


def _put(tree: PyTree, given: Mapping[str, Any]) -> PyTree:
  """Returns a tree with other arrays at some paths, where the old ones lie."""
  return jax.tree_util.tree_map_with_path(
    lambda path, x: (
      _place(given[name], x)
      if (name := trees.path_string(path)) in given
      else x
    ),
    tree,
  )


def _place(value: Any, like: Any) -> jax.Array:
  """Returns a new array, with the dtype and the devices of another one."""
  # Of an array that may move, the new one may as well: steps compile once.
  sharding = like.sharding if like.committed else None
  if trees.is_prng_key(like):
    impl = jax.random.key_impl(like)
    key = jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    return jax.device_put(key, sharding)
  # A copy: the state may be donated, and nobody else may have its memory.
  host = np.asarray(value, like.dtype)
  return jax.device_put(host, sharding, may_alias=False)


def _copy(x: jax.Array) -> jax.Array:
  return _place(update_lib.to_host(x), x)


def _zeros(x: jax.Array) -> jax.Array:
  return _place(np.zeros(x.shape, x.dtype), x)


def _with(x: Any, index: int, value: Any) -> np.ndarray:
  new = np.array(x)
  new[index] = value
  return new
