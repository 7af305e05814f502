"""Signs of life: an object of each worker, which changes while it lives.

No clocks are compared: a worker is quiet or gone when its object has not
changed for so many seconds of the clock of who looks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any
import uuid

from flaxshard.center.store import DamagedError
from flaxshard.center.store import JOIN_SECONDS
from flaxshard.center.store import Objects
from flaxshard.center.store import pack
from flaxshard.center.store import StoreError
from flaxshard.center.store import unpack

# The name of the process that merges and does not train.
SYNCHRONIZER = "synchronizer"

# A worker that has missed so many signs of life merges no more.
_MISSED_BEATS = 4

# Bounds of the seconds between two signs of life.
_BEAT_SECONDS = (0.2, 5.0)


def find_num_workers(objects: Objects) -> int:
  """Returns the number of workers that the workers of a run know; 0 if none."""
  keys = objects.list("worker/")
  read = objects.read_each(keys)
  found = [_parse(key, x) for key, (x, _) in zip(keys, read, strict=True)]
  return max((x["num_workers"] for x in found if x is not None), default=0)


def _parse(key: str, content: bytes | None) -> dict[str, Any] | None:
  """Returns the object of a worker; None if it is missing or damaged."""
  try:
    found = unpack(key, content or b"")
    return found if {"start", "phase", "num_workers"} <= found.keys() else None
  except (DamagedError, AttributeError):
    return None


class Members:
  """The workers of a run, as one of them sees them.

  Args:
    objects: The store.
    name: The number of this worker as a string, or `SYNCHRONIZER`.
    num_workers: The number of workers.
    grace: See `Store`: signs of life are a quarter of it apart.
    deadline: See `Store`.

  Attributes:
    names: The numbers of all workers, as strings.
    start: A unique name of this start of the worker.
    was_away: Whether this process stood still for longer than the deadline.
  """

  def __init__(
    self,
    objects: Objects,
    name: str,
    num_workers: int,
    grace: float,
    deadline: float,
  ):
    self.start = uuid.uuid4().hex[:8]
    self.was_away = False
    self._objects = objects
    self._name = name
    self._order = [str(k) for k in range(num_workers)]
    self.names = set(self._order)
    self._deadline = deadline
    least, most = _BEAT_SECONDS
    self._seconds = min(max(grace / 4, least), most, deadline / 4)
    self._generation = b""
    self._is_replaced = False
    # By name: generation, when it was seen first, and phase: "training",
    # "done", "away" once it has left, or "absent" before it comes.
    now = time.monotonic()
    self._seen: dict[str, tuple[bytes, float, str]] = dict.fromkeys(
      [*self._order, SYNCHRONIZER], (b"", now, "absent")
    )
    self._seen[name] = b"", now, "training"
    self._lock = threading.Lock()
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)

  def enter(self) -> None:
    """Takes the place of an older start of this worker; signs of life begin."""
    self._generation = self._objects.read(self._key(self._name))[1]
    self._beat(takes_over=True)
    self.look()
    self._thread.start()

  def leave(self) -> None:
    """Ends the signs of life; the others need not wait for this worker."""
    self._closed.set()
    if self._thread.ident is None:
      return
    self._thread.join(JOIN_SECONDS)
    if not self.is_done:
      self.announce("away")

  def announce(self, phase: str) -> None:
    """Tells the others of a new phase, if the store can be reached."""
    self._seen[self._name] = b"", 0.0, phase
    with contextlib.suppress(StoreError):  # the next sign of life tells it
      self._beat()

  def in_phase(self, *phases: str) -> set[str]:
    """Returns the workers that are in one of some phases."""
    return {name for name in self.names if self._seen[name][2] in phases}

  @property
  def is_done(self) -> bool:
    """Whether this worker has finished."""
    return self._seen[self._name][2] == "done"

  def check(self) -> None:
    """Raises a RuntimeError if another start has replaced this one."""
    if self._is_replaced:
      raise RuntimeError(
        f"Worker: worker {self._name} of {self._objects.url} was started "
        "again, and this start has ended. Each worker needs a number of its "
        "own."
      )

  def over(self, seconds: float | None = None) -> set[str]:
    """Returns the workers that commit no more, for now or for ever.

    Args:
      seconds: How long a worker may give no sign of life; None: `deadline`.
    """
    now = time.monotonic()
    seconds = self._deadline if seconds is None else seconds
    quiet = {x for x in self.names if now - self._seen[x][1] > seconds}
    return (quiet | self.in_phase("done", "away")) - {self._name}

  def merges(self, fragment: int) -> bool:
    """Returns whether this process is the one to merge a fragment."""
    turn = fragment % len(self._order)
    order = [SYNCHRONIZER, *self._order[turn:], *self._order[:turn]]
    now, patience = time.monotonic(), _MISSED_BEATS * self._seconds
    for name in order:
      if name == self._name:
        return True
      _, since, phase = self._seen[name]
      if phase in ("training", "done") and now - since < patience:
        return False
    return False

  @property
  def patience(self) -> float:
    """Seconds after which updates do not wait for a worker that is quiet."""
    return (_MISSED_BEATS + 1) * self._seconds

  def _key(self, name: str) -> str:
    return f"worker/{name}"

  def _run(self) -> None:
    last = time.monotonic()
    while not self._closed.wait(self._seconds):
      now = time.monotonic()
      if now - last > self._deadline:
        self.was_away = True
      last = now
      with contextlib.suppress(StoreError):  # the store has warned
        self._beat()
        self.look()

  def _beat(self, *, takes_over: bool = False) -> None:
    """Writes the object of this worker, unless another start has replaced it.

    Args:
      takes_over: Whether this start replaces the others.
    """
    with self._lock:
      own = {
        "start": self.start,
        "phase": self._seen[self._name][2],
        "num_workers": len(self._order),
        "beat": time.time(),
      }
      key = self._key(self._name)
      while not self._is_replaced:
        new = self._objects.write(key, pack(own), self._generation)
        if new is not None:
          self._generation = new
          return
        content, self._generation = self._objects.read(key)
        found = _parse(key, content)
        # A write whose answer was lost is our own.
        if not takes_over and found and found["start"] != self.start:
          self._is_replaced = True

  def look(self) -> None:
    """Reads the objects of all others."""
    names = [name for name in self._seen if name != self._name]
    read = self._objects.read_each([self._key(name) for name in names])
    for name, (content, generation) in zip(names, read, strict=True):
      found = _parse(self._key(name), content)
      if found is not None and generation != self._seen[name][0]:
        self._seen[name] = generation, time.monotonic(), found["phase"]
