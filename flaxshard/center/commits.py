"""Commits in the store, and their exchange for the center they come into."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import dataclasses
import re
import time
from typing import Any, NamedTuple

from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center import watch

# The pause between two looks at the head that a commit is to come into, as a
# multiple of what a look takes.
_PAUSE_LOOKS = 0.5


_PATTERN = re.compile(r"commit/(0|[1-9]\d*)/([^/]+)/(\d{9})", re.ASCII)


class Key(NamedTuple):
  """The key of a commit.

  Attributes:
    fragment: The number of the fragment.
    name: The start of its worker, `worker-start`.
    step: The local step.
  """

  fragment: int
  name: str
  step: int

  def __str__(self) -> str:
    return f"commit/{self.fragment}/{self.name}/{self.step:09d}"

  @property
  def worker(self) -> str:
    """The number of the worker."""
    return self.name.partition("-")[0]

  def is_in(self, head: heads.Head) -> bool:
    """Returns whether the center of a head has this commit."""
    return self.step <= head.taken.get(self.name, 0)


def find(objects: store.Objects) -> list[Key]:
  """Returns the keys of the commits in the store."""
  matches = map(_PATTERN.fullmatch, objects.keys("commit/"))
  return [Key(int(m[1]), m[2], int(m[3])) for m in matches if m]


@dataclasses.dataclass
class Exchange:
  """The exchange of a commit for the center that it comes into, in a thread.

  Args:
    objects: The store.
    key: The key of the commit.
    commit: The commit.
    base: See `heads.read_center`.
    on_written: Called when the commit is in the store.
    is_late: Whether it has missed the deadline: nobody waits for it.

  Attributes:
    written: The result is there once the commit is in the store.
    result: The center that it has come into; None if the run has ended.
    watch: The thread.
  """

  objects: store.Objects
  key: Key
  commit: dict[str, Any]
  base: heads.Center | None
  on_written: Callable[[], None]
  is_late: bool = False

  def __post_init__(self) -> None:
    self.written: futures.Future[None] = futures.Future()
    self.result: futures.Future[heads.Center | None] = futures.Future()
    self._start = time.monotonic()
    self.watch = watch.Watch(self._look)
    self.watch.start()

  def metrics(self, center: heads.Center) -> tuple[float, int, int]:
    """Returns seconds, versions in between, and workers of the result."""
    versions = center.version - self.commit["version"] - 1
    return time.monotonic() - self._start, max(versions, 0), center.workers

  def _look(self) -> float | None:
    """Writes the commit, or looks for its result."""
    start = time.monotonic()
    if not self.written.done():
      self.objects.write_all({str(self.key): store.pack(self.commit)})
      self.written.set_result(None)
      self.on_written()
    found = heads.read(self.objects)
    head = found.heads[self.key.fragment]
    if found.finished:
      self.result.set_result(None)
    elif self.key.is_in(head):
      center = heads.read_center(
        self.objects, self.key.fragment, head, base=self.base
      )
      self.result.set_result(center)
    else:
      return watch.pause_after(start, _PAUSE_LOOKS)
    return None
