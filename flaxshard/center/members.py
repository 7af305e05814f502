"""Signs of life: an object of each worker, which changes while it lives.

No clocks are compared: a worker is quiet or gone when its object has not
changed for so many seconds of the clock of who looks.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, NamedTuple
import uuid

from flaxshard.center import encoding
from flaxshard.center import store
from flaxshard.wrappers.agn_store import Store

# The name of the process that merges and does not train.
SYNCHRONIZER = "synchronizer"

# A worker that has missed so many signs of life is quiet.
_MISSED_BEATS = 4

# Bounds of the seconds between two signs of life.
_BEAT_SECONDS = (0.2, 5.0)


class _Seen(NamedTuple):
  """The last sign of life of a process, and when it was new.

  `phase`: "training", "done", "away" once it has left, or "absent" before it
  comes; of the synchronizer "merging".
  """

  content: bytes | None
  time: float
  phase: str


def _parse(key: str, content: bytes | None) -> dict[str, Any]:
  """Returns the object of a worker; `{}` if it is missing or damaged."""
  try:
    return encoding.unpack(key, content or b"")
  except encoding.DamagedError:
    return {}


class Members:
  """The workers of a run, as one of them sees them.

  It takes the place of an older start of this worker, and gives signs of life.

  Args:
    objects: The store.
    name: The number of this worker as a string, or `SYNCHRONIZER`.
    num_workers: The number of workers, as far as it is known.
    options: The options: signs of life are a quarter of `grace` apart.

  Attributes:
    start: A unique name of this start of the worker, `worker-unique`.
    watch: The thread. Its error may be that another start has replaced this
      one.
    patience: Seconds without a sign of life after which a worker is quiet: it
      merges no more, and no update waits for it.
    was_away: Whether this process stood still for longer than the deadline.
  """

  def __init__(
    self, objects: store.Objects, name: str, num_workers: int, options: Store
  ):
    self.start = f"{name}-{uuid.uuid4().hex[:8]}"
    self.was_away = False
    self._objects = objects
    self._name = name
    self._key = f"worker/{name}"
    self._deadline = options.deadline
    least, most = _BEAT_SECONDS
    self._seconds = min(
      max(options.grace / 4, least), most, options.deadline / 4
    )
    self.patience = _MISSED_BEATS * self._seconds
    # The first write replaces whatever is there.
    self._generation: bytes | None = None
    names = map(str, range(num_workers))
    self._seen = dict.fromkeys(names, _Seen(b"", time.monotonic(), "absent"))
    phase = "merging" if name == SYNCHRONIZER else "training"
    self._seen[name] = _Seen(b"", math.inf, phase)
    self._last_look = math.inf
    self._beat_and_look()
    self.watch = store.Watch(self._beat_and_look, (self._seconds,) * 2)

  def leave(self) -> None:
    """Ends the signs of life; the others need not wait for this worker."""
    self.watch.close()
    if not self.is_done:
      self.announce("away")
    # Replaced by another start, or the store cannot be reached.
    with contextlib.suppress(RuntimeError, store.StoreError):
      self._beat()

  def announce(self, phase: str) -> None:
    """Tells the others of a new phase, by the next sign of life."""
    self._seen[self._name] = _Seen(b"", math.inf, phase)
    self.watch.wake.set()

  def look(self) -> None:
    """Reads the objects of all others."""
    keys = [key for key in self._objects.keys("worker/") if key != self._key]
    for key, content in zip(keys, self._objects.read_all(keys), strict=True):
      found, name = _parse(key, content), key.partition("/")[2]
      is_new = name not in self._seen or content != self._seen[name].content
      if found and is_new:
        self._seen[name] = _Seen(content, time.monotonic(), found["phase"])

  def find(self, *phases: str, seconds: float = math.inf) -> set[str]:
    """Returns the names of those that are in one of some phases.

    Args:
      *phases: The phases.
      seconds: Only those that have given a sign of life within so many seconds.
    """
    oldest = time.monotonic() - seconds
    return {
      name
      for name, seen in [*self._seen.items()]
      if seen.phase in phases and seen.time >= oldest
    }

  @property
  def is_done(self) -> bool:
    """Whether this worker has finished."""
    return self._seen[self._name].phase == "done"

  @property
  def have_ended(self) -> bool:
    """Whether this worker is done, and the others are, or are gone."""
    return self.is_done and not self.find(
      "training", "absent", seconds=self._deadline
    )

  def merges(self, fragment: int) -> bool:
    """Returns whether this process is the one to merge a fragment."""
    here = self.find("training", "done", "merging", seconds=self.patience)
    if SYNCHRONIZER in here:
      return self._name == SYNCHRONIZER
    order = sorted(here, key=int)
    return self._name == order[fragment % len(order)]

  def _beat_and_look(self) -> float:
    now = time.monotonic()
    self.was_away |= now - self._last_look > self._deadline
    self._last_look = now
    with contextlib.suppress(store.StoreError):  # it has warned
      self._beat()
      self.look()
    return 0.0

  def _beat(self) -> None:
    """Writes the object of this worker.

    Raises:
      RuntimeError: Another start has replaced this one.
    """
    own = {
      "start": self.start,
      "phase": self._seen[self._name].phase,
      "beat": time.time(),
    }
    beat = encoding.pack(own)
    write = self._objects.write
    while not (new := write(self._key, beat, self._generation)):
      content, generation = self._objects.read(self._key)
      start = _parse(self._key, content).get("start", self.start)
      # A write whose answer was lost is our own.
      if start != self.start:
        raise RuntimeError(
          f"Worker: worker {self._name} of {self._objects.url} was started "
          "again, and this start has ended. Each worker needs a number of "
          "its own."
        )
      self._generation = generation
    self._generation = new
