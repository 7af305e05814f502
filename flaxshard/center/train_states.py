"""The parts of a worker's train state that commits and centers are about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center.heads import Arrays
from flaxshard.center.heads import Center
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import base
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState

PyTree = Any
S = TypeVar("S", bound=TrainState)

# Fields of `AGNState` that are parts as they are.
_FIELDS = (
  *("local_opt_state", "local_step", "commits"),
  *("received", "sent", "versions"),
)


def find(state: Any) -> tuple[AGN, AGNState]:
  """Returns the AGN with a store of a train state, and its state.

  Raises:
    ValueError: There is none.
  """
  wrappers = getattr(state, "wrappers", ())
  for wrapper in wrappers:
    if isinstance(wrapper, AGN) and wrapper.commits_to_store:
      return wrapper, state.wrapper_states[wrapper.name]
  names = [base.name_of(w) for w in wrappers]
  raise ValueError(
    "Worker: state.wrappers must have an AGN with transport='store', got "
    f"{names}."
  )


def parts(state: TrainState) -> dict[str, PyTree]:
  """Returns the parts of a train state.

  Returns:
    `"center"` and its `"slots"`; `"local"`, the arrays of the local steps;
    `"sum"`, the accumulators; and fields of `AGNState`. Paths in the center, in
    `"local"` and in `"sum"` begin with `params` or the name of another
    collection, such as `batch_stats`.
  """
  agn, own = find(state)
  others = {name: getattr(state, name) for name in own.collections}
  return {
    "center": {"params": state.params, **others},
    "slots": state.opt_state if agn.outer_tx is None else own.outer_opt_state,
    "local": {"params": own.local_params, **own.collections},
    "sum": {"params": own.grad_accum},
    **{name: getattr(own, name) for name in _FIELDS},
  }


def with_parts(state: S, **new: PyTree) -> S:
  """Returns a state with other parts, whose arrays lie where the old ones do.

  Args:
    state: The train state.
    **new: Parts, with arrays of JAX or NumPy.
  """
  agn, own = find(state)
  old = parts(state)
  new = jax.tree.map(
    lambda x, old: old if x is old else _place(x, old), {**old, **new}, old
  )
  fields = {name: new[name] for name in _FIELDS}
  if agn.outer_tx is None:
    state = state.replace(opt_state=new["slots"])
  else:
    fields["outer_opt_state"] = new["slots"]
  own = own._replace(
    local_params=new["local"].pop("params"),
    collections=new["local"],
    grad_accum=new["sum"]["params"],
    **fields,
  )
  wrapper_states = {**state.wrapper_states, agn.name: own}
  return state.replace(**new["center"], wrapper_states=wrapper_states)


def by_path(tree: PyTree) -> Arrays:
  """Returns the leaves of a tree by their paths."""
  return {
    trees.path_string(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def replace(tree: PyTree, arrays: Mapping[str, Any]) -> PyTree:
  """Returns a tree with other arrays at some paths."""
  if not arrays:
    return tree
  return jax.tree_util.tree_map_with_path(
    lambda path, x: arrays.get(trees.path_string(path), x), tree
  )


def key_data(x: Any) -> Any:
  """Returns an array; of PRNG keys their data."""
  return jax.random.key_data(x) if trees.is_prng_key(x) else x


def to_host(x: Any) -> np.ndarray:
  """Returns an array as one of NumPy; of PRNG keys their data."""
  return np.asarray(key_data(x))


def put_center(state: S, new: Center, local: Arrays | None = None) -> S:
  """Returns the state with another center.

  Args:
    state: The train state of a worker.
    new: The center of a fragment.
    local: New arrays of the local steps; the others stay.
  """
  old = parts(state)
  return with_parts(
    state,
    center=replace(old["center"], new.arrays),
    slots=replace(old["slots"], new.slots),
    local=replace(old["local"], local or {}),
    versions=old["versions"].at[new.fragment].set(new.version),
  )


def restart(state: S, centers: Sequence[Center], local_step: int) -> S:
  """Returns the state of a worker that starts from the center.

  Args:
    state: The train state of a worker.
    centers: The center of each fragment.
    local_step: The local step to go on from. `state.step` and the step counts
      of the local optimizer advance by as many.
  """
  agn, own = find(state)
  for new in centers:
    state = put_center(state, new, new.arrays)
  # A worker that joins late begins with the moments of the center.
  is_new = agn.outer_tx is None and not int(own.local_step)
  slots = state.opt_state if is_new else own.local_opt_state
  shift = local_step - int(own.local_step)
  counts = {
    path: np.asarray(count) + shift
    for path, count in opt_state_lib.counts(own.local_opt_state).items()
  }
  local = {"params": jax.tree.map(to_host, state.params)}
  old = parts(state)
  state = with_parts(
    state,
    local=replace(old["local"], by_path(local)),
    local_opt_state=replace(jax.tree.map(to_host, slots), counts),
    sum=jax.tree.map(np.zeros_like, old["sum"]),
    received=np.zeros_like(own.received),
    local_step=local_step,
    sent=np.full_like(own.sent, local_step),
  )
  return state.replace(step=_place(np.asarray(state.step) + shift, state.step))


def final_state(url: str, state: S) -> tuple[int, S] | None:
  """Returns the step and the state of the final center of a run that has ended.

  Args:
    url: The center.
    state: A state of its workers.

  Returns:
    None if the run has not ended, or if the state has this center.

  Raises:
    StoreError: The store cannot be read, or has no center.
  """
  objects = store.Objects(url)
  versions = find(state)[1].versions.tolist()
  found = heads.read_every(objects, len(versions))
  if not heads.have_ended(found) or versions == [x.version for x in found]:
    return None
  for fragment, head in enumerate(found):
    _, center = heads.read_center(objects, fragment, head, slots=True)
    state = put_center(state, center)
  return max(head.step for head in found), state


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
