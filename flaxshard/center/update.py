"""Updates of the center: the optimizer's, on the parameters of a fragment.

An update runs on the CPU of the process that merges, with arrays of NumPy by
path. A fragment has slots of its own, step counts among them: fragments are
committed at different steps.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import extra_args
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees
from flaxshard.state import lora
from flaxshard.state.train_state import TrainState
from flaxshard.wrappers import agn_commit
from flaxshard.wrappers import agn_store
from flaxshard.wrappers import base
from flaxshard.wrappers.agn import AGN
from flaxshard.wrappers.agn import AGNState

PyTree = Any
Arrays = dict[str, Any]
Layout = dict[str, tuple[tuple[int, ...], Any]]

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


def by_path(tree: PyTree) -> Arrays:
  """Returns the leaves of a tree by their paths."""
  return {
    trees.path_string(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def to_host(x: Any) -> np.ndarray:
  """Returns an array as one of NumPy; of PRNG keys their data."""
  return np.asarray(jax.random.key_data(x) if trees.is_prng_key(x) else x)


class CenterUpdate:
  """The center of a train state, divided into fragments.

  Args:
    state: A train state, or its shapes and dtypes.

  Attributes:
    agn: Its AGN.
    fragment_of: The fragment of each parameter that commits change, by path.
    statistics: Paths of the statistics of Flax's fp8 layers.
    collections: Paths of the floating-point arrays of other collections. They
      and the statistics belong to the last fragment.
    accumulators: Shape and dtype of the gradients, by path.
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
    last = self.agn.transport.fragments - 1
    self.fragment_of = agn_store.divide(own.grad_accum, last + 1)
    params, collections = by_path(state.params), by_path(own.collections)
    self.statistics = [
      trees.path_string(path)
      for path in trees.paths(state.params)
      if gradients.is_statistic(path)
    ]
    self.fragment_of |= dict.fromkeys(self.statistics, last)
    self.collections = [
      path
      for path, x in collections.items()
      # The parameters that LoRA freezes are the same everywhere.
      if jnp.issubdtype(x.dtype, jnp.floating)
      and path.partition("/")[0] != lora.FROZEN
    ]
    self.accumulators = _describe(by_path(own.grad_accum))
    self._last_arrays = {
      "statistics": _describe({p: params[p] for p in self.statistics}),
      "collections": _describe({p: collections[p] for p in self.collections}),
    }
    self._slot_fragments = self._find_slot_fragments()

  def _find_slot_fragments(self) -> dict[str, int | None]:
    """Returns the fragment of each slot; None for those of all fragments."""
    optimized = opt_state_lib.optimized_params(self._params)
    # Beside the statistics of fp8 layers, parameters have paths of their own.
    prefix = "" if optimized is self._params else "params/"
    names = by_path(self._slots)
    owners = opt_state_lib.parameters_of(self._slots, optimized)
    return {
      name: None
      if owner is None
      else self.fragment_of.get(prefix + trees.path_string(owner), 0)
      for name, owner in zip(names, owners, strict=True)
    }

  def layout(self, fragment: int, kind: str) -> Layout:
    """Returns shape and dtype of the arrays of a commit, by path.

    Args:
      fragment: The number of the fragment.
      kind: `"grads"`, `"statistics"` or `"collections"`.
    """
    if kind == "grads":
      return {
        path: x
        for path, x in self.accumulators.items()
        if self.fragment_of[path] == fragment
      }
    is_last = fragment == self.agn.transport.fragments - 1
    return self._last_arrays[kind] if is_last else {}

  def params_of(self, fragment: int, params: PyTree) -> Arrays:
    """Returns the parameters of a fragment as arrays of NumPy, by path."""
    return {
      path: to_host(x)
      for path, x in by_path(params).items()
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
    self, fragment: int, params: Arrays, slots: Arrays, grads: Arrays
  ) -> tuple[Arrays, Arrays]:
    """Updates the center of a fragment once.

    Args:
      fragment: Its number.
      params: Its parameters.
      slots: Its slots.
      grads: Gradients; a parameter without one keeps its value and its slots.
        The newest values of statistics.

    Returns:
      The new parameters and slots.
    """
    with _on_cpu():
      new = self._update(params, slots, grads)
      return jax.tree.map(np.asarray, new)

  # One program for each set of gradients: compiled once in a process.
  @functools.partial(jax.jit, static_argnums=0)
  def _update(
    self, params: Arrays, slots: Arrays, grads: Arrays
  ) -> tuple[Arrays, Arrays]:
    """Updates; arrays that are not given are zeros."""
    full_params = _fill(self._params, params)
    grads_tree = jax.tree_util.tree_map_with_path(
      functools.partial(_gradient_of, grads=grads), full_params
    )
    new = agn_commit.apply_tx(
      self._tx,
      agn_commit.ModelState(full_params, _fill(self._slots, slots)),
      grads_tree,
    )
    new_params, new_slots = by_path(new.params), by_path(new.opt_state)
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
      if tx is not None and not extra_args.required(tx):
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
    new = agn_commit.ModelState(old, slots)
    for count, size in _PROBES:
      counts = dict.fromkeys(opt_state_lib.counts(slots), jnp.int32(count))
      new = new._replace(
        opt_state=opt_state_lib.with_counts(new.opt_state, counts)
      )
      grads = dict.fromkeys(self.accumulators, jnp.float32(size))
      grads_tree = jax.tree_util.tree_map_with_path(
        functools.partial(_gradient_of, grads=grads), old
      )
      new = agn_commit.apply_tx(tx, new, grads_tree)
    return {
      path: jnp.mean(jnp.abs(n - o), dtype=jnp.float32)
      for (path, n), o in zip(
        by_path(new.params).items(), jax.tree.leaves(old), strict=True
      )
      if path in self.accumulators
    }


def _on_cpu() -> Any:
  """Computes on the CPU: accelerators train meanwhile."""
  try:
    return jax.default_device(jax.local_devices(backend="cpu")[0])
  except RuntimeError:  # JAX_PLATFORMS has no CPU
    return jax.default_device(jax.local_devices()[0])


def _describe(arrays: Arrays) -> Layout:
  return {p: (tuple(x.shape), np.dtype(x.dtype)) for p, x in arrays.items()}


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


def _gradient_of(path: trees.Path, p: Any, grads: Mapping[str, Any]) -> Any:
  given = grads.get(trees.path_string(path))
  if gradients.is_statistic(path):
    # Flax takes the gradient of a statistic as its new value.
    return p if given is None else jnp.asarray(given, p.dtype)
  return None if given is None else jnp.broadcast_to(given, p.shape)


def _key_data(x: Any) -> Any:
  return jax.random.key_data(x) if trees.is_prng_key(x) else x
