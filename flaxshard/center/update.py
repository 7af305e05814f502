"""Updates of the center: the optimizer's, on the parameters of a fragment.

The arrays of a center are parameters, with paths as `params/kernel`, and other
collections, as `batch_stats/mean`. An update runs on the CPU of the process
that merges, with arrays of NumPy by path. A fragment has slots of its own, step
counts among them: fragments are committed at different steps.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
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
from flaxshard.core import optimizer_update
from flaxshard.core import trees
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn as agn_lib
from flaxshard.wrappers import agn_store

PyTree = Any
S = TypeVar("S", bound=TrainState)

by_path = train_states.by_path

# The updates of `CenterUpdate.probe`: step counts and gradients of all sizes,
# so that schedules, moments and clipping show.
_PROBES = ((0, 1e-6), (10, -3.0), (1_000, 1e-4), (100_000, 0.1))


class CenterUpdate:
  """The center of a train state, divided into fragments.

  Args:
    state: A train state, or its shapes and dtypes.

  Attributes:
    agn: Its AGN.
    fragment_of: The fragment of each array of the center that changes, by path.
    accumulators: Paths of the parameters whose gradients are committed.
    layout: Shapes and dtypes of the arrays of commits, by path. Beside the
      accumulators these are floating-point arrays of other collections: commits
      have their new values. They belong to the last fragment.

  Raises:
    ValueError: The model has layers of Flax in fp8.
  """

  def __init__(self, state: TrainState):
    self.agn, _ = train_states.find(state)
    # No arrays: they would stay in memory.
    shapes = jax.eval_shape(train_states.parts, state)
    self._params = shapes["center"]["params"]
    if opt_state_lib.optimized_params(self._params) is not self._params:
      raise ValueError(
        "AGN: layers in fp8, whose statistics are no gradients, need "
        "transport='compiled'."
      )
    self._slots = shapes["slots"]
    self._local_tx = state.tx
    self._tx = self.agn.outer_tx or state.tx
    accumulators, local = by_path(shapes["sum"]), by_path(shapes["local"])
    self.accumulators = set(accumulators)
    others = {
      path: x
      for path, x in local.items()
      # The parameters that LoRA freezes are the same everywhere.
      if path.partition("/")[0] not in ("params", lora.FROZEN)
      and jnp.issubdtype(x.dtype, jnp.floating)
    }
    self.layout = accumulators | others
    fragments = self.agn.transport.fragments
    self.fragment_of = agn_store.divide(shapes["sum"], fragments)
    self.fragment_of |= dict.fromkeys(others, fragments - 1)
    owners = opt_state_lib.parameters_of(self._slots, self._params)
    # None: slots that all fragments have, such as step counts.
    self._slot_fragments = {
      name: None
      if owner is None
      else self.fragment_of.get(f"params/{trees.path_string(owner)}", 0)
      for name, owner in zip(by_path(self._slots), owners, strict=True)
    }

  def layout_of(self, fragment: int) -> Arrays:
    """Returns shapes and dtypes of the arrays of a fragment's commits."""
    return {
      path: x
      for path, x in self.layout.items()
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
    given = train_states.parts(state)
    arrays = by_path(given["center"])
    center = {
      path: train_states.to_host(arrays[path])
      for path in self.layout_of(fragment)
    }
    own_slots = {
      name: train_states.to_host(x)
      for name, x in by_path(given["slots"] if slots else ()).items()
      if self._slot_fragments[name] in (None, fragment)
    }
    version = int(given["versions"][fragment])
    return Center(fragment, version, center, own_slots)

  def take(self, state: S, fragment: int) -> tuple[S, dict[str, Any]]:
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
    old = train_states.parts(state)
    sums, local = by_path(old["sum"]), by_path(old["local"])
    step = int(old["local_step"])
    is_sent = np.array([self.fragment_of[path] == fragment for path in sums])
    received = np.asarray(old["received"])
    remainders, sent = {}, {}
    for path, has_gradient in zip(sums, received & is_sent, strict=True):
      if has_gradient:
        total = np.asarray(sums[path])
        if not np.isfinite(total).all():
          raise FloatingPointError(
            f"Worker: the accumulated gradients of {path} have NaN or infinity "
            f"at local step {step}. They are not committed. A LossScale around "
            "AGN skips such steps."
          )
        # No copy: these arrays are in no state any more.
        sent[path] = encoding.encode(total, self.agn.transport.commit_dtype)
        remainders[path] = total - encoding.decode(sent[path])
    for path in self.layout_of(fragment).keys() - self.accumulators:
      sent[path] = np.array(local[path])
    commit = {
      "steps": step - int(old["sent"][fragment]),
      "step": step,
      "version": int(old["versions"][fragment]),
      "arrays": sent,
    }
    state = train_states.with_parts(
      state,
      sum=train_states.replace(old["sum"], remainders),
      received=received & ~is_sent,
      sent=old["sent"].at[fragment].set(step),
    )
    return state, commit

  def pull(self, state: S, new: Center) -> S:
    """Returns the state after a commit: it goes on from the center.

    Args:
      state: The train state of a worker.
      new: The center of the fragment that was committed. Parameters are blended
        with the local ones.
    """
    old = train_states.parts(state)
    own, local = by_path(old["local"]), dict(new.arrays)
    if blend := self.agn.transport.blend:
      for path in self.accumulators & local.keys():
        dtype = gradients.accumulator_dtype(own[path].dtype)
        a, b = (np.asarray(x, dtype) for x in (own[path], local[path]))
        local[path] = blend * a + (1 - blend) * b
    is_last = new.fragment == self.agn.transport.fragments - 1
    state = train_states.put_center(state, new, local)
    return train_states.with_parts(state, commits=old["commits"] + is_last)

  def apply(
    self, center: Arrays, slots: Mapping[str, Any], committed: Arrays
  ) -> tuple[Arrays, Arrays]:
    """Updates a fragment of the center once.

    Args:
      center: Its arrays.
      slots: Its slots.
      committed: Gradients, and the new values of other arrays. A parameter
        without a gradient keeps its value and its slots.

    Returns:
      The new arrays and slots.
    """
    params = {k: x for k, x in center.items() if k.startswith("params")}
    grads = {k: x for k, x in committed.items() if k in params}
    with _on_cpu():
      new = jax.tree.map(np.asarray, self._update(params, slots, grads))
    return {**center, **committed, **new[0]}, new[1]

  # One program for each set of gradients: compiled once in a process.
  @functools.partial(jax.jit, static_argnums=0)
  def _update(
    self, params: Arrays, slots: Arrays, grads: Arrays
  ) -> tuple[Arrays, Arrays]:
    """Updates; arrays that are not given are zeros."""
    full_params = _fill({"params": self._params}, params)["params"]
    new = agn_lib.apply_tx(
      self._tx,
      agn_lib.ModelState(full_params, _fill(self._slots, slots)),
      _gradients(full_params, grads),
    )
    new_params = by_path({"params": new.params})
    new_slots = by_path(new.opt_state)
    return (
      {path: new_params[path] for path in params},
      {name: train_states.key_data(new_slots[name]) for name in slots},
    )

  def probe(self) -> dict[str, float]:
    """Returns how some updates with fixed gradients change fixed parameters.

    Other hyper-parameters of `tx` or `outer_tx` give other numbers.
    """
    found: dict[str, float] = {}
    for name, tx in (("tx", self._local_tx), ("outer_tx", self.agn.outer_tx)):
      if tx is not None and not optimizer_update.objective_of(tx):
        with _on_cpu():
          changes = jax.device_get(jax.jit(self._probe, static_argnums=0)(tx))
        found |= {f"{name}: {k}": float(x) for k, x in changes.items()}
    return found

  def _probe(self, tx: Any) -> Arrays:
    # In float32: bfloat16 would round small changes away.
    old = jax.tree.map(
      lambda p: jnp.full(p.shape, 0.5, gradients.accumulator_dtype(p.dtype)),
      self._params,
    )
    slots = opt_state_lib.init(tx, old)
    new = agn_lib.ModelState(old, slots)
    for count, size in _PROBES:
      counts = dict.fromkeys(opt_state_lib.counts(slots), jnp.int32(count))
      new = new._replace(
        opt_state=opt_state_lib.with_counts(new.opt_state, counts)
      )
      grads = dict.fromkeys(self.accumulators, jnp.float32(size))
      new = agn_lib.apply_tx(tx, new, _gradients(old, grads))
    before, after = by_path({"params": old}), by_path({"params": new.params})
    return {
      path: jnp.mean(jnp.abs(after[path] - before[path]), dtype=jnp.float32)
      for path in self.accumulators
    }


def _on_cpu() -> Any:
  """Computes on the CPU: accelerators train meanwhile."""
  try:
    return jax.default_device(jax.local_devices(backend="cpu")[0])
  except RuntimeError:  # JAX_PLATFORMS has no CPU
    return jax.default_device(jax.local_devices()[0])


def _fill(like: PyTree, given: Mapping[str, Any]) -> PyTree:
  """Returns a tree of given arrays, with zeros for the others."""

  def fill(path: trees.Path, x: Any) -> Any:
    value = given.get(trees.path_string(path))
    if value is None:
      raw = jax.eval_shape(train_states.key_data, x)
      value = jnp.zeros(raw.shape, raw.dtype)
    return jax.random.wrap_key_data(value) if trees.is_prng_key(x) else value

  return jax.tree_util.tree_map_with_path(fill, like)


def _gradients(params: PyTree, given: Mapping[str, Any]) -> PyTree:
  """Returns gradients for all parameters; None where none is given."""

  def gradient_of(path: trees.Path, p: Any) -> Any:
    name = trees.path_string(path)
    return jnp.broadcast_to(given[name], p.shape) if name in given else None

  return jax.tree_util.tree_map_with_path(gradient_of, {"params": params})[
    "params"
  ]
