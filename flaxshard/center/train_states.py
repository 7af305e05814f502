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
    fragment: The number of the fragment.
    version: Its number.
    arrays: The arrays by path.
    slots: The optimizer's slots by path, if they were read.
    remainders: With the slots: what encoding has cut off, by path.
  """

  fragment: int
  version: int
  arrays: Arrays
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
    commit, without `examples`.

  Raises:
    FloatingPointError: An accumulator has NaN or infinity.
  """
  _, own = update_lib.find(state)
  accum = {"params": own.grad_accum}
  received = np.asarray(own.received).copy()
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
  local = update_lib.by_path(update_lib.local_of(own))
  for path in update.others:
    if update.fragment_of[path] == fragment:
      sent[path] = np.array(local[path])
  commit = {
    "steps": int(own.local_step) - int(own.sent[fragment]),
    "step": int(own.local_step),
    "version": int(own.versions[fragment]),
    "arrays": sent,
  }
  own = own._replace(
    grad_accum=_put(accum, remainders)["params"],
    received=_place(received, own.received),
    sent=_place(_with(own.sent, fragment, own.local_step), own.sent),
  )
  return _with_agn(state, own), commit


def put_center(state: S, new: Center) -> S:
  """Returns the state with another center; what is local stays.

  Args:
    state: The train state of a worker.
    new: The center of a fragment.
  """
  agn, own = update_lib.find(state)
  state = state.replace(**_put(update_lib.center_of(state, own), new.arrays))
  versions = _with(own.versions, new.fragment, new.version)
  own = own._replace(versions=_place(versions, own.versions))
  if new.slots is not None:
    if agn.outer_tx is None:
      state = state.replace(opt_state=_put(state.opt_state, new.slots))
    else:
      outer = _put(own.outer_opt_state, new.slots)
      own = own._replace(outer_opt_state=outer)
  return _with_agn(state, own)


def pull(update: CenterUpdate, state: S, new: Center) -> S:
  """Returns the state after a commit: it goes on from the center.

  Args:
    update: The center's update.
    state: The train state of a worker.
    new: The center of the fragment that was committed. Parameters are blended
      with the local ones.
  """
  state = put_center(state, new)
  agn, own = update_lib.find(state)
  local = update_lib.by_path(update_lib.local_of(own))
  weight, arrays = agn.transport.blend, dict(new.arrays)
  for path, x in new.arrays.items():
    if weight and path in update.accumulators:
      old = np.asarray(local[path])
      dtype = gradients.accumulator_dtype(old.dtype)
      mixed = weight * old.astype(dtype) + (1 - weight) * x.astype(dtype)
      arrays[path] = mixed.astype(old.dtype)
  own = _put_local(own, arrays)
  if new.fragment == agn.transport.fragments - 1:
    own = own._replace(commits=own.commits + 1)
  return _with_agn(state, own)


def restart(state: S, centers: list[Center], local_step: int) -> S:
  """Returns the state of a worker that starts from the center.

  Args:
    state: The train state of a worker.
    centers: The center of each fragment.
    local_step: The local step to go on from. `state.step` and the step counts
      of the local optimizer advance by as many.
  """
  agn, own = update_lib.find(state)
  is_new = not int(own.local_step)
  for new in centers:
    state = put_center(state, new)
    own = _put_local(update_lib.find(state)[1], new.arrays)
    state = _with_agn(state, own)
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
  return Center(
    fragment,
    int(own.versions[fragment]),
    update.arrays_of(fragment, update_lib.center_of(state, own)),
    update.slots_of(fragment, slots),
  )


def _with_agn(state: S, own: AGNState) -> S:
  states = {**state.wrapper_states, update_lib.find(state)[0].name: own}
  return state.replace(wrapper_states=states)


def _put_local(own: AGNState, arrays: Arrays) -> AGNState:
  """Replaces arrays of the local steps."""
  local = _put(update_lib.local_of(own), arrays)
  return own._replace(local_params=local.pop("params"), collections=local)


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
