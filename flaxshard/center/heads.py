"""Heads: the objects that name the newest version of each fragment.

A head changes by compare-and-swap only. What it names is written once, under a
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


class Center(NamedTuple):
  """One version of a fragment of the center.

  Attributes:
    fragment: The number of the fragment.
    version: Its number.
    arrays: The arrays by path.
    slots: The optimizer's slots by path, if they were read.
    remainders: With the slots: what encoding has cut off, by path.
  """

  fragment: int
  version: int
  arrays: Arrays
  slots: Mapping[str, Any] = {}
  remainders: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Head:
  """The newest version of a fragment.

  Attributes:
    version: The number of updates.
    name: The unique name of its objects, `version-unique`: `center/...` has the
      parameters, `slots/...` the optimizer's slots, which only who merges
      reads, and `change/...` the encoded change since the last version.
    taken: By start of a worker, `worker-start`: the local step of its last
      commit in the center.
    workers: Number of workers whose commits made this version; 0 for a center
      that was no update.
    finished: Whether this is the final center.
  """

  version: int
  name: str
  taken: dict[str, int] = dataclasses.field(default_factory=dict)
  workers: int = 0
  finished: bool = False

  @property
  def step(self) -> int:
    """The largest local step of a commit in the center."""
    return max(self.taken.values(), default=0)

  def keys(self, fragment: int) -> list[str]:
    """Returns the keys of the objects of this version."""
    kinds = ("center", "slots", "change")
    return [f"{kind}/{fragment}/{self.name}" for kind in kinds]


def version_of(key: str) -> int:
  """Returns the version in the key of a center, of slots or of a change."""
  return int(key.rpartition("/")[2].partition("-")[0])


def read(objects: store.Objects, fragment: int) -> tuple[Head | None, bytes]:
  """Returns a head, None if there is none, and its generation."""
  key = f"head/{fragment}"
  content, generation = objects.read(key)
  if content is None:
    return None, generation
  return Head(**store.unpack(key, content)), generation


def read_every(objects: store.Objects, fragments: int) -> list[Head]:
  """Returns the heads of all fragments.

  Raises:
    StoreError: One is missing.
  """
  found = [read(objects, fragment)[0] for fragment in range(fragments)]
  there = [head for head in found if head is not None]
  if len(there) < fragments:
    raise store.StoreError(f"{objects.url} has no heads, or has lost some.")
  return there


def have_ended(found: list[Head]) -> bool:
  """Returns whether the heads of all fragments name the final center."""
  return all(head.finished for head in found)


def swap(
  objects: store.Objects, fragment: int, new: Head, generation: bytes
) -> bool:
  """Replaces a head; returns whether it still had the generation."""
  key, content = f"head/{fragment}", store.pack(dataclasses.asdict(new))
  return (
    objects.write(key, content, generation) is not None
    # A write whose answer was lost is our own: its name is unique.
    or objects.read(key)[0] == content
  )


def publish(
  objects: store.Objects,
  center: Center,
  generation: bytes,
  change: Arrays | None = None,
  **fields: Any,
) -> bool:
  """Writes a center under a new name and swaps the head.

  Args:
    objects: The store.
    center: The center of a fragment with its slots.
    generation: The generation of the head that it replaces, or of none.
    change: See `add_change`.
    **fields: The other fields of the new head.

  Returns:
    Whether the head still had the generation. If not, nothing stays.
  """
  name = f"{center.version}-{uuid.uuid4().hex[:8]}"
  head = Head(center.version, name, **fields)
  slots = {"slots": center.slots, "remainders": center.remainders}
  trees = [{"arrays": center.arrays}, slots]
  if change:
    trees.append({"arrays": change})
  keys = head.keys(center.fragment)[: len(trees)]
  packed = map(store.pack, trees)
  objects.write_all(dict(zip(keys, packed, strict=True)))
  if swap(objects, center.fragment, head, generation):
    return True
  objects.delete(keys)
  return False


def read_center(
  objects: store.Objects,
  fragment: int,
  head: Head,
  *,
  base: Center | None = None,
  slots: bool = False,
) -> tuple[Head, Center]:
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
    newer, _ = read(objects, fragment)
    if newer is None or newer.name == head.name:
      missing = keys[contents.index(None)]
      raise store.DamagedError(f"{missing} in {objects.url} is missing.")
    head = newer
  found: dict[str, Any] = {}
  for key, content in zip(keys, contents, strict=True):
    found |= store.unpack(key, content or b"")
  if from_base and base:
    found["arrays"] = add_change(base.arrays, found["arrays"])
  return head, Center(fragment, head.version, **found)


def add_change(arrays: Arrays, change: Arrays) -> Arrays:
  """Returns changed arrays, to the same bits on every machine.

  Args:
    arrays: The arrays before.
    change: By path, `{"by": ...}` with an encoded difference, or `{"to": ...}`
      with the new value.
  """
  return {
    path: change[path]["to"]
    if "to" in change[path]
    else (x + encoding.decode(change[path]["by"])).astype(x.dtype)
    for path, x in arrays.items()
  }
