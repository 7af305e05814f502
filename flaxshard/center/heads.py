"""The head: the object that names the newest version of each fragment.

It changes by compare-and-swap only. What it names is written once, under a
unique name, and never changed. So a center, its slots and the commits in it
always belong together.

A commit is an object as well. Its worker exchanges it for the center that it
comes into.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from typing import Any, NamedTuple
import uuid

from flaxshard.center import encoding
from flaxshard.center import store

Arrays = dict[str, Any]
Parts = dict[str, Arrays]

_KEY = "head"

# The pause between two looks at the head that a commit is to come into, as a
# multiple of what a look takes.
_PAUSE_LOOKS = 0.5

_PATTERN = re.compile(r"commit/(0|[1-9]\d*)/([^/]+)/(\d{9})", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Head:
  """The newest version of a fragment.

  Attributes:
    version: The number of updates.
    name: The unique name of its objects, `version-unique`.
    kinds: The kinds of its objects, each with arrays by path: "center" has the
      parameters and other collections, "slots" the optimizer's slots, which
      only who merges reads, and "change", with `commit_dtype`, the encoded
      change since the last version. Then "slots" also has the parameters before
      they were encoded.
    workers: Number of workers whose commits made this version; 0 for a center
      that was no update.
    taken: By start of a worker, `worker-start`: the local step of its last
      commit in the center.
  """

  version: int
  name: str
  kinds: list[str]
  workers: int
  taken: dict[str, int]

  def keys(self, fragment: int, *kinds: str) -> list[str]:
    """Returns the keys of the objects of this version, or of some kinds."""
    return [f"{kind}/{fragment}/{self.name}" for kind in kinds or self.kinds]


@dataclasses.dataclass(frozen=True)
class Heads:
  """The heads of all fragments, as one object of the store has them.

  Attributes:
    generation: The generation of the object.
    heads: One for each fragment; none before the first worker.
    finished: Whether this is the final center.
  """

  generation: bytes
  heads: list[Head] = dataclasses.field(default_factory=list)
  finished: bool = False

  @property
  def versions(self) -> list[int]:
    """The version of each fragment."""
    return [head.version for head in self.heads]

  @property
  def step(self) -> int:
    """The largest local step of a commit in the center."""
    return max((x for h in self.heads for x in h.taken.values()), default=0)


def read(objects: store.Objects, *, has_begun: bool = True) -> Heads:
  """Returns the heads.

  Args:
    objects: The store.
    has_begun: Whether a worker has written them: it is an error if they are
      missing.

  Raises:
    DamagedError: They are damaged or missing.
  """
  content, generation = objects.read(_KEY)
  if content is None:
    if has_begun:
      raise encoding.DamagedError(f"{_KEY} in {objects.url} is missing.")
    return Heads(generation)
  found = encoding.unpack(_KEY, content)
  return Heads(
    generation, [Head(**head) for head in found["heads"]], found["finished"]
  )


def swap(objects: store.Objects, found: Heads, **changes: Any) -> bool:
  """Changes fields of heads; returns whether they were still those found."""
  new = dataclasses.asdict(dataclasses.replace(found, **changes))
  generation = new.pop("generation")
  return objects.write(_KEY, encoding.pack(new), generation) is not None


def replace(
  objects: store.Objects, old: Heads, fragment: int, new: Head
) -> None:
  """Replaces the head of a fragment, unless another one has come meanwhile.

  Args:
    objects: The store.
    old: The heads that were read.
    fragment: The number of the fragment.
    new: Its new head.
  """
  found = old
  while not found.finished and found.heads[fragment] == old.heads[fragment]:
    heads = [*found.heads]
    heads[fragment] = new
    if swap(objects, found, heads=heads):
      return
    # Another fragment has a new head.
    found = read(objects)


def write(
  objects: store.Objects,
  fragment: int,
  version: int,
  parts: Parts,
  taken: dict[str, int],
  workers: int = 0,
) -> Head:
  """Writes a version of a fragment under a new name.

  Args:
    objects: The store.
    fragment: The number of the fragment.
    version: See `Head`.
    parts: Arrays by path, by kind.
    taken: See `Head`.
    workers: See `Head`.

  Returns:
    A head that names it.
  """
  # Sorted by their versions.
  name = f"{version:09d}-{uuid.uuid4().hex[:8]}"
  head = Head(version, name, [*parts], workers, taken)
  packed = map(encoding.pack, parts.values())
  objects.write_all(dict(zip(head.keys(fragment), packed, strict=True)))
  return head


def read_parts(
  objects: store.Objects, fragment: int, head: Head, *kinds: str
) -> Parts | None:
  """Returns arrays of a head by kind, or None if there is a newer head.

  Args:
    objects: The store.
    fragment: The number of the fragment.
    head: Its head.
    *kinds: The kinds to read.

  Raises:
    DamagedError: An object is damaged or missing.
  """
  keys = head.keys(fragment, *kinds)
  contents = objects.read_all(keys)
  if None in contents:
    if read(objects).heads[fragment] != head:
      return None  # merged meanwhile, and swept
    missing = keys[contents.index(None)]
    raise encoding.DamagedError(f"{missing} in {objects.url} is missing.")
  return {
    kind: encoding.unpack(key, content or b"")
    for kind, key, content in zip(kinds, keys, contents, strict=True)
  }


# -- Commits.


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

  def is_in(self, head: Head) -> bool:
    """Returns whether the center of a head has this commit."""
    return self.step <= head.taken.get(self.name, 0)


def find_commits(objects: store.Objects) -> list[Key]:
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
  result: tuple[Head, Parts] | None = None

  def __post_init__(self) -> None:
    self.watch = store.Watch(self._write_or_look)

  def _write_or_look(self) -> float | None:
    """Writes the commit, or looks for its result."""
    if not self.written.is_set():
      content = encoding.pack(self.commit)
      self.objects.write_all({str(self.key): content})
      self.written.set()
      self.wake.set()
    found = read(self.objects)
    head = found.heads[self.key.fragment]
    if found.finished:
      return None
    if self.key.is_in(head):
      is_next = head.version == self.commit["version"] + 1
      kind = "change" if is_next and "change" in head.kinds else "center"
      parts = read_parts(self.objects, self.key.fragment, head, kind)
      if parts:
        self.result = head, parts
        return None
    return _PAUSE_LOOKS
