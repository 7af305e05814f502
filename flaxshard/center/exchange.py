"""The exchange of a commit for the center that it comes into, in a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import dataclasses
import threading
import time
from typing import Any

from flaxshard.center import commits
from flaxshard.center import heads
from flaxshard.center import store
from flaxshard.center.heads import Center
from flaxshard.center.heads import Head

# The pause between two looks at the head that a commit is to come into, as a
# multiple of what a look takes.
_PAUSE_LOOKS = 0.5

# Pauses in seconds between attempts while the store cannot be reached.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0


@dataclasses.dataclass
class Exchange:
  """A commit that is under way.

  Args:
    objects: The store.
    fragment: The number of the fragment.
    name: The start of the worker, `worker-start`.
    commit: The commit.
    base: See `heads.read_center`.
    on_written: Called when the commit is in the store.
    closed: An event that ends the thread.
    is_late: Whether it has missed the deadline: nobody waits for it.

  Attributes:
    written: The result is there once the commit is in the store.
    result: The head and the center that it has come into.
  """

  objects: store.Objects
  fragment: int
  name: str
  commit: dict[str, Any]
  base: Center | None
  on_written: Callable[[], None]
  closed: threading.Event
  is_late: bool = False

  def __post_init__(self) -> None:
    self.written: futures.Future[None] = futures.Future()
    self.result: futures.Future[tuple[Head, Center]] = futures.Future()
    self._start = time.monotonic()
    # Not a pool, whose threads a program waits for at its end.
    threading.Thread(target=self._run, daemon=True).start()

  def metrics(self) -> tuple[float, int, int]:
    """Returns seconds, versions in between, and workers of the result."""
    head, center = self.result.result()
    versions = center.version - self.commit["version"] - 1
    return time.monotonic() - self._start, max(versions, 0), head.workers

  def _run(self) -> None:
    """Looks for the result until it is there, also while the store fails."""
    pause, failed_pause = 0.0, _FIRST_PAUSE
    while not self.result.done() and not self.closed.wait(pause):
      start = time.monotonic()
      try:
        self._look()
        pause = store.pause_after(start, _PAUSE_LOOKS)
      except store.StoreError:
        pause = failed_pause
        failed_pause = min(2 * failed_pause, _LONGEST_PAUSE)
      except BaseException as e:
        self.result.set_exception(e)

  def _look(self) -> None:
    """Writes the commit, or looks for its result."""
    step = self.commit["step"]
    if not self.written.done():
      key = commits.key_of(self.fragment, self.name, step)
      self.objects.write_all({key: store.pack(self.commit)})
      self.written.set_result(None)
      self.on_written()
    head, _ = heads.read(self.objects, self.fragment)
    if head and (head.finished or head.taken.get(self.name, 0) >= step):
      found = heads.read_center(
        self.objects, self.fragment, head, base=self.base
      )
      self.result.set_result(found)
