"""Merging: commits become a new version of the center by one swap of the head.

Who merges reads the head, the center, its slots and the commits that are not in
it, computes, writes the results under a unique name, and swaps the head. So
each commit is in the center exactly once, whoever ends between any two lines,
and two that merge at the same time are harmless: what the later one wrote is
deleted with the older versions.

The workers merge, or a synchronizer: a process beside the store that does not
train. With it, a worker on a slow link sends one commit and reads one center.
When it ends, the workers merge again.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import logging
import time
from typing import Any

from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center import update
from flaxshard.center.members import Members
from flaxshard.center.members import SYNCHRONIZER
from flaxshard.center.train_states import Layout

_log = logging.getLogger("flaxshard")

# The pause between two looks for commits, as a multiple of what a look takes.
_PAUSE_LOOKS = 4.0

# Seconds between two deletions of older versions: somebody may be about to read
# one from far away.
_SWEEP_SECONDS = 2.0


@dataclasses.dataclass(eq=False)
class Merger:
  """A thread that merges the commits of the fragments that are its to merge.

  Once all workers are done or gone, it makes the center the final one. It ends
  when it finds the final center.

  Attributes:
    objects: The store; the heads of all fragments are in it.
    layout: The fragments of the center.
    members: The workers, as this process sees them.
    watch: The thread. An error of the members' thread is one of this, too.
  """

  objects: store.Objects
  layout: Layout
  members: Members

  def __post_init__(self) -> None:
    self._options = self.layout.agn.transport
    # When the commits that wait were seen first.
    self._came: dict[heads.Key, float] = {}
    self._swept = time.monotonic()
    self.watch = store.Watch(self._look)

  def close(self) -> None:
    """Ends the thread, and leaves the workers."""
    self.watch.close()
    self.members.leave()

  def _look(self) -> float | None:
    """Merges what has come, and deletes what is merged."""
    # Also in a process that has left its worker behind, after another start.
    self.members.watch.has_ended()
    start = time.monotonic()
    # Nobody commits any more: whatever there is, is merged.
    last = self.members.have_ended
    fragments = range(self._options.fragments)
    mine = [k for k in fragments if last or self.members.merges(k)]
    if not mine:
      return _PAUSE_LOOKS
    found = heads.read(self.objects)
    if found.finished:
      return None
    if start - self._swept > _SWEEP_SECONDS:
      self._swept = start
      self._sweep(found, mine)
    keys = [k for k in heads.find_commits(self.objects) if k.fragment in mine]
    taken = [key for key in keys if key.is_in(found.heads[key.fragment])]
    self.objects.delete(map(str, taken))
    keys = [key for key in keys if key not in taken]
    self._came = {key: self._came.get(key, start) for key in keys}
    if last and not keys:
      heads.swap(self.objects, found, finished=True)
      self._sweep(found, mine)
      return 0.0
    chosen = {fragment: self._choose(fragment, last) for fragment in mine}
    for fragment, keys in chosen.items():
      if keys:
        self._apply(fragment, found, keys)
    return 0.0 if any(chosen.values()) else _PAUSE_LOOKS

  def _choose(self, fragment: int, last: bool) -> list[heads.Key]:
    """Returns the commits of one update of a fragment, if they are enough."""
    keys = [key for key in self._came if key.fragment == fragment]
    if self.layout.agn.commit == "sequential":
      return keys
    # The oldest of each worker.
    keys.sort(key=lambda key: key.step, reverse=True)
    chosen = {key.worker: key for key in keys}
    awaited = self.members.find(
      *("training", "absent"), seconds=self.members.patience
    )
    count = len(chosen.keys() | self.members.find("done"))
    oldest = time.monotonic() - self._options.grace
    is_enough = count >= self._options.quorum and (
      awaited <= chosen.keys()
      or any(self._came[key] <= oldest for key in chosen.values())
    )
    return [*chosen.values()] if last or is_enough else []

  def _apply(
    self, fragment: int, found: heads.Heads, keys: list[heads.Key]
  ) -> None:
    """Computes a new version, and swaps the head."""
    head, layout = found.heads[fragment], self.layout
    contents = self.objects.read_all([*map(str, keys)])
    parts = heads.read_parts(self.objects, fragment, head, "center", "slots")
    if None in contents or parts is None:
      return  # swapped meanwhile
    good: list[dict[str, Any]] = []
    for key, content in zip(keys, contents, strict=True):
      try:
        good.append(update.decode(layout, fragment, str(key), content or b""))
      except encoding.DamagedError as e:
        _log.warning("a commit of worker %s is set aside: %s", key.worker, e)
    # In the order of their steps.
    taken = head.taken | {key.name: key.step for key in keys}
    new = dataclasses.replace(head, taken=taken)
    if good:
      # The oldest first.
      good.sort(key=lambda commit: commit["version"])
      parts, version = update.merge(layout, parts, good), head.version + 1
      new = heads.write(
        self.objects, fragment, version, parts, taken, len(good)
      )
    heads.replace(self.objects, found, fragment, new)

  def _sweep(self, found: heads.Heads, fragments: Sequence[int]) -> None:
    """Deletes older versions, also of mergers that ended before their swap."""
    for fragment in fragments:
      for key in found.heads[fragment].keys(fragment):
        self.objects.delete_before(key)


def synchronizer(objects: store.Objects, state: Any) -> Merger:
  """Returns a merger that trains nothing, for as long as it is not closed.

  Args:
    objects: The store.
    state: A train state like those of the workers, or its shapes and dtypes.
  """
  layout = Layout(state)
  members = Members(objects, SYNCHRONIZER, 0, layout.agn.transport)
  _log.info("merging the commits of the workers in %s", objects.url)
  return Merger(objects, layout, members)
