"""Merging: commits become a new version of the center by one swap of a head.

Who merges reads the head, the center, its slots and the commits that are not in
it, computes, writes the results under a unique name, and swaps the head. Who
loses the race deletes what it wrote. So each commit is in the center exactly
once, whoever ends between any two lines, and two that merge at the same time
are harmless.

The workers merge, or a synchronizer: a process beside the store that does not
train. With it, a worker on a slow link sends one commit and reads one center.
When it ends, the workers merge again.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import logging
import math
import threading
import time
from typing import Any

from flaxshard.center import commits as commits_lib
from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center.commits import Stored
from flaxshard.center.heads import Head
from flaxshard.center.members import Members
from flaxshard.center.members import SYNCHRONIZER
from flaxshard.center.update import CenterUpdate

_log = logging.getLogger("flaxshard")

# The pause between two looks for commits, as a multiple of what a look takes.
_PAUSE_LOOKS = 4.0

# The pause between two looks of the synchronizer whether the run has ended.
_SYNCHRONIZER_SECONDS = 0.2

# Seconds between two deletions of older versions: somebody may be about to read
# one from far away.
_SWEEP_SECONDS = 2.0


class Merger:
  """A thread that merges the commits of the fragments that are its to merge.

  Args:
    objects: The store.
    update: The center's update.
    name: The number of this worker as a string, or `SYNCHRONIZER`.
    num_workers: The number of workers, as far as it is known.

  Attributes:
    members: The workers.
    wake: An event: look for commits now.
    ends: An event: nobody commits any more, and the center is to be made the
      final one. So it is once all workers are done or gone.
  """

  def __init__(
    self,
    objects: store.Objects,
    update: CenterUpdate,
    name: str,
    num_workers: int,
  ):
    self._objects = objects
    self._update = update
    self._options = update.agn.transport
    self.members = Members(objects, name, num_workers, self._options)
    self.wake = threading.Event()
    self.ends = threading.Event()
    # By fragment: since when commits wait for the others, and in which version.
    self._waits: dict[int, tuple[int, float]] = {}
    self._closed = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, daemon=True)

  def start(self) -> None:
    """Joins the workers, and begins to merge."""
    self.members.enter()
    self._thread.start()

  def check(self) -> None:
    """Raises what has ended the thread, or the start of this worker."""
    self.members.check()
    if self._error is not None:
      raise self._error

  def close(self) -> None:
    """Ends the thread, and leaves the workers."""
    self._closed.set()
    self.wake.set()
    if self._thread.ident is not None:
      self._thread.join(store.JOIN_SECONDS)
    self.members.leave()

  def _run(self) -> None:
    swept = -math.inf
    try:
      while not self._closed.is_set():
        start, changed = time.monotonic(), False
        last = self.ends.is_set() or self.members.have_ended
        fragments = [
          fragment
          for fragment in range(self._options.fragments)
          if last or self.members.merges(fragment)
        ]
        with contextlib.suppress(store.StoreError):  # the store has warned
          if start - swept > _SWEEP_SECONDS:
            swept = start
            for fragment in fragments:
              self._sweep(fragment)
          for fragment in fragments:
            changed |= self._merge(fragment, last)
        pause = 0.0 if changed else store.pause_after(start, _PAUSE_LOOKS)
        if self.wake.wait(pause):
          self.wake.clear()
    except BaseException as e:
      self._error = e

  def _merge(self, fragment: int, last: bool) -> bool:
    """Merges the commits of a fragment, if enough have come.

    Args:
      fragment: Its number.
      last: Whether nobody commits any more: whatever there is, is merged, and
        what it becomes is the final center.

    Returns:
      Whether there is a new head.

    Raises:
      StoreError: The store cannot be reached.
      DamagedError: The center is damaged.
    """
    found = commits_lib.find(self._objects, f"{fragment}/")
    if not found and not last:
      self._waits.pop(fragment, None)
      return False
    head, generation = heads.read(self._objects, fragment)
    if head is None or head.finished:
      return False
    new = [c for c in found if c.step > head.taken.get(c.name, 0)]
    self._objects.delete(c.key for c in found if c not in new)
    if last and not new:
      final = dataclasses.replace(head, finished=True)
      changed = heads.swap(self._objects, fragment, final, generation)
      self._sweep(fragment)
      return changed
    if self._update.agn.commit != "sequential":
      new = self._choose(fragment, head, new, last)
    return bool(new) and self._apply(fragment, head, generation, new)

  def _choose(
    self, fragment: int, head: Head, found: list[Stored], last: bool
  ) -> list[Stored]:
    """Returns the commits of one update by mean or sum, if they are enough."""
    chosen: dict[str, Stored] = {}
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
    over = self.members.over(self.members.patience)
    is_whole = self.members.names <= over | chosen.keys()
    count = len(chosen.keys() | self.members.in_phase("done"))
    is_enough = count >= self._options.quorum and (
      is_whole or now - since >= self._options.grace
    )
    return list(chosen.values()) if last or is_enough else []

  def _apply(
    self, fragment: int, head: Head, generation: bytes, found: list[Stored]
  ) -> bool:
    """Computes a new version and swaps the head; returns whether it did."""
    keys = [c.key for c in found]
    contents = self._objects.read_all(keys)
    newest, center = heads.read_center(
      self._objects, fragment, head, slots=True
    )
    if None in contents or newest.version != head.version:
      return False  # swapped meanwhile
    good: list[dict[str, Any]] = []
    for c, content in zip(found, contents, strict=True):
      try:
        good.append(
          commits_lib.decode(self._update, fragment, c.key, content or b"")
        )
      except store.DamagedError as e:
        _log.warning("a commit of worker %s is set aside: %s", c.worker, e)
    # In the order of their steps.
    taken = head.taken | {c.name: c.step for c in found}
    if not good:
      # Not to be read again.
      new = dataclasses.replace(head, taken=taken)
      return heads.swap(self._objects, fragment, new, generation)
    # The oldest first.
    good.sort(key=lambda commit: commit["version"])
    new_center, change = commits_lib.merge(self._update, center, good)
    is_new = heads.publish(
      self._objects,
      new_center,
      generation,
      change,
      taken=taken,
      workers=len(good),
    )
    if is_new:
      self._objects.delete(keys)
    return is_new

  def _sweep(self, fragment: int) -> None:
    """Deletes older versions, also of mergers that ended before their swap."""
    head, _ = heads.read(self._objects, fragment)
    if head is None:
      return
    named = head.keys(fragment)
    for key in named:
      # A newer one is being written.
      self._objects.delete(
        other
        for other in self._objects.list(f"{key.rpartition('/')[0]}/")
        if other not in named and heads.version_of(other) <= head.version
      )


def synchronize(
  objects: store.Objects, state: Any, should_stop: Callable[[], bool]
) -> None:
  """Merges commits until the run has ended, as its synchronizer.

  Args:
    objects: The store.
    state: A train state like those of the workers, or its shapes and dtypes.
    should_stop: Returns True when this process shall stop, as after a signal.

  Raises:
    StoreError: The store cannot be read or written at the start.
    DamagedError: The center is damaged.
  """
  update = CenterUpdate(state)
  merger = Merger(objects, update, SYNCHRONIZER, num_workers=0)
  merger.start()
  _log.info("merging the commits of the workers in %s", objects.url)
  try:
    while not should_stop():
      merger.check()
      with contextlib.suppress(store.StoreError):  # the store has warned
        found = heads.read_every(objects, update.agn.transport.fragments)
        if heads.have_ended(found):
          _log.info("the run has ended")
          return
      time.sleep(_SYNCHRONIZER_SECONDS)
  finally:
    merger.close()
