"""Commits in the store, their exchange, and the update that they make together.

A commit has `steps` and `examples`, the local step `step`, the `version` of the
center that it started from, and `arrays` by path, see `CenterUpdate.layout`:
encoded gradients, and with those of the last fragment the values of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
import dataclasses
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center.heads import Arrays
from flaxshard.center.heads import Center
from flaxshard.center.heads import Head
from flaxshard.center.update import CenterUpdate
from flaxshard.core import gradients

# The pause between two looks at the head that a commit is to come into, as a
# multiple of what a look takes.
_PAUSE_LOOKS = 0.5

# Pauses in seconds between attempts while the store cannot be reached.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0

_NUMBERS = ("steps", "examples", "step", "version")


class Stored(NamedTuple):
  """A commit in the store: its key, the start of its worker, its step."""

  key: str
  name: str
  step: int

  @property
  def worker(self) -> str:
    """The number of the worker."""
    return self.name.partition("-")[0]


def key_of(fragment: int, name: str, step: int) -> str:
  """Returns the key of a commit.

  Args:
    fragment: The number of the fragment.
    name: The start of the worker, `worker-start`.
    step: The local step.
  """
  return f"commit/{fragment}/{name}/{step:09d}"


def find(objects: store.Objects, prefix: str = "") -> list[Stored]:
  """Returns the commits in the store.

  Args:
    objects: The store.
    prefix: How their keys go on after `commit/`.
  """
  keys = [key.split("/") for key in objects.list(f"commit/{prefix}")]
  return [
    Stored("/".join(parts), parts[2], int(parts[3]))
    for parts in keys
    if len(parts) == 4 and parts[3].isdigit()
  ]


@dataclasses.dataclass
class Exchange:
  """The exchange of a commit for the center that it comes into, in a thread.

  Args:
    objects: The store.
    fragment: The number of the fragment.
    name: The start of the worker, `worker-start`.
    commit: The commit.
    base: See `heads.read_center`.
    on_written: Called when the commit is in the store.
    closed: An event that ends the thread.
    is_late: Whether it has missed the deadline: nobody waits for it.

  Attributes:
    written: The result is there once the commit is in the store.
    result: The head and the center that it has come into.
  """

  objects: store.Objects
  fragment: int
  name: str
  commit: dict[str, Any]
  base: Center | None
  on_written: Callable[[], None]
  closed: threading.Event
  is_late: bool = False

  def __post_init__(self) -> None:
    self.written: futures.Future[None] = futures.Future()
    self.result: futures.Future[tuple[Head, Center]] = futures.Future()
    self._start = time.monotonic()
    # Not a pool, whose threads a program waits for at its end.
    threading.Thread(target=self._run, daemon=True).start()

  def metrics(self) -> tuple[float, int, int]:
    """Returns seconds, versions in between, and workers of the result."""
    head, center = self.result.result()
    versions = center.version - self.commit["version"] - 1
    return time.monotonic() - self._start, max(versions, 0), head.workers

  def _run(self) -> None:
    """Looks for the result until it is there, also while the store fails."""
    pause, failed_pause = 0.0, _FIRST_PAUSE
    while not self.result.done() and not self.closed.wait(pause):
      start = time.monotonic()
      try:
        self._look()
        pause = store.pause_after(start, _PAUSE_LOOKS)
      except store.StoreError:
        pause = failed_pause
        failed_pause = min(2 * failed_pause, _LONGEST_PAUSE)
      except BaseException as e:
        self.result.set_exception(e)

  def _look(self) -> None:
    """Writes the commit, or looks for its result."""
    step = self.commit["step"]
    if not self.written.done():
      key = key_of(self.fragment, self.name, step)
      self.objects.write_all({key: store.pack(self.commit)})
      self.written.set_result(None)
      self.on_written()
    head, _ = heads.read(self.objects, self.fragment)
    if head and (head.finished or head.taken.get(self.name, 0) >= step):
      found = heads.read_center(
        self.objects, self.fragment, head, base=self.base
      )
      self.result.set_result(found)


def decode(
  update: CenterUpdate, fragment: int, key: str, content: bytes
) -> dict[str, Any]:
  """Returns a commit with decoded arrays, gradients as the mean of its steps.

  Raises:
    DamagedError: It is damaged, or is no commit of this run.
  """
  commit = store.unpack(key, content)
  layout = update.layout_of(fragment)
  try:
    numbers = {name: float(commit[name]) for name in _NUMBERS}
    arrays = {
      path: encoding.decode(x).astype(layout[path].dtype)
      for path, x in commit["arrays"].items()
    }
    is_valid = (
      np.isfinite([*numbers.values()]).all()
      and min(numbers["steps"], numbers["examples"]) > 0
      and layout.keys() - update.accumulators <= arrays.keys()
      and all(
        x.shape == layout[path].shape and np.isfinite(x).all()
        for path, x in arrays.items()
      )
    )
  # Whatever it is: nobody else's training ends by it.
  except Exception as e:
    raise store.DamagedError(f"{key} is no commit of this run: {e!r}") from e
  if not is_valid:
    raise store.DamagedError(f"{key} is no commit of this run.")
  if not update.agn.commit_delta:
    for path in update.accumulators & arrays.keys():
      arrays[path] = arrays[path] / arrays[path].dtype.type(numbers["steps"])
  return {**numbers, "arrays": arrays}


def merge(
  update: CenterUpdate, center: Center, commits: list[dict[str, Any]]
) -> tuple[Center, Arrays]:
  """Returns the next version of a center.

  Args:
    update: The center's update.
    center: The center with its slots.
    commits: Decoded commits. Sequential ones are applied one by one, others as
      one, their mean weighted by examples.

  Returns:
    The new center; and the change as `heads.add_change` takes it, `{}` without
    `commit_dtype`.
  """
  exact, slots = dict(center.arrays), center.slots
  for path, x in center.remainders.items():
    exact[path] = exact[path] + x
  for committed in _combine(update, commits):
    exact, slots = update.apply(exact, slots, committed)
  new = Center(center.fragment, center.version + 1, exact, slots)
  dtype = update.agn.transport.commit_dtype
  if dtype is None:
    return new, {}
  # Center and workers apply what is encoded, so that they stay equal.
  change = {
    path: {"by": encoding.encode(_difference(exact[path], x), dtype)}
    if path in update.accumulators and x.dtype.kind in "fV"
    else {"to": exact[path]}
    for path, x in center.arrays.items()
  }
  arrays = heads.add_change(center.arrays, change)
  remainders = {
    path: _difference(exact[path], x)
    for path, x in arrays.items()
    if "by" in change[path]
  }
  return new._replace(arrays=arrays, remainders=remainders), change


def _difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  wide = gradients.accumulator_dtype(b.dtype)
  return a.astype(wide) - b.astype(wide)


def _combine(
  update: CenterUpdate, commits: list[dict[str, Any]]
) -> Iterator[Arrays]:
  """Yields what each update of the center gets: see `CenterUpdate.apply`."""
  if update.agn.commit == "sequential":
    yield from (commit["arrays"] for commit in commits)
    return
  weights = np.array([c["examples"] for c in commits], np.float64)
  weights /= weights.sum()
  factors = weights if update.agn.commit == "mean" else np.ones(len(commits))
  combined: Arrays = {}
  for commit, factor, weight in zip(commits, factors, weights, strict=True):
    for path, x in commit["arrays"].items():
      if path in update.accumulators:
        part = x * x.dtype.type(factor)
      else:
        part = x.astype(np.float32) * np.float32(weight)
      combined[path] = combined[path] + part if path in combined else part
  layout = update.layout
  yield {path: x.astype(layout[path].dtype) for path, x in combined.items()}
