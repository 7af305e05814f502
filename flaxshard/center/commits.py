"""Commits as they lie in the store, and the updates that they make together.

A commit has `steps` and `examples`, the local step `step`, the `version` of the
center that it started from, and `arrays` by path: encoded gradients, and with
those of the last fragment the values of `CenterUpdate.others`.
"""

from __future__ import annotations

from collections.abc import Iterator
import math
from typing import Any

import numpy as np

from flaxshard.center import encoding
from flaxshard.center import update as update_lib
from flaxshard.center.store import DamagedError
from flaxshard.center.store import unpack
from flaxshard.center.update import Arrays
from flaxshard.center.update import CenterUpdate

_NUMBERS = ("steps", "examples", "step", "version")


def decode(
  update: CenterUpdate, fragment: int, key: str, content: bytes
) -> dict[str, Any]:
  """Returns a commit with decoded arrays.

  Raises:
    DamagedError: It is damaged, or is no commit of this run.
  """
  commit = unpack(key, content)
  try:
    arrays = {
      path: encoding.decode(x).astype(update.layout[path][1])
      for path, x in commit["arrays"].items()
    }
    numbers = {name: float(commit[name]) for name in _NUMBERS}
    is_valid = (
      all(map(math.isfinite, numbers.values()))
      and numbers["steps"] > 0
      and numbers["examples"] > 0
      and all(
        update.fragment_of[path] == fragment
        and x.shape == update.layout[path][0]
        and np.isfinite(x).all()
        for path, x in arrays.items()
      )
      and all(
        path in arrays
        for path in update.others
        if update.fragment_of[path] == fragment
      )
    )
  # Whatever it is: nobody else's training ends by it.
  except Exception as e:
    raise DamagedError(f"{key} is no commit of this run: {e!r}") from e
  if not is_valid:
    raise DamagedError(f"{key} is no commit of this run.")
  return {**numbers, "arrays": arrays}


def combine(
  update: CenterUpdate, commits: list[dict[str, Any]]
) -> Iterator[Arrays]:
  """Yields what each update of the center gets: see `CenterUpdate.apply`.

  Args:
    update: The center's update.
    commits: The commits. Sequential ones are applied one by one, others as one,
      their mean weighted by examples.
  """
  if update.agn.commit == "sequential":
    for commit in commits:
      yield _normalize(update, commit)
    return
  weights = np.array([c["examples"] for c in commits], np.float64)
  weights /= weights.sum()
  factors = weights if update.agn.commit == "mean" else np.ones(len(commits))
  combined: Arrays = {}
  for commit, factor, weight in zip(commits, factors, weights, strict=True):
    for path, x in _normalize(update, commit).items():
      join: Any = np.add
      if path in update.accumulators:
        part = x * x.dtype.type(factor)
      elif update_lib.is_statistic(path):
        part, join = x, np.maximum  # the largest values that were seen
      else:
        part = x.astype(np.float32) * np.float32(weight)
      combined[path] = join(combined[path], part) if path in combined else part
  yield {path: x.astype(update.layout[path][1]) for path, x in combined.items()}


def _normalize(update: CenterUpdate, commit: dict[str, Any]) -> Arrays:
  """Returns the arrays of a commit with the mean gradients of its steps."""
  if update.agn.commit_delta:
    return commit["arrays"]
  return {
    path: x / x.dtype.type(commit["steps"])
    if path in update.accumulators
    else x
    for path, x in commit["arrays"].items()
  }
