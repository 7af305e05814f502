"""The head: the object that names the newest version of each fragment.

It changes by compare-and-swap only. What it names is written once, under a
unique name, and never changed. So a center, its slots and the commits in it
always belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple
import uuid

from flaxshard.center import encoding
from flaxshard.center import store

Arrays = dict[str, Any]

_KEY = "head"


class Center(NamedTuple):
  """One version of a fragment of the center.

  Attributes:
    fragment: The number of the fragment.
    version: Its number.
    arrays: The arrays by path.
    slots: The optimizer's slots by path, if they were read.
    remainders: With the slots: what encoding has cut off, by path.
    workers: Number of workers whose commits made this version; 0 for a center
      that was no update.
    change: Of a new center with `commit_dtype`, the change since the last
      version, as `add_change` takes it.
  """

  fragment: int
  version: int
  arrays: Arrays
  slots: Mapping[str, Any] = {}
  remainders: Mapping[str, Any] = {}
  workers: int = 0
  change: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Head:
  """The newest version of a fragment.

  Attributes:
    version: The number of updates.
    name: The unique name of its objects, `version-unique`: `center/...` has the
      parameters, `slots/...` the optimizer's slots, which only who merges
      reads, and `change/...` the encoded change since the last version.
    workers: See `Center`.
    taken: By start of a worker, `worker-start`: the local step of its last
      commit in the center.
  """

  version: int
  name: str
  workers: int
  taken: dict[str, int]

  def keys(self, fragment: int) -> list[str]:
    """Returns the keys of the objects of this version."""
    kinds = ("center", "slots", "change")
    return [f"{kind}/{fragment}/{self.name}" for kind in kinds]


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
  objects: store.Objects, center: Center, taken: dict[str, int]
) -> Head:
  """Writes a center under a new name.

  Args:
    objects: The store.
    center: The center of a fragment with its slots.
    taken: See `Head`.

  Returns:
    A head that names it.
  """
  # Sorted by their versions.
  name = f"{center.version:09d}-{uuid.uuid4().hex[:8]}"
  head = Head(center.version, name, center.workers, taken)
  trees = (
    {"arrays": center.arrays},
    {"slots": center.slots, "remainders": center.remainders},
    *([{"arrays": center.change}] if center.change else []),
  )
  packed = map(encoding.pack, trees)
  keys = head.keys(center.fragment)
  objects.write_all(dict(zip(keys, packed, strict=False)))
  return head


def read_center(
  objects: store.Objects,
  fragment: int,
  head: Head,
  *,
  base: Center | None = None,
  slots: bool = False,
) -> Center:
  """Returns the center that a head names, or a newer one.

  Args:
    objects: The store.
    fragment: The number of the fragment.
    head: Its head.
    base: A center: if the encoded change is one from it, that is read instead
      of the arrays.
    slots: Whether to read the slots as well.

  Raises:
    DamagedError: An object is damaged or missing.
  """
  while True:
    center_key, slots_key, change_key = head.keys(fragment)
    from_base = head.workers and base and base.version == head.version - 1
    keys = [change_key if from_base else center_key]
    keys += [slots_key] if slots else []
    contents = objects.read_all(keys)
    if None not in contents:
      break
    # Merged meanwhile, and swept.
    newer = read(objects).heads[fragment]
    if newer == head:
      missing = keys[contents.index(None)]
      raise encoding.DamagedError(f"{missing} in {objects.url} is missing.")
    head = newer
  found: dict[str, Any] = {}
  for key, content in zip(keys, contents, strict=True):
    found |= encoding.unpack(key, content or b"")
  if from_base and base:
    found["arrays"] = add_change(base.arrays, found["arrays"])
  return Center(fragment, head.version, workers=head.workers, **found)


def add_change(arrays: Arrays, change: Arrays) -> Arrays:
  """Returns changed arrays, to the same bits on every machine.

  Args:
    arrays: The arrays before.
    change: By path, the encoded difference of a parameter, and the new value of
      another array.
  """
  return {
    path: (x + encoding.decode(change[path])).astype(x.dtype)
    if path.split("/")[0] == "params"
    else change[path]
    for path, x in arrays.items()
  }
