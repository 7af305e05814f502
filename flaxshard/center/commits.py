"""Commits in the store, and their exchange for the center they come into."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from typing import Any, NamedTuple

from flaxshard.center import encoding
from flaxshard.center import heads
from flaxshard.center import store

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


@dataclasses.dataclass(eq=False)
class Exchange:
  """The exchange of a commit for the center that it comes into, in a thread.

  Attributes:
    objects: The store.
    key: The key of the commit.
    commit: The commit.
    wake: An event that is set when the commit is in the store.
    begin: When it began, by `time.monotonic`.
    written: Set once the commit is in the store.
    is_late: Whether it has missed the deadline, so that nobody waits for it.
    result: When the thread has ended, the head of the center that the commit
      has come into, and its arrays: "center", or "change" if that is all that
      the commit's own center lacks. None if the run has ended.
    watch: The thread.
  """

  objects: store.Objects
  key: Key
  commit: dict[str, Any]
  wake: threading.Event
  begin: float = dataclasses.field(default_factory=time.monotonic)
  written: threading.Event = dataclasses.field(default_factory=threading.Event)
  is_late: bool = False
  result: tuple[heads.Head, heads.Parts] | None = None

  def __post_init__(self) -> None:
    self.watch = store.Watch(self._write_or_look)

  def _write_or_look(self) -> float | None:
    """Writes the commit, or looks for its result."""
    if not self.written.is_set():
      content = encoding.pack(self.commit)
      self.objects.write_all({str(self.key): content})
      self.written.set()
      self.wake.set()
    found = heads.read(self.objects)
    head = found.heads[self.key.fragment]
    if found.finished:
      return None
    if self.key.is_in(head):
      is_next = head.version == self.commit["version"] + 1
      kind = "change" if is_next and "change" in head.kinds else "center"
      parts = heads.read_parts(self.objects, self.key.fragment, head, kind)
      if parts:
        self.result = head, parts
        return None
    return _PAUSE_LOOKS
