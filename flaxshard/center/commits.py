"""Commits as they lie in the store, and the gradients that they make together.

A commit has `steps` and `examples`, the local step `step`, the `version` of the
center that it started from, and arrays by path: `grads`, encoded, and of the
last fragment `statistics` and `collections`.
"""

from __future__ import annotations

from collections.abc import Iterator
import math
from typing import Any

import numpy as np

from flaxshard.center import encoding
from flaxshard.center.store import DamagedError
from flaxshard.center.store import unpack
from flaxshard.center.update import Arrays
from flaxshard.center.update import CenterUpdate

_NUMBERS = ("steps", "examples", "step", "version")


def decode(
  update: CenterUpdate, fragment: int, key: str, content: bytes
) -> dict[str, Any]:
  """Returns a commit with decoded gradients.

  Raises:
    DamagedError: It is damaged, or is no commit of this run.
  """
  commit = unpack(key, content)
  try:
    found = {name: commit[name] for name in ("statistics", "collections")}
    known = update.layout(fragment, "grads")
    found["grads"] = {
      path: encoding.decode(x).astype(known[path][1])
      for path, x in commit["grads"].items()
    }
    numbers = {name: float(commit[name]) for name in _NUMBERS}
    is_valid = all(map(math.isfinite, numbers.values())) and (
      numbers["steps"] > 0 and numbers["examples"] > 0
    )
    for kind, arrays in found.items():
      known = update.layout(fragment, kind)
      is_valid &= kind == "grads" or arrays.keys() == known.keys()
      is_valid &= all(
        (x.shape, x.dtype) == known[path] and np.isfinite(x).all()
        for path, x in arrays.items()
      )
  # Whatever it is: nobody else's training ends by it.
  except Exception as e:
    raise DamagedError(f"{key} is no commit of this run: {e!r}") from e
  if not is_valid:
    raise DamagedError(f"{key} is no commit of this run.")
  return {**numbers, **found}


def combine(
  update: CenterUpdate, commits: list[dict[str, Any]]
) -> Iterator[tuple[Arrays, Arrays]]:
  """Yields the gradients and the collections of each update of the center.

  Args:
    update: The center's update.
    commits: The commits. Sequential ones are applied one by one, others as one,
      their mean weighted by examples.
  """
  if update.agn.commit == "sequential":
    for commit in commits:
      yield _normalize(update, commit), commit["collections"]
    return
  if not commits:
    return
  weights = np.array([c["examples"] for c in commits], np.float64)
  weights /= weights.sum()
  factors = weights if update.agn.commit == "mean" else np.ones(len(commits))
  grads: Arrays = {}
  collections: Arrays = {}
  for commit, factor, weight in zip(commits, factors, weights, strict=True):
    for path, x in _normalize(update, commit).items():
      if path in update.statistics:
        # The largest values that were seen.
        grads[path] = np.maximum(grads[path] if path in grads else x, x)
      else:
        part = x * x.dtype.type(factor)
        grads[path] = grads[path] + part if path in grads else part
    for path, x in commit["collections"].items():
      part = x.astype(np.float32) * np.float32(weight)
      collections[path] = collections.get(path, np.float32(0)) + part
  first = commits[0]["collections"]
  yield (
    grads,
    {path: x.astype(first[path].dtype) for path, x in collections.items()},
  )


def _normalize(update: CenterUpdate, commit: dict[str, Any]) -> Arrays:
  """Returns the mean gradients of the steps of a commit, or its delta."""
  grads = commit["grads"]
  if not update.agn.commit_delta:
    steps = commit["steps"]
    grads = {path: x / x.dtype.type(steps) for path, x in grads.items()}
  return {**grads, **commit["statistics"]}
