"""The exchange of commits for centers, in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import logging
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from flaxshard.center import heads
from flaxshard.center.heads import Head
from flaxshard.center.store import Objects
from flaxshard.center.store import pack
from flaxshard.center.store import pause_after
from flaxshard.center.train_states import Center

_log = logging.getLogger("flaxshard")

# The pause between two looks at the head that a commit is to come into, as a
# multiple of what a look takes.
_PAUSE_LOOKS = 0.5

# Seconds after which a wait asks whether to stop, and those of a last write.
_ASK_SECONDS, _LAST_WRITE_SECONDS = 0.1, 5.0


class _Sent(NamedTuple):
  """A commit on its way: its step and version, and its thread's result."""

  step: int
  version: int
  time: float
  written: threading.Event
  result: futures.Future[tuple[Head, Center]]


class Exchange:
  """The commits of one start of a worker that are under way.

  There is at most one of each fragment.

  Args:
    objects: The store.
    name: The start of the worker, `worker-start`.
    deadline: Seconds to wait for a result.
    on_written: Called when a commit is in the store.
  """

  def __init__(
    self,
    objects: Objects,
    name: str,
    deadline: float,
    on_written: Callable[[], None],
  ):
    self._objects = objects
    self._name = name
    self._deadline = deadline
    self._on_written = on_written
    self._sent: dict[int, _Sent] = {}
    # Fragments whose commit has missed the deadline: nobody waits for it.
    self._late: set[int] = set()
    self._results: list[tuple[float, int, int]] = []
    self._closed = threading.Event()

  @property
  def under_way(self) -> tuple[int, ...]:
    """The fragments whose commit has no result yet."""
    return tuple(self._sent)

  def send(
    self,
    fragment: int,
    commit: dict[str, Any],
    base: tuple[int, dict[str, np.ndarray]] | None,
  ) -> None:
    """Starts to write a commit and to wait for the center that it comes into.

    Args:
      fragment: The number of the fragment.
      commit: The commit.
      base: See `heads.read_center`.
    """
    written = threading.Event()
    result: futures.Future[tuple[Head, Center]] = futures.Future()

    def run() -> None:
      try:
        result.set_result(self._run(fragment, commit, base, written))
      except BaseException as e:
        result.set_exception(e)

    # Not a pool, whose threads a program waits for at its end.
    threading.Thread(target=run, daemon=True).start()
    now = time.monotonic()
    step, version = commit["step"], commit["version"]
    self._sent[fragment] = _Sent(step, version, now, written, result)

  def receive(
    self, fragment: int, wait: bool, ask: Callable[[], bool]
  ) -> tuple[Head, Center] | None:
    """Returns the center that a commit has come into.

    Args:
      fragment: The number of the fragment.
      wait: Whether to wait until the deadline, once for each commit.
      ask: Called a few times a second; once it returns True, the wait ends
        soon.

    Returns:
      The head and the center; None if there is no commit under way or no result
      yet.
    """
    sent = self._sent.get(fragment)
    if sent is None:
      return None
    wait = wait and fragment not in self._late
    end = time.monotonic() + (self._deadline if wait else 0.0)
    stops = False
    while not sent.result.done() and time.monotonic() < end:
      futures.wait([sent.result], timeout=_ASK_SECONDS)
      if ask() and not stops:
        stops, end = True, min(end, time.monotonic() + _LAST_WRITE_SECONDS)
    if not sent.result.done():
      if wait and not stops:
        self._late.add(fragment)
        _log.warning(
          "worker %s goes on alone: its commit of local step %d is not in the "
          "center after deadline=%g seconds",
          self._name.partition("-")[0],
          sent.step,
          self._deadline,
        )
      return None
    del self._sent[fragment]
    self._late.discard(fragment)
    head, center = sent.result.result()
    staleness = max(center.version - sent.version - 1, 0)
    seconds = time.monotonic() - sent.time
    self._results.append((seconds, staleness, head.workers))
    return head, center

  def metrics(self) -> dict[str, float]:
    """Returns figures of the results since the last call; `{}` without any."""
    if not self._results:
      return {}
    seconds, staleness, workers = zip(*self._results, strict=True)
    self._results = []
    num_bytes, self._objects.num_bytes = self._objects.num_bytes, 0
    return {
      "commit_workers": float(workers[-1]),
      "commit_staleness": float(np.mean(staleness)),
      "commit_megabytes": num_bytes / 1e6,
      "commit_seconds": float(np.mean(seconds)),
    }

  def retry(self) -> None:
    """Waits again for commits that have missed the deadline."""
    self._late.clear()

  def wait_until_written(self, ask: Callable[[], bool]) -> None:
    """Waits until all commits are in the store: the end comes without them.

    Args:
      ask: See `receive`.

    Raises:
      StoreError: The store cannot be written for `deadline` seconds.
    """
    for sent in self._sent.values():
      while not sent.written.wait(_ASK_SECONDS) and not ask():
        self._objects.check(self._deadline)

  def drop(self) -> None:
    """Forgets the commits under way: the run has ended without them."""
    self._sent.clear()

  def close(self) -> None:
    """Ends the threads, after commits that are being written."""
    for sent in self._sent.values():
      sent.written.wait(_LAST_WRITE_SECONDS)
    self._closed.set()

  def _run(
    self,
    fragment: int,
    commit: dict[str, Any],
    base: Any,
    written: threading.Event,
  ) -> tuple[Head, Center]:
    """Writes a commit, and returns the center that it has come into."""
    objects, step = self._objects, commit["step"]
    key = f"commit/{fragment}/{self._name}/{step:09d}"
    with objects.patient(self._closed):
      objects.write_all({key: pack(commit)})
      written.set()
      self._on_written()
      while True:
        asked = time.monotonic()
        head, _ = heads.read(objects, fragment)
        if head is not None and (
          head.taken.get(self._name, 0) >= step or head.finished
        ):
          return heads.read_center(objects, fragment, head, base=base)
        if self._closed.wait(pause_after(asked, _PAUSE_LOOKS)):
          raise futures.CancelledError
