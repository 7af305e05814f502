"""The commits of `AGN(transport="host")`, as pure functions of train states.

A worker is a process that trains a TrainState alone. A commit takes what its
local steps have accumulated (`take`). With `commit="mean"` or `"sum"` all
workers reduce their commits key by key, and every worker updates its copy of
the center with the result (`apply_mean`). With `"sequential"` the owner of the
center updates it with one commit after another (`update_center`), and answers
with the new parameters (`replace_params`).

A commit is a dict of float32 arrays. Its keys, in sorted order:

* paths of parameters, such as `Dense_0/kernel`: the accumulated gradients or
  parameter deltas. A complex one has one more dimension, of real and imaginary
  parts. The statistics of Flax's fp8 layers are the newest values;
* paths of collections, such as `batch_stats/BatchNorm_0/mean`: the newest
  values of floating-point arrays, in every commit;
* `@received`: for each leaf of `AGNState.grad_accum`, 1 if it had a gradient in
  the period, else 0;
* `@counts/...`: step counts of the local optimizer, int32, in a sequential
  commit with `share_step_count=True`.

Keys with `@` belong to every part of a sequential commit.

`reductions` says how each key is reduced, and `quantized_keys` which ones may
be sent in fewer bits. The functions may be traced. `fragments` and the keys of
dicts are static.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state import host_center
from flaxshard.state import host_leaves
from flaxshard.state import host_parts
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn_delay
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers.agn import AGN

PyTree = Any
Fragments = tuple[int, ...]
S = TypeVar("S", bound=TrainState)

# One name for all that workers call.
find = host_leaves.find
CenterState = host_center.CenterState
center_of = host_center.center_of
with_center = host_center.with_center
update_center = host_center.update_center
get_part = host_parts.get_part
put_part = host_parts.put_part


def due(agn: AGN, local_step: int) -> Fragments:
  """Returns the fragments to commit after a local step; `()` if none is.

  The local step stays the same in a step that is skipped or that a wrapper
  outside accumulates: the caller commits once for each local step.

  Args:
    agn: The wrapper.
    local_step: `AGNState.local_step`.
  """
  return agn_schedule.due(agn, local_step)


def arriving(agn: AGN, local_step: int) -> Fragments:
  """Returns the fragments whose commit is applied after a local step.

  Args:
    agn: The wrapper.
    local_step: `AGNState.local_step`.

  Returns:
    Those that were due `delay` local steps ago.
  """
  return agn_schedule.arriving(agn, local_step)


def local_step(state: TrainState) -> jax.Array:
  """Returns the number of local steps of this worker, an int32 scalar."""
  return host_leaves.agn_state(state)[1].local_step


# -- A commit.


def parameter_keys(state: TrainState, fragments: Fragments) -> list[str]:
  """Returns the keys of a commit that are accumulators, sorted.

  Args:
    state: The train state.
    fragments: The fragments that are committed.
  """
  agn, own = host_leaves.agn_state(state)
  numbers = agn_schedule.fragments_by_path(own.grad_accum, agn.fragments)
  return sorted(path for path, n in numbers.items() if n in fragments)


def reductions(state: TrainState, fragments: Fragments) -> dict[str, str]:
  """Returns how commits are reduced over the workers: an operation by key.

  Args:
    state: The train state.
    fragments: The fragments that are committed.

  Returns:
    The operation of the argument `commit` for parameters (`"mean"` if it is
    `"sequential"`), `"max"` for statistics and flags, `"mean"` for collections.
  """
  agn, own = host_leaves.agn_state(state)
  op = "mean" if agn.commit == "sequential" else agn.commit
  found = dict.fromkeys(parameter_keys(state, fragments), op)
  found |= dict.fromkeys(host_leaves.statistics(own.local_params), "max")
  found |= dict.fromkeys(host_leaves.floating(own.collections), "mean")
  found[host_center.RECEIVED] = "max"
  return dict(sorted(found.items()))


def quantized_keys(state: TrainState, fragments: Fragments) -> frozenset[str]:
  """Returns the keys that are sent in `commit_dtype`; others are float32.

  As in compiled commits, scalars, complex gradients, statistics and collections
  are not quantized. Without a `commit_dtype` nothing is.

  Args:
    state: The train state.
    fragments: The fragments that are committed.
  """
  agn, own = host_leaves.agn_state(state)
  if agn.commit_dtype is None:
    return frozenset()
  accum = host_leaves.by_path(own.grad_accum)
  return frozenset(
    path
    for path in parameter_keys(state, fragments)
    if jnp.issubdtype(accum[path].dtype, jnp.floating)
    and accum[path].ndim
    and accum[path].size
  )


def take(state: S, fragments: Fragments) -> tuple[S, dict[str, jax.Array]]:
  """Takes a commit out of the accumulators.

  Args:
    state: The train state of a worker.
    fragments: The fragments that are committed.

  Returns:
    The state with zeros in their accumulators, and the commit.
  """
  agn, own = host_leaves.agn_state(state)
  wanted = set(parameter_keys(state, fragments))
  commit = {
    path: host_leaves.to_wire(x)
    for path, x in host_leaves.by_path(own.grad_accum).items()
    if path in wanted
  }
  others = {
    **host_leaves.statistics(own.local_params),
    **host_leaves.floating(own.collections),
  }
  clashes = sorted(commit.keys() & others.keys())
  if clashes:
    raise ValueError(
      f"AGN: with transport='host' no parameter may have the path of a "
      f"collection: {clashes[0]!r}. Rename one of them."
    )
  # Copies: these stay in the state, which may be donated.
  commit |= {
    path: host_leaves.to_wire(jnp.copy(x)) for path, x in others.items()
  }
  if agn.share_step_count and agn.commit == "sequential":
    counts = opt_state_lib.counts(own.local_opt_state)
    commit |= {
      host_center.COUNTS + path: jnp.copy(x) for path, x in counts.items()
    }

  commit[host_center.RECEIVED] = own.received.astype(jnp.float32)

  def clear(tree: PyTree) -> PyTree:
    return host_leaves.map_keys(lambda path, x: jnp.zeros_like(x), tree, wanted)

  stays = [path not in wanted for path in host_leaves.by_path(own.grad_accum)]
  own = own._replace(
    grad_accum=clear(own.grad_accum),
    touched=clear(own.touched),
    received=own.received & jnp.array(stays, bool),
  )
  return host_leaves.with_agn_state(state, own), dict(sorted(commit.items()))


def add_to_accumulators(state: S, remainders: Mapping[str, Any]) -> S:
  """Returns the state with what is left of a commit, for later commits.

  That is what quantization has cut off, or all of a commit that was not made.

  Args:
    state: The train state of a worker.
    remainders: Arrays like those of a commit, by key. Keys that are no
      accumulators are ignored: a later commit has newer values of them.
  """
  _, own = host_leaves.agn_state(state)
  known = host_leaves.by_path(own.grad_accum)
  given = {path: x for path, x in remainders.items() if path in known}
  accum = host_leaves.map_keys(
    lambda path, x: x + host_leaves.from_wire(given[path], x),
    own.grad_accum,
    given,
  )
  touched = host_leaves.map_keys(
    lambda path, rows: rows | host_leaves.nonzero_rows(given[path], rows),
    own.touched,
    given,
  )
  # What has come back must be in a later commit, even without a gradient then.
  received = jnp.stack(
    [jnp.any(jnp.asarray(given.get(path, 0.0)) != 0) for path in known]
  )
  if host_center.RECEIVED in remainders:
    flags = jnp.asarray(remainders[host_center.RECEIVED]) > 0
    received |= flags & jnp.array([path in given for path in known], bool)
  own = own._replace(
    grad_accum=accum, touched=touched, received=own.received | received
  )
  return host_leaves.with_agn_state(state, own)


def apply_mean(state: S, fragments: Fragments, reduced: Mapping[str, Any]) -> S:
  """Updates the center and the local parameters with the reduced commits.

  Args:
    state: The train state of a worker.
    fragments: The fragments that are committed.
    reduced: The commits of all workers, reduced as `reductions` says.

  Returns:
    The state with the new center, and local parameters
    `blend * local + (1 - blend) * center` of these fragments.
  """
  agn, _ = host_leaves.agn_state(state)
  missing = [k for k in reductions(state, fragments) if k not in reduced]
  if missing:
    raise ValueError(f"reduced must have all keys of a commit: {missing[0]!r}.")
  center = update_center(state, center_of(state), fragments, reduced)
  params = host_leaves.by_path(center.params)
  state = replace_params(
    with_center(state, center, restart=False),
    {path: x for path, x in params.items() if path in reduced},
    center.collections,
  )
  _, own = host_leaves.agn_state(state)
  own = own._replace(commits=center.commits)
  if agn.share_step_count:
    # The steps since the commit was sent are ahead of the center.
    counts = opt_state_lib.counts(center.opt_state)
    counts = {path: x + agn.delay for path, x in counts.items()}
    own = own._replace(
      local_opt_state=opt_state_lib.with_counts(own.local_opt_state, counts)
    )
  return trees.unshare_buffers(host_leaves.with_agn_state(state, own))


def replace_params(
  state: S,
  params: Mapping[str, Any],
  collections: Mapping[str, Any] | None = None,
) -> S:
  """Returns the state of a worker with the answer to a sequential commit.

  Args:
    state: The train state of the worker.
    params: New parameters of the center, by path.
    collections: New collections, by path; None keeps those of the worker,
      which the center has taken over.

  Returns:
    The state, with local parameters `blend * local + (1 - blend) * params`, and
    one more commit.
  """
  agn, own = host_leaves.agn_state(state)
  host_leaves.check_keys("params", params, host_leaves.by_path(state.params))

  def replace(tree: PyTree) -> PyTree:
    return host_leaves.map_keys(
      lambda path, old: jnp.asarray(params[path], old.dtype), tree, params
    )

  blended = host_leaves.by_path(
    agn_delay.blend(agn.blend, own.local_params, replace(own.local_params))
  )
  counts = {}
  if agn.share_step_count:
    # What the owner of the center has added to the counts of the commit.
    counts = opt_state_lib.counts(own.local_opt_state)
    counts = {path: x + 1 for path, x in counts.items()}
  own = own._replace(
    local_params=host_leaves.map_keys(
      lambda path, _: blended[path], own.local_params, params
    ),
    local_opt_state=opt_state_lib.with_counts(own.local_opt_state, counts),
    commits=own.commits + 1,
    center_commits=jax.tree.map(lambda x: x + 1, own.center_commits),
  )
  state = host_leaves.with_agn_state(
    state.replace(params=replace(state.params)), own
  )
  if collections is None:
    collections = host_leaves.floating(own.collections)
  return trees.unshare_buffers(host_leaves.with_collections(state, collections))


def is_splittable(state: TrainState) -> bool:
  """Returns whether different owners may update parts of the center.

  They may if the update of a parameter depends on no other parameter. It does
  with clipping by the global norm, or with a `LossScale` inside of AGN, which
  skips a commit that is not finite anywhere.

  Args:
    state: The train state.
  """
  agn, _ = host_leaves.agn_state(state)
  fragments = tuple(range(agn.fragments))
  _, commit = jax.eval_shape(lambda state: take(state, fragments), state)
  return host_parts.is_splittable(state, fragments, commit)
