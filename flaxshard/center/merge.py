"""Merging: commits become a new version of the center by one swap of a head.

Who merges reads the head, the center, its slots and the commits that are not in
it, computes, writes the results under unique names, and swaps the head. Who
loses the race deletes what it wrote. So each commit is in the center exactly
once, whoever ends between any two lines, and two that merge at the same time
are harmless.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from flaxshard.center import commits as commits_lib
from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center.heads import Head
from flaxshard.center.members import Members
from flaxshard.center.store import DamagedError
from flaxshard.center.store import JOIN_SECONDS
from flaxshard.center.store import Objects
from flaxshard.center.store import pause_after
from flaxshard.center.store import StoreError
from flaxshard.center.train_states import Center
from flaxshard.center.update import CenterUpdate
from flaxshard.core import gradients

_log = logging.getLogger("flaxshard")

# The pause between two looks for commits, as a multiple of what a look takes.
_PAUSE_LOOKS = 4.0

# Seconds that an older version stays in the store.
_KEPT_SECONDS = 2.0


class _Found(NamedTuple):
  """A commit in the store: its key, the start of its worker, its step."""

  key: str
  name: str
  step: int

  @property
  def worker(self) -> str:
    return self.name.partition("-")[0]


class Merger:
  """Merges the commits of the fragments that are this process's to merge.

  Args:
    objects: The store.
    update: The center's update.
    members: The workers.
  """

  def __init__(self, objects: Objects, update: CenterUpdate, members: Members):
    self._objects = objects
    self._update = update
    self._members = members
    self._store = update.agn.transport
    # By fragment: since when commits wait for the others, and in which version.
    self._waits: dict[int, tuple[int, float]] = {}
    # Keys of older versions that this process has replaced, and when.
    self._old: list[tuple[float, str]] = []
    self._lock = threading.Lock()
    self._wake = threading.Event()
    self._closed = threading.Event()
    self.error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> None:
    """Begins to merge in a thread."""
    self._thread.start()

  def close(self) -> None:
    """Ends the thread."""
    self._closed.set()
    self._wake.set()
    if self._thread.ident is not None:
      self._thread.join(JOIN_SECONDS)

  def wake(self) -> None:
    """Looks for commits now."""
    self._wake.set()

  def _run(self) -> None:
    try:
      with contextlib.suppress(StoreError):  # the store has warned
        for fragment in range(self._store.fragments):
          self.sweep(fragment)
      while not self._closed.is_set():
        start = time.monotonic()
        try:
          merged = [
            self.merge(fragment)
            for fragment in range(self._store.fragments)
            if self._members.merges(fragment)
          ]
        except StoreError:
          merged = []  # the store has warned
        pause = 0.0 if any(merged) else pause_after(start, _PAUSE_LOOKS)
        if self._wake.wait(pause):
          self._wake.clear()
    except BaseException as e:
      self.error = e

  def merge(self, fragment: int, *, last: bool = False) -> bool:
    """Merges the commits of a fragment, if enough have come.

    Args:
      fragment: Its number.
      last: Whether nobody else will commit: whatever there is, is merged.

    Returns:
      Whether there is a new version.

    Raises:
      StoreError: The store cannot be reached.
      DamagedError: The center is damaged.
    """
    with self._lock:
      found = self._list(fragment)
      if not found:
        self._waits.pop(fragment, None)
        return False
      head, generation = heads.read(self._objects, fragment)
      if head is None:
        return False
      old = [c.key for c in found if c.step <= head.taken.get(c.name, 0)]
      if old:
        self._objects.delete(old)
      new = [c for c in found if c.step > head.taken.get(c.name, 0)]
      if self._update.agn.commit != "sequential":
        new = self._choose(fragment, head, new, last)
      if not new or head.finished:
        return False
      return self._merge(fragment, head, generation, new)

  def finish(self) -> None:
    """Makes the newest center the final one, after whatever is left."""
    for fragment in range(self._store.fragments):
      while True:
        if self.merge(fragment, last=True):
          continue
        head, generation = heads.read(self._objects, fragment)
        if head is None or head.finished:
          break
        if any(
          c.step > head.taken.get(c.name, 0) for c in self._list(fragment)
        ):
          continue  # another one has merged meanwhile
        final = dataclasses.replace(head, finished=True)
        if heads.swap(self._objects, fragment, final, generation):
          break
      self.sweep(fragment)

  def sweep(self, fragment: int) -> None:
    """Deletes what mergers have left behind that ended before their swap."""
    head, _ = heads.read(self._objects, fragment)
    if head is None:
      return
    named = {head.center, head.slots, head.change}
    for kind in ("center", "slots", "change"):
      keys = self._objects.list(f"{kind}/{fragment}/")
      self._objects.delete(
        key
        for key in keys
        # A newer one is being written.
        if key not in named and heads.version_of(key) <= head.version
      )

  def _list(self, fragment: int) -> list[_Found]:
    """Returns the commits of a fragment in the store."""
    found = []
    for key in self._objects.list(f"commit/{fragment}/"):
      parts = key.split("/")
      if len(parts) == 4 and parts[3].isdigit():
        found.append(_Found(key, parts[2], int(parts[3])))
    return found

  def _choose(
    self, fragment: int, head: Head, found: list[_Found], last: bool
  ) -> list[_Found]:
    """Returns the commits of one update by mean or sum, if they are enough."""
    chosen: dict[str, _Found] = {}
    for commit in sorted(found, key=lambda c: c.step):
      chosen.setdefault(commit.worker, commit)
    if not chosen:
      return []
    now = time.monotonic()
    version, since = self._waits.get(fragment, (-1, now))
    if version != head.version:
      since = now
    self._waits[fragment] = head.version, since
    # A worker that seems to have ended is not waited for.
    over = self._members.over(self._members.patience)
    done = self._members.in_phase("done")
    is_whole = self._members.names <= over | done | chosen.keys()
    count = len(chosen.keys() | done)
    if last or (
      count >= self._store.quorum
      and (is_whole or now - since >= self._store.grace)
    ):
      return list(chosen.values())
    return []

  def _merge(
    self, fragment: int, head: Head, generation: bytes, found: list[_Found]
  ) -> bool:
    """Computes a new version and swaps the head; returns whether it did."""
    commits = self._read_commits(fragment, found)
    newest, center = heads.read_center(
      self._objects, fragment, head, slots=True
    )
    if commits is None or newest.version != head.version:
      return False  # swapped meanwhile
    # In the order of their steps.
    taken = head.taken | {c.name: c.step for c, _ in commits}
    good = [commit for _, commit in commits if commit is not None]
    # The oldest first.
    good.sort(key=lambda commit: commit["version"])
    if not good:
      # Not to be read again.
      new = dataclasses.replace(head, taken=taken)
      return heads.swap(self._objects, fragment, new, generation)
    new_center, change = self._compute(center, good)
    if not heads.publish(
      self._objects,
      new_center,
      generation,
      change=change,
      taken=taken,
      workers=len(good),
    ):
      return False
    now = time.monotonic()
    self._old += [
      (now, key) for key in (head.center, head.slots, head.change) if key
    ]
    # Somebody far away may be about to read them.
    swept = [key for since, key in self._old if now - since > _KEPT_SECONDS]
    self._old = [(t, key) for t, key in self._old if key not in swept]
    self._objects.delete([*swept, *(c.key for c, _ in commits)])
    return True

  def _compute(
    self, center: Center, commits: list[dict[str, Any]]
  ) -> tuple[Center, dict[str, Any]]:
    """Returns the new center, and the encoded change if it is wanted."""
    slots, cut_off = center.slots or {}, center.remainders or {}
    exact = {
      path: x + cut_off[path] if path in cut_off else x
      for path, x in center.arrays.items()
    }
    for committed in commits_lib.combine(self._update, commits):
      exact, slots = self._update.apply(exact, slots, committed)
    new = Center(center.fragment, center.version + 1, exact, slots)
    dtype = self._store.commit_dtype
    if dtype is None:
      return new, {}

    def difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
      wide = gradients.accumulator_dtype(b.dtype)
      return a.astype(wide) - b.astype(wide)

    change = {
      path: {"by": encoding.encode(difference(exact[path], x), dtype)}
      if path in self._update.accumulators and x.dtype.kind in "fV"
      else {"to": exact[path]}
      for path, x in center.arrays.items()
    }
    arrays = heads.add_change(center.arrays, change)
    remainders = {
      path: difference(exact[path], x)
      for path, x in arrays.items()
      if "by" in change[path]
    }
    return new._replace(arrays=arrays, remainders=remainders), change

  def _read_commits(
    self, fragment: int, found: list[_Found]
  ) -> list[tuple[_Found, dict[str, Any] | None]] | None:
    """Returns commits, with None for those that are damaged."""
    contents = self._objects.read_all(c.key for c in found)
    read: list[tuple[_Found, dict[str, Any] | None]] = []
    for c, content in zip(found, contents, strict=True):
      if content is None:
        return None
      try:
        commit = commits_lib.decode(self._update, fragment, c.key, content)
        read.append((c, commit))
      except DamagedError as e:
        _log.warning("a commit of worker %s is set aside: %s", c.worker, e)
        read.append((c, None))
    return read
