"""Commits whose results replace the local parameters some steps later.

The center is updated at once. The local parameters of a fragment are replaced
`delay` local steps later. `AGNState.sent` is then a dict:

- `arrives`, int32 `[fragments]`: the local step at which the last commit of
  each fragment arrives. With sequential commits it is `arrives_with_params`.
- `params`: with sequential commits, per replica, the parameters that arrive. By
  mean or sum they are the center's, which do not change in the meantime.
- `collections`: the collections of these commits, `[fragments, ...]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib

PyTree = Any
P = jax.sharding.PartitionSpec


def init(agn: Any, params: PyTree) -> PyTree:
  """Returns the first `AGNState.sent`: nothing is on its way.

  Args:
    agn: An `AGN` wrapper.
    params: The parameters.
  """
  if not agn.delay:
    return ()
  sent = {_arrives(agn): jnp.zeros(agn.fragments, jnp.int32)}
  if agn.commit == "sequential":
    sent["params"] = params
  return sent


def init_collections(
  agn: Any, sent: PyTree, collections: dict[str, PyTree]
) -> PyTree:
  """Returns `sent` with room for collections.

  Args:
    agn: An `AGN` wrapper.
    sent: The result of `init`.
    collections: The collections by name.
  """
  if not agn.delay or not jax.tree.leaves(collections):
    return sent
  stacked = jax.tree.map(
    lambda x: (
      jnp.stack([jnp.asarray(x)] * agn.fragments) if _is_sent(x) else None
    ),
    collections,
  )
  return {**sent, "collections": stacked}


def partition_specs(sent: PyTree) -> PyTree:
  """Returns the specs of `sent`: parameters are per replica."""
  specs = jax.tree.map(lambda _: P(), sent)
  if "params" in sent:
    specs["params"] = jax.tree.map(
      lambda _: P(mesh_lib.REPLICA), sent["params"]
    )
  return specs


def arrival_steps(agn: Any, sent: PyTree) -> jax.Array:
  """Returns the local step at which each fragment's last commit arrives.

  Args:
    agn: An `AGN` wrapper with a delay.
    sent: `AGNState.sent`.

  Returns:
    int32 `[fragments]`; 0 if there was none.
  """
  return sent[_arrives(agn)]


def send(
  agn: Any,
  state: Any,
  params: PyTree,
  fragments: Sequence[int],
  local_step: jax.Array,
) -> Any:
  """Sends the result of a commit to the replicas.

  Args:
    agn: An `AGN` wrapper.
    state: The `agn_fragments.CommitState` after the commit.
    params: The parameters that are to replace this replica's.
    fragments: The fragments that were committed.
    local_step: The number of local steps.

  Returns:
    The state, in which the result has replaced what is local, or is on its way.
  """
  committed = {name: state.committed[name] for name in state.collections}
  if not agn.delay:
    blended = blend(agn.blend, state.local.params, params)
    return state._replace(
      local=state.local._replace(params=blended), collections=committed
    )
  sent, name = dict(state.sent), _arrives(agn)
  index = jnp.array(fragments)
  sent[name] = sent[name].at[index].set(local_step + agn.delay)
  if "params" in sent:
    sent["params"] = params
  if "collections" in sent:
    rooms = {key: sent["collections"][key] for key in committed}
    rooms = jax.tree.map(
      lambda x, room: None if room is None else room.at[fragments[0]].set(x),
      committed,
      rooms,
    )
    sent["collections"] = {**sent["collections"], **rooms}
  # Counters and keys are sent as they are: only floats take time.
  collections = jax.tree.map(
    lambda x, new: x if _is_sent(x) else new, state.collections, committed
  )
  return state._replace(sent=sent, collections=collections)


def receive(agn: Any, state: Any, fragments: Sequence[int]) -> Any:
  """Replaces what is local by the result of a commit that arrives.

  Args:
    agn: An `AGN` wrapper with a delay.
    state: An `agn_fragments.CommitState`.
    fragments: The fragments that arrive.
  """
  params = state.sent.get("params", state.center.params)
  collections = state.collections
  if "collections" in state.sent:
    rooms = {name: state.sent["collections"][name] for name in collections}
    collections = jax.tree.map(
      lambda x, room: x if room is None else room[fragments[0]],
      collections,
      rooms,
    )
  blended = blend(agn.blend, state.local.params, params)
  return state._replace(
    local=state.local._replace(params=blended), collections=collections
  )


def blend(weight: float, old: PyTree, new: PyTree) -> PyTree:
  """Returns `weight * old + (1 - weight) * new`, in the dtypes of `old`.

  Args:
    weight: The weight of the old parameters, a Python number.
    old: The local parameters.
    new: The parameters that replace them. Flax's statistics and integers
      replace them whole.
  """
  if not weight:
    return new

  def blend_leaf(path: trees.Path, o: jax.Array, n: jax.Array) -> jax.Array:
    if gradients.is_statistic(path) or not jnp.issubdtype(o.dtype, jnp.inexact):
      return n
    dtype = gradients.accumulator_dtype(o.dtype)
    mixed = weight * o.astype(dtype) + (1 - weight) * n.astype(dtype)
    return mixed.astype(o.dtype)

  return jax.tree_util.tree_map_with_path(blend_leaf, old, new)


def _arrives(agn: Any) -> str:
  """Returns the key of the arrival steps.

  A checkpoint of a run with another kind of commits has no such key, so that
  its commits are not received as what they are not.
  """
  return "arrives_with_params" if agn.commit == "sequential" else "arrives"


def _is_sent(x: Any) -> bool:
  return jnp.issubdtype(trees.dtype_of(x), jnp.inexact)
