"""Train states of workers: which arrays are exchanged, and new ones in place.

Arrays are named by their paths in the train state: those of the center are
`params/kernel` or, in other collections, `batch_stats/mean`. A worker has local
ones beside them, and sums of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
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
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState

PyTree = Any
S = TypeVar("S", bound=TrainState)

# The path of `AGNState`.
OWN = f"wrapper_states/{AGN.name}"


def find(state: Any) -> tuple[AGN, AGNState]:
  """Returns the AGN with a store of a train state, and its state.

  Raises:
    ValueError: There is none.
  """
  wrappers = getattr(state, "wrappers", ())
  for wrapper in wrappers:
    if isinstance(wrapper, AGN) and wrapper.commits_to_store:
      return wrapper, state.wrapper_states[wrapper.name]
  names = [w.name for w in wrappers]
  raise ValueError(
    "Worker: state.wrappers must have an AGN with transport='store', got "
    f"{names}."
  )


# A state has many paths, and is read several times for each commit.
@functools.lru_cache(maxsize=8)
def _paths(structure: Any) -> list[str]:
  """Returns the path of each leaf of a tree structure."""
  tree = jax.tree.unflatten(structure, range(structure.num_leaves))
  found = jax.tree_util.tree_leaves_with_path(tree)
  return [trees.path_string(path) for path, _ in found]


def leaves(tree: PyTree) -> Arrays:
  """Returns the leaves of a train state, or of another tree, by their paths."""
  found, structure = jax.tree.flatten(tree)
  return dict(zip(_paths(structure), found, strict=True))


def with_leaves(state: S, new: Mapping[str, Any]) -> S:
  """Returns a state with other leaves, which lie where the old ones do.

  Args:
    state: The train state.
    new: Arrays of JAX or NumPy by path.
  """
  old, structure = jax.tree.flatten(state)
  placed = [
    x if new.get(path, x) is x else _place(new[path], x)
    for path, x in zip(_paths(structure), old, strict=True)
  ]
  return jax.tree.unflatten(structure, placed)


def local_path(path: str) -> str:
  """Returns the path of a worker's own array beside one of the center."""
  if path.split("/")[0] == "params":
    return f"{OWN}/local_{path}"
  return f"{OWN}/collections/{path}"


def sum_path(path: str) -> str:
  """Returns the path of the accumulator of a parameter."""
  return f"{OWN}/grad_accum{path.removeprefix('params')}"


def own(**fields: Any) -> Arrays:
  """Returns fields of `AGNState` by path."""
  return {f"{OWN}/{name}": x for name, x in fields.items()}


def key_data(x: Any) -> Any:
  """Returns an array; of PRNG keys, as an optimizer may have, their data."""
  return jax.random.key_data(x) if trees.is_prng_key(x) else x


def put_center(
  state: S, new: Center, local: Arrays | None = None, **fields: Any
) -> S:
  """Returns the state with another center.

  Args:
    state: The train state of a worker.
    new: The center of a fragment.
    local: New arrays for the local steps, by their paths in the center; the
      others stay.
    **fields: New fields of `AGNState`.
  """
  versions = np.array(find(state)[1].versions)
  versions[new.fragment] = new.version
  arrays = own(**fields, versions=versions)
  arrays |= {local_path(path): x for path, x in (local or {}).items()}
  return with_leaves(state, {**arrays, **new.arrays, **new.slots})


def with_center(objects: store.Objects, found: heads.Heads, state: S) -> S:
  """Returns the state with the center that heads name, and its slots."""
  for fragment, head in enumerate(found.heads):
    center = heads.read_center(objects, fragment, head, slots=True)
    state = put_center(state, center)
  return state


def restart(state: S, local_step: int) -> S:
  """Returns the state of a worker that starts from its center.

  Args:
    state: The train state of a worker.
    local_step: The local step to go on from. `state.step` and the step counts
      of the local optimizer advance by as many.
  """
  agn, own = find(state)
  # A worker that joins late begins with the moments of the center.
  is_new = agn.outer_tx is None and not int(own.local_step)
  slots = state.opt_state if is_new else own.local_opt_state
  shift = local_step - int(own.local_step)
  counts = opt_state_lib.counts(own.local_opt_state)
  restarted = own._replace(
    local_params=state.params,
    local_opt_state=opt_state_lib.with_counts(
      slots, {path: count + shift for path, count in counts.items()}
    ),
    grad_accum=jax.tree.map(np.zeros_like, own.grad_accum),
    # Commits have no integers.
    collections=jax.tree.map(
      lambda x, new: new if jnp.issubdtype(x.dtype, jnp.floating) else x,
      own.collections,
      {name: getattr(state, name) for name in own.collections},
    ),
    received=jnp.zeros_like(own.received),
    local_step=jnp.int32(local_step),
    sent=np.full_like(own.sent, local_step),
  )
  new = state.replace(
    step=np.asarray(state.step) + shift,
    wrapper_states={**state.wrapper_states, agn.name: restarted},
  )
  return with_leaves(state, leaves(new))


def final_state(url: str, state: S) -> tuple[int, S] | None:
  """Returns the step and the state of the final center of a run that has ended.

  Args:
    url: The center.
    state: A state of its workers.

  Returns:
    None if the run has not ended, or if the state has this center.

  Raises:
    StoreError: The store cannot be read.
  """
  objects = store.Objects(url)
  found = heads.read(objects, has_begun=False)
  versions = find(state)[1].versions.tolist()
  if not found.finished or versions == found.versions:
    return None
  return found.step, with_center(objects, found, state)


def _place(value: Any, like: Any) -> jax.Array:
  """Returns a new array, with the dtype and the devices of another one."""
  # Of an array that may move, the new one may as well: steps compile once.
  sharding = like.sharding if like.committed else None
  value = key_data(value)
  if trees.is_prng_key(like):
    impl = jax.random.key_impl(like)
    key = jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
    return jax.device_put(key, sharding)
  # A copy: the state may be donated, and nobody else may have its memory.
  host = np.asarray(value, like.dtype)
  return jax.device_put(host, sharding, may_alias=False)
