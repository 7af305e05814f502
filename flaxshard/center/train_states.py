"""Train states of workers: their centers, commits, and new centers in place.

Arrays are named by their paths in the train state: those of the center are
`params/kernel` or, in other collections, `batch_stats/mean`. A worker has local
ones beside them, and sums of gradients.

The center is divided into fragments. A commit of a fragment has `steps` and
`examples`, the `version` of the center that it started from, and `arrays` by
path: encoded gradients, and with those of the last fragment the values of other
collections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center.heads import Arrays
from flaxshard.core import extra_arguments
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn_store
from flaxshard.wrappers.accumulate import Accumulate
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState

PyTree = Any
Commit = dict[str, Any]

# The path of `AGNState`.
_OWN = f"wrapper_states/{AGN.name}"


def find(state: Any) -> tuple[AGN, AGNState]:
  """Returns the AGN with a store of a train state, and its state.

  Raises:
    ValueError: There is none.
  """
  wrappers = getattr(state, "wrappers", ())
  for wrapper in wrappers:
    if isinstance(wrapper, AGN) and wrapper.commits_to_store:
      return wrapper, state.wrapper_states[wrapper.name]
  raise ValueError(
    "Worker: state.wrappers must have an AGN with transport='store', got "
    f"{[w.name for w in wrappers]}."
  )


def batches_per_step(state: TrainState) -> tuple[int, int]:
  """Returns the number of batches in a local step, and in the next one so far.

  They are those of an `Accumulate` around AGN.
  """
  for wrapper in state.wrappers:
    if isinstance(wrapper, Accumulate):
      own = state.wrapper_states[wrapper.name]
      return wrapper.steps, int(own.num_batches)
  return 1, 0


# A state has many paths, and is read several times for each commit.
@functools.lru_cache(maxsize=8)
def _paths(structure: Any) -> list[str]:
  """Returns the path of each leaf of a tree structure."""
  return trees.names(jax.tree.unflatten(structure, range(structure.num_leaves)))


def leaves(tree: PyTree) -> Arrays:
  """Returns the leaves of a train state, or of another tree, by their paths."""
  found, structure = jax.tree.flatten(tree)
  return dict(zip(_paths(structure), found, strict=True))


def map_leaves(fn: Callable[[str, Any], Any], tree: PyTree) -> Any:
  """Returns a tree of `fn(path, leaf)`."""
  found, structure = jax.tree.flatten(tree)
  return jax.tree.unflatten(structure, map(fn, _paths(structure), found))


def _with_leaves(
  state: TrainState, new: Mapping[str, Any], **fields: Any
) -> TrainState:
  """Returns a state with other leaves, which lie where the old ones do.

  Args:
    state: The train state.
    new: Arrays of JAX or NumPy by path.
    **fields: New fields of `AGNState`.
  """
  new = {**new, **{f"{_OWN}/{name}": x for name, x in fields.items()}}
  return map_leaves(
    lambda path, x: x if new.get(path, x) is x else _place(new[path], x), state
  )


def _local_path(path: str) -> str:
  """Returns the path of a worker's own array beside one of the center."""
  if path.split("/")[0] in ("params", "opt_state"):
    return f"{_OWN}/local_{path}"
  return f"{_OWN}/collections/{path}"


def _sum_path(path: str) -> str:
  """Returns the path of the accumulator of a parameter."""
  return f"{_OWN}/grad_accum{path.removeprefix('params')}"


class Layout:
  """The center of a train state, divided into fragments.

  Args:
    state: A train state, or its shapes and dtypes.

  Attributes:
    agn: Its AGN.
    shapes: Shapes and dtypes of the train state.
    sums: Those of the accumulators of the parameters whose gradients are
      committed, by path, in the order of `AGNState.received`.
    fragments: For each fragment, shapes and dtypes of the arrays of its
      commits, by path. Beside the accumulators these are floating-point arrays
      of other collections, in the last fragment: commits have their new values.
    root: The path of the state of the center's optimizer.
    model: Shapes and dtypes of the parameters and of this state, by root.
    slots: For each fragment, the paths of its leaves of this state; step counts
      and the like are in all fragments.

  Raises:
    ValueError: The model has layers of Flax in fp8, or the optimizer of the
      center needs the loss.
  """

  def __init__(self, state: TrainState):
    # No arrays: they would stay in memory.
    self.shapes = jax.eval_shape(lambda x: x, state)
    shapes, structure = jax.tree.flatten(self.shapes)
    self._key = structure, *shapes
    self.agn, own = find(self.shapes)
    params = self.shapes.params
    if opt_state_lib.optimized_params(params) is not params:
      raise ValueError(
        "AGN: layers in fp8, whose statistics are no gradients, need "
        "transport='compiled'."
      )
    center_tx = self.agn.outer_tx or self.shapes.tx
    if used := extra_arguments.objective_of(center_tx):
      raise ValueError(
        "AGN: transport: the center is updated without a loss, and its "
        f"optimizer uses {', '.join(sorted(used))}. Give an outer_tx without."
      )
    self.sums = leaves({"params": own.grad_accum})
    count = self.agn.transport.fragments
    owners = agn_store.divide({"params": own.grad_accum}, count)
    self.fragments: list[Arrays] = [
      {path: x for path, x in self.sums.items() if owners[path] == fragment}
      for fragment in range(count)
    ]
    self.fragments[-1] |= {
      path: x
      for path, x in leaves(own.collections).items()
      if jnp.issubdtype(x.dtype, jnp.floating)
    }
    self.root, slots = "opt_state", self.shapes.opt_state
    if self.agn.outer_tx is not None:
      self.root, slots = f"{_OWN}/outer_opt_state", own.outer_opt_state
    self.model = {"params": params, self.root: slots}
    slot_owners = [
      None if p is None else owners.get(f"params/{trees.path_string(p)}", 0)
      for p in opt_state_lib.parameters_of(slots, params)
    ]
    owned = dict(zip(leaves({self.root: slots}), slot_owners, strict=True))
    self.slots: list[list[str]] = [
      [path for path, owner in owned.items() if owner in (None, fragment)]
      for fragment in range(count)
    ]

  # Equal ones share compiled updates: several workers may be in a process.
  def __eq__(self, other: object) -> bool:
    return isinstance(other, Layout) and self._key == other._key

  def __hash__(self) -> int:
    return hash(self._key)

  def center_of(self, state: TrainState, fragment: int) -> heads.Parts:
    """Returns a fragment of the center in a train state, with its slots."""
    found = leaves(state)
    parts = {"center": self.fragments[fragment], "slots": self.slots[fragment]}
    # Copies: the state may be donated.
    return {
      kind: {p: np.array(trees.key_data(found[p])) for p in paths}
      for kind, paths in parts.items()
    }

  def begin(self, objects: store.Objects, state: TrainState) -> None:
    """Writes the heads that are missing, or older than a checkpoint.

    Raises:
      DamagedError: Workers have begun, and the heads are missing.
    """
    # A worker writes its own object after the heads.
    has_begun = bool(objects.keys("worker/"))
    found = heads.read(objects, has_begun=has_begun)
    new = [
      heads.write(objects, k, version, self.center_of(state, k), {})
      if not found.heads or found.versions[k] < version
      else found.heads[k]
      for k, version in enumerate(find(state)[1].versions.tolist())
    ]
    if new != found.heads:
      heads.swap(objects, found, heads=new)

  def take(self, state: TrainState, fragment: int) -> tuple[TrainState, Commit]:
    """Takes a commit out of the accumulators.

    Args:
      state: The train state of a worker.
      fragment: The fragment that is committed.

    Returns:
      The state with what encoding has cut off in the accumulators; and the
      commit, without `examples`.

    Raises:
      FloatingPointError: What is committed has NaN or infinity.
    """
    _, own = find(state)
    found, step = leaves(state), int(own.local_step)
    received, sent = np.array(own.received), np.array(own.sent)
    due = self.fragments[fragment]
    others = due.keys() - self.sums.keys()
    arrays = {path: np.array(found[_local_path(path)]) for path in others}
    for number, path in enumerate(self.sums):
      if path in due and received[number]:
        # No copy: these arrays are in no state any more.
        arrays[path] = np.asarray(found[_sum_path(path)])
        received[number] = False
    remainders: Arrays = {}
    for path, x in arrays.items():
      if not np.isfinite(x).all():
        raise FloatingPointError(
          f"Worker: {path} in the commit of local step {step} has NaN or "
          "infinity. It is not sent. LossScale around AGN skips such steps."
        )
      if path not in others:
        arrays[path] = encoding.encode(x, self.agn.transport.commit_dtype)
        remainders[_sum_path(path)] = x - encoding.decode(arrays[path])
    commit = {
      "steps": step - int(sent[fragment]),
      "version": int(own.versions[fragment]),
      "arrays": arrays,
    }
    sent[fragment] = step
    return _with_leaves(state, remainders, received=received, sent=sent), commit

  def pull(
    self,
    state: TrainState,
    fragment: int,
    head: heads.Head,
    parts: heads.Parts,
  ) -> TrainState:
    """Returns the state after a commit: it goes on from the center.

    Args:
      state: The train state of a worker.
      fragment: The fragment that was committed.
      head: Its head.
      parts: Its "center", or the "change" from the center of the commit.
        Parameters are blended with the local ones.
    """
    _, own = find(state)
    found, versions = leaves(state), np.array(own.versions)
    center = {path: found[path] for path in self.fragments[fragment]}
    # Else the state has a newer one.
    if versions[fragment] < head.version:
      versions[fragment] = head.version
      change = parts.get("change", {})
      center = parts.get("center") or encoding.add_change(center, change)
    local = {_local_path(path): x for path, x in center.items()}
    if blend := self.agn.transport.blend:
      for path in center.keys() & self.sums.keys():
        both = found[_local_path(path)], center[path]
        mine, common = (gradients.widen(np.asarray(x)) for x in both)
        local[_local_path(path)] = blend * mine + (1 - blend) * common
    commits = own.commits + (fragment == len(self.fragments) - 1)
    return _with_leaves(
      state, {**center, **local}, versions=versions, commits=commits
    )

  def restart(self, state: TrainState, local_step: int) -> TrainState:
    """Returns the state of a worker that starts from its center.

    Args:
      state: The train state of a worker.
      local_step: The local step to go on from. `state.step` and the step counts
        of the local optimizer advance by as many.
    """
    _, own = find(state)
    shift = local_step - int(own.local_step)
    # Other arrays are the same everywhere, or stay those of the worker.
    paths = [path for arrays in self.fragments for path in arrays]
    if self.agn.outer_tx is None and not int(own.local_step):
      # A worker that joins late begins with the moments of the center.
      paths += [path for slots in self.slots for path in slots]
    found = leaves(state)
    new = {_local_path(path): found[path] for path in paths}
    for path, count in opt_state_lib.counts(own.local_opt_state).items():
      new[f"{_OWN}/local_opt_state/{path}"] = np.asarray(count) + shift
    for path, x in self.sums.items():
      new[_sum_path(path)] = np.zeros(x.shape)
    return _with_leaves(
      state,
      {**new, "step": np.asarray(state.step) + shift},
      received=np.zeros(own.received.shape),
      local_step=np.int32(local_step),
      sent=np.full(own.sent.shape, local_step),
    )


def with_center(
  objects: store.Objects, found: heads.Heads, state: TrainState
) -> TrainState:
  """Returns the state with the center that heads name, and its slots."""
  new: Arrays = {}
  for fragment, head in enumerate(found.heads):
    parts = heads.read_parts(objects, fragment, head, "slots", "center")
    if parts is None:  # merged meanwhile
      return with_center(objects, heads.read(objects), state)
    new |= parts["slots"] | parts["center"]
  return _with_leaves(state, new, versions=np.array(found.versions))


def _place(value: Any, like: Any) -> jax.Array:
  """Returns a new array, with the dtype and the devices of another one."""
  # Of an array that may move, the new one may as well: steps compile once.
  sharding = like.sharding if like.committed else None
  if trees.is_prng_key(like):
    data = jnp.asarray(trees.key_data(value))
    return jax.device_put(trees.with_key_data(like, data), sharding)
  # A copy: the state may be donated, and nobody else may have its memory.
  host = np.asarray(value, like.dtype)
  return jax.device_put(host, sharding, may_alias=False)
