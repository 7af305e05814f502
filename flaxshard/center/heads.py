"""The head: the object that names the newest version of each fragment.

It changes by compare-and-swap only. What it names is written once, under a
unique name, and never changed. So a center, its slots and the commits in it
always belong together.
"""

from __future__ import annotations

import dataclasses
from typing import Any
import uuid

from flaxshard.center import encoding
from flaxshard.center import store

Arrays = dict[str, Any]
Parts = dict[str, Arrays]

_KEY = "head"


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


def swap(objects: store.Objects, new: Heads) -> bool:
  """Writes heads; returns whether the object still had their generation."""
  heads = [dataclasses.asdict(head) for head in new.heads]
  content = encoding.pack({"heads": heads, "finished": new.finished})
  return objects.write(_KEY, content, new.generation) is not None


def replace(
  objects: store.Objects, old: Heads, fragment: int, new: Head
) -> bool:
  """Replaces the head of a fragment, unless another one has come meanwhile.

  Args:
    objects: The store.
    old: The heads that were read.
    fragment: The number of the fragment.
    new: Its new head.

  Returns:
    Whether it was replaced.
  """
  found = old
  while not found.finished and found.heads[fragment] == old.heads[fragment]:
    heads = [*found.heads]
    heads[fragment] = new
    if swap(objects, dataclasses.replace(found, heads=heads)):
      return True
    # Another fragment has a new head, or the answer to a write was lost.
    found = read(objects)
  return found.heads[fragment] == new


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
