"""Heads: the objects that name the newest version of each fragment.

A head changes by compare-and-swap only. What it names is written once, under
unique names, and never changed. So a center, its slots and the commits in it
always belong together.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar
import uuid

import numpy as np

from flaxshard.center import encoding
from flaxshard.center import train_states
from flaxshard.center import update as update_lib
from flaxshard.center.store import DamagedError
from flaxshard.center.store import Objects
from flaxshard.center.store import pack
from flaxshard.center.store import StoreError
from flaxshard.center.store import unpack
from flaxshard.center.train_states import Center
from flaxshard.state.train_state import TrainState

S = TypeVar("S", bound=TrainState)


@dataclasses.dataclass(frozen=True)
class Head:
  """The newest version of a fragment.

  Attributes:
    version: The number of updates.
    center: Key of the parameters.
    slots: Key of the optimizer's slots, which only who merges reads.
    change: Key of the encoded change since the last version, or "".
    taken: By start of a worker, `worker-start`: the local step of its last
      commit in the center.
    workers: Number of workers whose commits made this version.
    finished: Whether this is the final center.
    generation: The generation of the object.
  """

  version: int
  center: str
  slots: str
  change: str = ""
  taken: dict[str, int] = dataclasses.field(default_factory=dict)
  workers: int = 0
  finished: bool = False
  generation: bytes = b""

  @property
  def step(self) -> int:
    """The largest local step of a commit in the center."""
    return max(self.taken.values(), default=0)


def key_of(fragment: int) -> str:
  """Returns the key of the head of a fragment."""
  return f"head/{fragment}"


def version_of(key: str) -> int:
  """Returns the version in the key of a center, of slots or of a change."""
  return int(key.rpartition("/")[2].partition("-")[0])


def publish(
  objects: Objects,
  center: Center,
  generation: bytes,
  *,
  change: dict[str, Any] | None = None,
  taken: dict[str, int] | None = None,
  workers: int = 0,
) -> bool:
  """Writes a center under new names and swaps the head.

  Args:
    objects: The store.
    center: The center of a fragment with its slots.
    generation: The generation of the head that it replaces, or of none.
    change: See `add_change`.
    taken: See `Head`.
    workers: See `Head`.

  Returns:
    Whether the head still had the generation. If not, nothing stays.
  """
  unique = f"{center.fragment}/{center.version}-{uuid.uuid4().hex[:8]}"
  head = Head(
    center.version,
    f"center/{unique}",
    f"slots/{unique}",
    f"change/{unique}" if change else "",
    taken or {},
    workers,
  )
  contents: dict[str, Any] = {
    head.center: {"arrays": center.arrays},
    head.slots: {
      "slots": center.slots,
      "remainders": center.remainders or {},
    },
  }
  if change:
    contents[head.change] = {"arrays": change}
  objects.write_all({key: pack(x) for key, x in contents.items()})
  if swap(objects, center.fragment, head, generation):
    return True
  objects.delete(contents)
  return False


def read(objects: Objects, fragment: int) -> tuple[Head | None, bytes]:
  """Returns a head, None if there is none, and its generation."""
  content, generation = objects.read(key_of(fragment))
  if content is None:
    return None, generation
  try:
    found = unpack(key_of(fragment), content)
    return Head(**found, generation=generation), generation
  except (DamagedError, TypeError) as e:
    raise DamagedError(
      f"{e} If {objects.url} is removed, the same command goes on from the "
      "checkpoints."
    ) from e


def read_every(objects: Objects, fragments: int) -> list[Head]:
  """Returns the heads of all fragments.

  Raises:
    StoreError: One is missing.
  """
  found = [read(objects, fragment)[0] for fragment in range(fragments)]
  there = [head for head in found if head is not None]
  if len(there) < fragments:
    raise StoreError(f"{objects.url} has no heads, or has lost some.")
  return there


def have_ended(found: list[Head]) -> bool:
  """Returns whether the heads of all fragments name the final center."""
  return all(head.finished for head in found)


def swap(objects: Objects, fragment: int, new: Head, generation: bytes) -> bool:
  """Replaces a head; returns whether it still had the generation."""
  content = dataclasses.asdict(new)
  del content["generation"]
  written = objects.write(key_of(fragment), pack(content), generation)
  if written is not None:
    return True
  # A write whose answer was lost is our own: its names are unique.
  now, _ = read(objects, fragment)
  return now is not None and (now.center, now.finished) == (
    new.center,
    new.finished,
  )


def read_center(
  objects: Objects,
  fragment: int,
  head: Head,
  *,
  base: tuple[int, dict[str, np.ndarray]] | None = None,
  slots: bool = False,
) -> tuple[Head, Center]:
  """Returns the center that a head names, or a newer one.

  Args:
    objects: The store.
    fragment: The number of the fragment.
    head: Its head.
    base: A version and its arrays: if the encoded change is one from this
      version, it is read instead of the arrays.
    slots: Whether to read the slots as well.

  Raises:
    DamagedError: An object is damaged or missing.
  """
  while True:
    uses_change = bool(
      head.change and base is not None and base[0] == head.version - 1
    )
    first = head.change if uses_change else head.center
    contents = objects.read_all([first, *([head.slots] if slots else [])])
    if None not in contents:
      break
    # Merged meanwhile, and swept.
    newer, _ = read(objects, fragment)
    if newer is None or newer.version == head.version:
      raise DamagedError(f"{first} in {objects.url} is missing.")
    head = newer
  found = unpack(first, contents[0] or b"")
  if uses_change and base is not None:
    found["arrays"] = add_change(base[1], found["arrays"])
  if slots:
    found |= unpack(head.slots, contents[1] or b"")
  return head, Center(fragment, head.version, **found)


def final_state(url: str, state: S) -> tuple[int, S] | None:
  """Returns the step and the state of the final center of a run that has ended.

  Args:
    url: The center.
    state: A state of its workers.

  Returns:
    None if the run has not ended, or if the state has this center.

  Raises:
    StoreError: The store cannot be read, or has no center.
  """
  objects = Objects(url)
  _, own = update_lib.find(state)
  found = read_every(objects, own.versions.size)
  versions = [head.version for head in found]
  if not have_ended(found) or versions == own.versions.tolist():
    return None
  step = max(head.step for head in found)
  for fragment, head in enumerate(found):
    _, center = read_center(objects, fragment, head, slots=True)
    state = train_states.put_center(state, center)
  return step, state


def add_change(
  arrays: dict[str, np.ndarray], change: dict[str, Any]
) -> dict[str, np.ndarray]:
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
