"""The center of a train state in fragments, and what a worker commits of it.

A commit has `steps` and `examples`, the local step `step`, the `version` of the
center that it started from, and `arrays` by path, see `Layout.arrays`: encoded
gradients, and with those of the last fragment the values of others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.center import encoding
from flaxshard.center import train_states
from flaxshard.center.heads import Arrays
from flaxshard.center.heads import Center
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn_store
from flaxshard.wrappers.agn import ModelState

S = TypeVar("S", bound=TrainState)
Commit = dict[str, Any]


class Layout:
  """The center of a train state, divided into fragments.

  Args:
    state: A train state, or its shapes and dtypes.

  Attributes:
    agn: Its AGN.
    shapes: Shapes and dtypes of the train state.
    accumulators: Those of the parameters whose gradients are committed, by
      path, in the order of `AGNState.received`.
    arrays: Those of the arrays of commits, by path. Beside the accumulators
      these are floating-point arrays of other collections: commits have their
      new values. They belong to the last fragment.
    fragment_of: The fragment of each of them.
    model: Shapes and dtypes of the parameters, and of the slots of the center's
      optimizer.
    slots: The fragment of each of these slots, by path, in tree order; None for
      those that all fragments have, such as step counts.

  Raises:
    ValueError: The model has layers of Flax in fp8.
  """

  def __init__(self, state: TrainState):
    # No arrays: they would stay in memory.
    self.shapes = jax.eval_shape(lambda x: x, state)
    self.agn, own = train_states.find(self.shapes)
    params = self.shapes.params
    if gradients.optimized_params(params) is not params:
      raise ValueError(
        "AGN: layers in fp8, whose statistics are no gradients, need "
        "transport='compiled'."
      )
    self.accumulators = train_states.leaves({"params": own.grad_accum})
    others = {
      path: x
      for path, x in train_states.leaves(own.collections).items()
      # The parameters that LoRA freezes are the same everywhere.
      if path.split("/")[0] != lora.FROZEN
      and jnp.issubdtype(x.dtype, jnp.floating)
    }
    self.arrays = self.accumulators | others
    fragments = self.agn.transport.fragments
    self.fragment_of = agn_store.divide({"params": own.grad_accum}, fragments)
    self.fragment_of |= dict.fromkeys(others, fragments - 1)
    root, slots = "opt_state", self.shapes.opt_state
    if self.agn.outer_tx is not None:
      root = f"{train_states.OWN}/outer_opt_state"
      slots = own.outer_opt_state
    self.model = ModelState(params, slots)
    paths = train_states.leaves({root: slots})
    owners = opt_state_lib.parameters_of(slots, params)
    self.slots = {
      path: None
      if owner is None
      else self.fragment_of.get(f"params/{trees.path_string(owner)}", 0)
      for path, owner in zip(paths, owners, strict=True)
    }

  def arrays_of(self, fragment: int) -> Arrays:
    """Returns shapes and dtypes of the arrays of a fragment's commits."""
    return {
      path: x
      for path, x in self.arrays.items()
      if self.fragment_of[path] == fragment
    }

  def center_of(
    self, state: TrainState, fragment: int, *, slots: bool = True
  ) -> Center:
    """Returns a fragment of the center in a train state.

    Args:
      state: The train state.
      fragment: The number of the fragment.
      slots: Whether with its slots.
    """
    found = train_states.leaves(state)
    version = int(train_states.find(state)[1].versions[fragment])

    def copy(paths: Iterable[str]) -> Arrays:
      # The state may be donated.
      return {p: np.array(train_states.key_data(found[p])) for p in paths}

    own_slots = [
      path
      for path, owner in self.slots.items()
      if slots and owner in (None, fragment)
    ]
    arrays = copy(self.arrays_of(fragment))
    return Center(fragment, version, arrays, copy(own_slots))

  def take(self, state: S, fragment: int) -> tuple[S, Commit]:
    """Takes a commit out of the accumulators.

    Args:
      state: The train state of a worker.
      fragment: The fragment that is committed.

    Returns:
      The state with what encoding has cut off in the accumulators; and the
      commit, without `examples`.

    Raises:
      FloatingPointError: An accumulator has NaN or infinity.
    """
    _, own = train_states.find(state)
    found, step = train_states.leaves(state), int(own.local_step)
    received, sent = np.array(own.received), np.array(own.sent)
    arrays: Arrays = {}
    remainders: Arrays = {}
    for number, path in enumerate(self.accumulators):
      if self.fragment_of[path] == fragment and received[number]:
        total = np.asarray(found[train_states.sum_path(path)])
        if not np.isfinite(total).all():
          raise FloatingPointError(
            f"Worker: the accumulated gradients of {path} have NaN or infinity "
            f"at local step {step}. They are not committed. A LossScale around "
            "AGN skips such steps."
          )
        # No copy: these arrays are in no state any more.
        arrays[path] = encoding.encode(total, self.agn.transport.commit_dtype)
        remainders[path] = total - encoding.decode(arrays[path])
        received[number] = False
    for path in self.arrays_of(fragment).keys() - self.accumulators.keys():
      arrays[path] = np.array(found[train_states.local_path(path)])
    commit = {
      "steps": step - int(sent[fragment]),
      "step": step,
      "version": int(own.versions[fragment]),
      "arrays": arrays,
    }
    sent[fragment] = step
    new = {train_states.sum_path(path): x for path, x in remainders.items()}
    new |= train_states.own(received=received, sent=sent)
    return train_states.with_leaves(state, new), commit

  def pull(self, state: S, new: Center) -> S:
    """Returns the state after a commit: it goes on from the center.

    Args:
      state: The train state of a worker.
      new: The center of the fragment that was committed. Parameters are blended
        with the local ones.
    """
    local = dict(new.arrays)
    if blend := self.agn.transport.blend:
      found = train_states.leaves(state)
      for path in local.keys() & self.accumulators.keys():
        own = found[train_states.local_path(path)]
        dtype = gradients.accumulator_dtype(own.dtype)
        a, b = (np.asarray(x, dtype) for x in (own, local[path]))
        local[path] = blend * a + (1 - blend) * b
    is_last = new.fragment == self.agn.transport.fragments - 1
    commits = train_states.find(state)[1].commits + is_last
    return train_states.put_center(state, new, local, commits=commits)
