"""The compiled part of AGN whose commits are made on the host, between steps.

With `AGN(transport="host")` each process is a JAX world of its own. Within the
world AGN is like any wrapper with a replicated state: gradients are averaged
over the replicas of the world before it gets them. The compiled step takes
local steps and adds their gradients up. `flaxshard.Worker` commits, by the
functions of `flaxshard.state.host_commits`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp

from flaxshard.core import extra_args
from flaxshard.core import gradients
from flaxshard.core import trees
from flaxshard.replicas import context as replica_context
from flaxshard.sparse import row_accumulator
from flaxshard.wrappers import agn_commit
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers import base

if TYPE_CHECKING:
  from flaxshard.wrappers.agn import AGN
  from flaxshard.wrappers.agn import AGNState

PyTree = Any


def check_order(
  outer: Sequence[base.Wrapper], inner: Sequence[base.Wrapper]
) -> None:
  """Raises a ValueError if a wrapper may not stand beside AGN.

  Args:
    outer: The wrappers around an AGN with `transport="host"`.
    inner: The wrappers inside of it.
  """
  for wrapper in (*outer, *inner):
    note = base.adapt(wrapper).divergence()
    if note is not None:
      raise ValueError(
        "AGN(transport='host') needs equal replicas within a process: "
        f"{base.name_of(wrapper)!r} lets them differ. {note}"
      )
  for wrapper in inner:
    name, adapted = base.name_of(wrapper), base.adapt(wrapper)
    if adapted.reduces_gradients or adapted.defers_reduction:
      raise ValueError(
        f"AGN(transport='host') must be inside of {name!r}: it accumulates "
        "gradients that are averaged over the replicas of this process "
        f"already. Put {name!r} first."
      )


def check_state(agn: AGN, params: PyTree, tx: Any) -> None:
  """Raises if commits on the host cannot be made with an optimizer.

  Args:
    agn: The wrapper.
    params: The parameters of a train state.
    tx: Its optimizer.

  Raises:
    ValueError: The optimizer of the center needs the loss, which the host does
      not have, or a parameter has 64 bits.
  """
  needed = sorted(extra_args.required(tx))
  if agn.outer_tx is None and needed:
    raise ValueError(
      f"AGN: tx needs {', '.join(needed)} in every update, which a commit with "
      "transport='host' does not have: it is made between steps. Give another "
      "optimizer for the center, such as outer_tx=optax.sgd(1.0) with "
      "commit_delta=True, or use transport='compiled'."
    )
  config: Any = jax.config  # its options are not declared to type checkers
  if not config.jax_enable_x64:
    return  # NumPy arrays of 64 bits become arrays of 32
  for path, p in jax.tree_util.tree_leaves_with_path(params):
    dtype = trees.dtype_of(p)
    wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits > 32
    if gradients.has_gradient(path, p) and wide:
      raise ValueError(
        "AGN: transport='host' sends commits as float32, but params["
        f"{trees.path_string(path)}] is {dtype}. Use transport='compiled'."
      )


def init_received(accum: PyTree) -> jax.Array:
  """Returns the first `AGNState.received`: no leaf has had a gradient.

  Args:
    accum: `AGNState.grad_accum`.
  """
  return jnp.zeros(len(jax.tree.leaves(accum)), bool)


def init_center_commits(agn: AGN) -> PyTree:
  """Returns the first `AGNState.center_commits`.

  Args:
    agn: The wrapper.
  """
  if agn.commits_on_host and agn.commit == "sequential":
    return jnp.zeros((), jnp.int32)
  return ()


def adjust_restored(state: AGNState) -> AGNState:
  """Returns a state with what its checkpoint may lack.

  Accumulators that are not zero have received gradients, and a center has at
  least the commits of this worker.

  Args:
    state: A restored state.
  """
  find = jax.jit(
    lambda flags, leaves: flags | jnp.stack([jnp.any(x != 0) for x in leaves]),
    out_shardings=state.received.sharding,
  )
  received = find(state.received, jax.tree.leaves(state.grad_accum))
  if isinstance(state.center_commits, jax.Array):
    state = state._replace(
      center_commits=jnp.maximum(state.center_commits, state.commits)
    )
  return state._replace(received=received)


def apply(
  agn: AGN, state: AGNState, target: base.Target, grads: PyTree, next: base.Next
) -> tuple[base.Target, AGNState]:
  """Takes a local step and adds its gradients to the accumulators.

  Args:
    agn: The wrapper.
    state: Its state, the same on all replicas.
    target: The center, and the collections of this process.
    grads: The gradients, the same on all replicas.
    next: Applies gradients with the wrappers inside and the optimizer.

  Returns:
    The center, which stays, with the new collections; and the new state.
  """
  grads = gradients.deduplicate(grads)
  new = next(
    target._replace(params=state.local_params, opt_state=state.local_opt_state),
    grads,
  )
  # A wrapper inside, such as LossScale, may have skipped the step.
  applied = new.step != target.step
  added = grads
  if agn.commit_delta:
    added = agn_commit.param_delta(
      state.local_params, new.params, grads, state.touched
    )
  accum, touched = row_accumulator.add(
    state.grad_accum, state.touched, added, applied
  )
  # Static in one step, but steps of a period may differ in it.
  treedef: Any = jax.tree.structure(state.local_params)
  has_gradient = jnp.array(
    [
      g is not None
      for g, total in zip(
        treedef.flatten_up_to(grads),
        treedef.flatten_up_to(state.grad_accum),
        strict=True,
      )
      if total is not None
    ],
    bool,
  )
  collections = state.collections
  if replica_context.get_replica_context() is None:
    # Without `Strategy.run` collections are not swapped: the fields of the
    # train state are those of this process, as in `AGNState`.
    collections = collections | {
      name: x for name, x in new.collections.items() if name in collections
    }
  return (
    new._replace(params=target.params, opt_state=target.opt_state),
    state._replace(
      local_params=new.params,
      local_opt_state=new.opt_state,
      grad_accum=accum,
      local_step=state.local_step + applied,
      collections=collections,
      touched=touched,
      received=state.received | (has_gradient & applied),
    ),
  )


def pending(agn: AGN, state: AGNState) -> str | None:
  """Returns how many local steps the center lacks, if any, as a sentence."""
  steps, period = int(state.local_step), agn.communication_period
  commits = [state.commits, *jax.tree.leaves(state.center_commits)]
  if steps >= period and not any(int(x) for x in commits):
    return (
      f"AGN: none of the {steps} local steps of this process are in params. "
      "With transport='host' they are committed by flaxshard.Worker: call "
      "state = worker.commit(state) after each step."
    )
  uncommitted = agn_schedule.uncommitted_steps(agn, steps)
  if not any(uncommitted):
    return None
  if min(uncommitted) == max(uncommitted):
    which = f"the last {uncommitted[0]} local steps of this process are"
  else:
    which = (
      f"of fragments 0 to {agn.fragments - 1} the last "
      f"{', '.join(map(str, uncommitted))} local steps of this process are"
    )
  return (
    f"AGN: {which} not in params. They are committed after "
    f"communication_period={period} applied steps."
  )
