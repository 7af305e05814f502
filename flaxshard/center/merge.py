"""Merging: commits become a new version of the center by one swap of the head.

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

from collections.abc import Callable, Sequence
import contextlib
import dataclasses
import logging
import time
from typing import Any

from flaxshard.center import commits as commits_lib
from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center import update
from flaxshard.center.commits import Key
from flaxshard.center.members import Members
from flaxshard.center.members import SYNCHRONIZER
from flaxshard.center.train_states import Layout

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

  Once all workers are done or gone, it makes the center the final one.

  Args:
    objects: The store; the heads of all fragments are in it.
    layout: The fragments of the center.
    members: The workers, as this process sees them.

  Attributes:
    watch: The thread.
  """

  def __init__(self, objects: store.Objects, layout: Layout, members: Members):
    self._objects = objects
    self._layout = layout
    self._options = layout.agn.transport
    # When the commits that wait were seen first.
    self._came: dict[Key, float] = {}
    self._swept = time.monotonic()
    self._members = members
    self.watch = store.Watch(self._look)

  def check(self) -> None:
    """Raises what has ended a thread, or the start of this worker."""
    self._members.watch.has_ended()
    self.watch.has_ended()

  def close(self) -> None:
    """Ends the thread, and leaves the workers."""
    self.watch.close()
    self._members.leave()

  def _look(self) -> float:
    """Merges what has come, and deletes older versions at times."""
    start = time.monotonic()
    last = self._members.have_ended
    mine = [
      fragment
      for fragment in range(self._options.fragments)
      if last or self._members.merges(fragment)
    ]
    if start - self._swept > _SWEEP_SECONDS:
      self._swept = start
      self._sweep(mine)
    keys = commits_lib.find(self._objects) if mine else []
    keys = [key for key in keys if key.fragment in mine]
    self._came = {key: self._came.get(key, start) for key in keys}
    is_new = bool(keys or last) and self._merge(mine, keys, last)
    return 0.0 if is_new else store.pause_after(start, _PAUSE_LOOKS)

  def _merge(self, mine: list[int], keys: list[Key], last: bool) -> bool:
    """Merges the commits of some fragments, if enough have come.

    Args:
      mine: The fragments.
      keys: The keys of their commits.
      last: Whether nobody commits any more: whatever there is, is merged. If
        nothing is left, the center is the final one.

    Returns:
      Whether there are new heads.

    Raises:
      StoreError: The store cannot be reached.
      DamagedError: The center is damaged.
    """
    found = heads.read(self._objects)
    if found.finished:
      return False
    is_taken = lambda key: key.is_in(found.heads[key.fragment])
    self._objects.delete(str(key) for key in keys if is_taken(key))
    keys = [key for key in keys if not is_taken(key)]
    if last and not keys:
      final = dataclasses.replace(found, finished=True)
      is_new = heads.swap(self._objects, final)
      self._sweep(mine)
      return is_new
    is_new = False
    for fragment in mine:
      chosen = self._choose([k for k in keys if k.fragment == fragment], last)
      is_new |= bool(chosen) and self._apply(fragment, found, chosen)
    return is_new

  def _choose(self, keys: list[Key], last: bool) -> list[Key]:
    """Returns the commits of one update of a fragment, if they are enough."""
    if self._layout.agn.commit == "sequential":
      return keys
    chosen: dict[str, Key] = {}
    for key in sorted(keys, key=lambda key: key.step):
      chosen.setdefault(key.worker, key)
    awaited = self._members.find(
      *("training", "absent"), seconds=self._members.patience
    )
    count = len(chosen.keys() | self._members.find("done"))
    oldest = time.monotonic() - self._options.grace
    is_enough = count >= self._options.quorum and (
      awaited <= chosen.keys()
      or any(self._came[key] <= oldest for key in chosen.values())
    )
    return [*chosen.values()] if last or is_enough else []

  def _apply(self, fragment: int, found: heads.Heads, keys: list[Key]) -> bool:
    """Computes a new version and swaps the head; returns whether it did."""
    head = found.heads[fragment]
    contents = self._objects.read_all([*map(str, keys)])
    center = heads.read_center(self._objects, fragment, head, slots=True)
    if None in contents or center.version != head.version:
      return False  # swapped meanwhile
    good: list[dict[str, Any]] = []
    for key, content in zip(keys, contents, strict=True):
      try:
        good.append(
          update.decode(self._layout, fragment, str(key), content or b"")
        )
      except encoding.DamagedError as e:
        _log.warning("a commit of worker %s is set aside: %s", key.worker, e)
    # In the order of their steps.
    taken = head.taken | {key.name: key.step for key in keys}
    # If all are damaged: not to be read again.
    new = dataclasses.replace(head, taken=taken)
    if good:
      # The oldest first.
      good.sort(key=lambda commit: commit["version"])
      center = update.merge(self._layout, center, good)
      new = heads.write(self._objects, center, taken)
    is_new = heads.replace(self._objects, found, fragment, new)
    if is_new:
      self._objects.delete(map(str, keys))
    elif good:
      self._objects.delete(new.keys(fragment))
    return is_new

  def _sweep(self, fragments: Sequence[int]) -> None:
    """Deletes older versions, also of mergers that ended before their swap."""
    found = heads.read(self._objects)
    for fragment, head in enumerate(found.heads):
      if fragment in fragments:
        for key in head.keys(fragment):
          self._objects.delete_before(key)


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
  layout = Layout(state)
  members = Members(objects, SYNCHRONIZER, 0, layout.agn.transport)
  merger = Merger(objects, layout, members)
  _log.info("merging the commits of the workers in %s", objects.url)
  try:
    while not should_stop():
      merger.check()
      with contextlib.suppress(store.StoreError):  # the store has warned
        if heads.read(objects).finished:
          _log.info("the run has ended")
          return
      time.sleep(_SYNCHRONIZER_SECONDS)
  finally:
    merger.close()
