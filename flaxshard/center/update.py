"""Updates of the center: commits become the next version of a fragment.

An update is the optimizer's. It runs on the CPU of the process that merges,
with arrays of NumPy by path. A fragment has slots of its own, step counts among
them: fragments are committed at different steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import train_states
from flaxshard.center.heads import Arrays
from flaxshard.center.train_states import Commit
from flaxshard.center.train_states import Layout
from flaxshard.core import gradients
from flaxshard.core import opt_state as opt_state_lib
from flaxshard.core import trees

_NUMBERS = ("steps", "examples", "version")


def decode(layout: Layout, fragment: int, key: str, content: bytes) -> Commit:
  """Returns a commit with decoded arrays, gradients as the mean of its steps.

  Raises:
    DamagedError: It is damaged, or is no commit of this run.
  """
  wanted, sums = layout.fragments[fragment], layout.sums
  try:
    commit = encoding.unpack(key, content)
    numbers = {name: float(commit[name]) for name in _NUMBERS}
    arrays = {
      path: encoding.decode(x).astype(wanted[path].dtype)
      for path, x in commit["arrays"].items()
    }
    if not (
      min(numbers["steps"], numbers["examples"]) > 0
      and np.isfinite([*numbers.values()]).all()
      and wanted.keys() - sums.keys() <= arrays.keys()
      and all(x.shape == wanted[path].shape for path, x in arrays.items())
      and all(np.isfinite(x).all() for x in arrays.values())
    ):
      raise ValueError("a number, a shape or an array is wrong")
  # Whatever it is: nobody else's training ends by it.
  except Exception as e:
    raise encoding.DamagedError(f"{key} is no commit of this run: {e!r}") from e
  if not layout.agn.commit_delta:
    for path in sums.keys() & arrays.keys():
      arrays[path] = arrays[path] / arrays[path].dtype.type(numbers["steps"])
  return {**numbers, "arrays": arrays}


def merge(
  layout: Layout, parts: heads.Parts, commits: Sequence[Commit]
) -> heads.Parts:
  """Returns the next version of a fragment.

  Args:
    layout: The fragments of the center.
    parts: Its arrays by kind: center and slots.
    commits: Decoded commits. Sequential ones are applied one by one, others
      as one, their mean weighted by examples.
  """
  center, slots = parts["center"], parts["slots"]
  # Of parameters that were encoded, the slots have the exact values.
  exact = {**center, **slots}
  with _on_cpu():
    for committed in _combine(layout, commits):
      grads = {p: x for p, x in committed.items() if p in layout.sums}
      updated = jax.tree.map(np.asarray, _update(layout, exact, grads))
      exact = {**exact, **committed, **updated}
  new_center = {p: np.asarray(exact[p], x.dtype) for p, x in center.items()}
  new_slots = {path: exact[path] for path in slots}
  dtype = layout.agn.transport.commit_dtype
  if dtype is None:
    return {"center": new_center, "slots": new_slots}
  # Center and workers apply what is encoded, so that they stay equal.
  wide = {
    p: gradients.widen(exact[p]) for p in center.keys() & layout.sums.keys()
  }
  change = new_center | {
    path: encoding.encode(x - gradients.widen(center[path]), dtype)
    for path, x in wide.items()
  }
  return {
    "center": encoding.add_change(center, change),
    "slots": new_slots | wide,
    "change": change,
  }


def _combine(layout: Layout, commits: Sequence[Commit]) -> Iterator[Arrays]:
  """Yields the gradients and the new values of each update of the center."""
  if layout.agn.commit == "sequential":
    yield from (commit["arrays"] for commit in commits)
    return
  weights = np.array([c["examples"] for c in commits], np.float64)
  weights /= weights.sum()
  factors = weights if layout.agn.commit == "mean" else np.ones(len(commits))
  combined: Arrays = {}
  for commit, factor, weight in zip(commits, factors, weights, strict=True):
    for path, x in commit["arrays"].items():
      wide = gradients.widen(x)
      part = wide * wide.dtype.type(factor if path in layout.sums else weight)
      combined[path] = combined[path] + part if path in combined else part
  yield combined


# One program for each set of gradients: compiled once in a process.
@functools.partial(jax.jit, static_argnums=0)
def _update(layout: Layout, center: Arrays, grads: Arrays) -> Arrays:
  """Updates parameters and slots of a fragment of the center once.

  Args:
    layout: The fragments of the center.
    center: Its arrays and slots; those that are not given are zeros.
    grads: Gradients. A parameter without one keeps its value and its slots.
  """
  full = train_states.map_leaves(
    lambda path, x: _leaf(center.get(path), x), layout.model
  )
  all_grads = train_states.map_leaves(
    lambda path, _: grads.get(path), {"params": layout.model["params"]}
  )
  params, opt_state = opt_state_lib.update(
    layout.agn.outer_tx or layout.shapes.tx,
    full["params"],
    full[layout.root],
    all_grads["params"],
  )
  found = train_states.leaves({"params": params, layout.root: opt_state})
  return {p: trees.key_data(x) for p, x in found.items() if p in center}


def _leaf(value: Any, like: Any) -> Any:
  """Returns an array that is given, else zeros; PRNG keys from their data."""
  zeros = jnp.zeros(like.shape, like.dtype)
  return zeros if value is None else trees.with_key_data(zeros, value)


def _on_cpu() -> Any:
  """Computes on the CPU: accelerators train meanwhile."""
  try:
    return jax.default_device(jax.local_devices(backend="cpu")[0])
  except RuntimeError:  # JAX_PLATFORMS has no CPU
    return jax.default_device(jax.local_devices()[0])
