"""Updates of the center: the optimizer's, on the parameters of a fragment.

The arrays of a center are parameters, with paths as `params/kernel`, and other
collections, as `batch_stats/mean`. An update runs on the CPU of the process
that merges, with arrays of NumPy by path. A fragment has slots of its own, step
counts among them: fragments are committed at different steps.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import optimizer_update
from flaxshard.core import trees
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn as agn_lib
from flaxshard.wrappers import agn_store
from flaxshard.wrappers import base
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState

PyTree = Any
Arrays = dict[str, Any]

# The updates of `CenterUpdate.probe`: step counts and gradients of all sizes,
# so that schedules, moments and clipping show.
_PROBES = ((0, 1e-6), (10, -3.0), (1_000, 1e-4), (100_000, 0.1))


def find(state: Any) -> tuple[AGN, AGNState]:
  """Returns the AGN with a store of a train state, and its state.

  Raises:
    ValueError: There is none.
  """
  for wrapper in state.wrappers:
    if isinstance(wrapper, AGN) and wrapper.commits_to_store:
      return wrapper, state.wrapper_states[wrapper.name]
  names = [base.name_of(w) for w in state.wrappers]
  raise ValueError(
    "Worker: state.wrappers must have an AGN with transport='store', got "
    f"{names}."
  )


def center_of(state: TrainState, own: AGNState) -> PyTree:
  """Returns the arrays of the center that a state has."""
  return {"params": state.params} | {
    name: getattr(state, name) for name in own.collections
  }


def local_of(own: AGNState) -> PyTree:
  """Returns the arrays of the local steps of a worker."""
  return {"params": own.local_params} | own.collections


def by_path(tree: PyTree) -> Arrays:
  """Returns the leaves of a tree by their paths."""
  return {
    trees.path_string(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def is_statistic(path: str) -> bool:
  """Returns whether the array of a path is a statistic of an fp8 layer."""
  return path.startswith(f"params/{gradients.OVERWRITE_WITH_GRADIENT}/")


def to_host(x: Any) -> np.ndarray:
  """Returns an array as one of NumPy; of PRNG keys their data."""
  return np.asarray(jax.random.key_data(x) if trees.is_prng_key(x) else x)


class CenterUpdate:
  """The center of a train state, divided into fragments.

  Args:
    state: A train state, or its shapes and dtypes.

  Attributes:
    agn: Its AGN.
    fragment_of: The fragment of each array of the center that changes, by path.
    accumulators: Paths of the parameters whose gradients are committed.
    others: Paths of what commits have the new values of: the statistics of
      Flax's fp8 layers, and floating-point arrays of other collections. They
      belong to the last fragment.
    layout: Shape and dtype of the arrays of commits, by path.
  """

  def __init__(self, state: TrainState):
    self.agn, own = find(state)
    # No arrays: they would stay in memory.
    shapes = functools.partial(jax.eval_shape, lambda x: x)
    self._params = shapes(state.params)
    self._tx, self._slots = state.tx, shapes(state.opt_state)
    self._local_tx = state.tx
    if self.agn.outer_tx is not None:
      self._tx, self._slots = self.agn.outer_tx, shapes(own.outer_opt_state)
    fragments = self.agn.transport.fragments
    accumulators, local = {"params": own.grad_accum}, by_path(local_of(own))
    self.accumulators = set(by_path(accumulators))
    self.others = [
      path
      for path, x in local.items()
      if is_statistic(path)
      # The parameters that LoRA freezes are the same everywhere.
      or (
        path.partition("/")[0] not in ("params", lora.FROZEN)
        and jnp.issubdtype(x.dtype, jnp.floating)
      )
    ]
    self.fragment_of = agn_store.divide(accumulators, fragments)
    self.fragment_of |= dict.fromkeys(self.others, fragments - 1)
    arrays = by_path(accumulators) | {path: local[path] for path in self.others}
    self.layout = {k: (x.shape, np.dtype(x.dtype)) for k, x in arrays.items()}
    self._slot_fragments = self._find_slot_fragments()

  def _find_slot_fragments(self) -> dict[str, int | None]:
    """Returns the fragment of each slot; None for those of all fragments."""
    optimized = opt_state_lib.optimized_params(self._params)
    # Beside the statistics of fp8 layers, parameters have paths of their own.
    prefix = "params/" if optimized is self._params else "params/params/"
    names = by_path(self._slots)
    owners = opt_state_lib.parameters_of(self._slots, optimized)
    return {
      name: None
      if owner is None
      else self.fragment_of.get(prefix + trees.path_string(owner), 0)
      for name, owner in zip(names, owners, strict=True)
    }

  def arrays_of(self, fragment: int, tree: PyTree) -> Arrays:
    """Returns the arrays of a fragment of the center as those of NumPy."""
    return {
      path: to_host(x)
      for path, x in by_path(tree).items()
      if self.fragment_of.get(path) == fragment
    }

  def slots_of(self, fragment: int, slots: PyTree) -> Arrays:
    """Returns the slots of a fragment as arrays of NumPy, by path."""
    return {
      name: to_host(x)
      for name, x in by_path(slots).items()
      if self._slot_fragments[name] in (None, fragment)
    }

  def apply(
    self, center: Arrays, slots: Arrays, committed: Arrays
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
      {name: _key_data(new_slots[name]) for name in slots},
    )

  def probe(self) -> dict[str, float]:
    """Returns how some updates with fixed gradients change fixed parameters.

    Other hyper-parameters of `tx` or `outer_tx` give other numbers.
    """
    found: dict[str, float] = {}
    for name, tx in (("tx", self._local_tx), ("outer_tx", self.agn.outer_tx)):
      if tx is not None and not optimizer_update.required_arguments(tx):
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
    slots = opt_state_lib.init(tx, opt_state_lib.optimized_params(old))
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
    if not trees.is_prng_key(x):
      return jnp.zeros(x.shape, x.dtype) if value is None else value
    if value is None:
      return jax.random.split(jax.random.key(0), x.shape)
    return jax.random.wrap_key_data(value)

  return jax.tree_util.tree_map_with_path(fill, like)


def _gradients(params: PyTree, given: Mapping[str, Any]) -> PyTree:
  """Returns gradients for all parameters; None where none is given."""

  def gradient_of(path: trees.Path, p: Any) -> Any:
    name = trees.path_string(path)
    if is_statistic(name):
      # Flax takes the gradient of a statistic as its new value.
      return jnp.asarray(given.get(name, p), p.dtype)
    return jnp.broadcast_to(given[name], p.shape) if name in given else None

  return jax.tree_util.tree_map_with_path(gradient_of, {"params": params})[
    "params"
  ]


def _key_data(x: Any) -> Any:
  return jax.random.key_data(x) if trees.is_prng_key(x) else x
