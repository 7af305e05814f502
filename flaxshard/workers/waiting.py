"""Waits for other workers, and answers their requests meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
import threading
import time
from typing import Any

from flaxshard.state import host_commits
from flaxshard.workers import center_copies
from flaxshard.workers.center_copies import CenterCopies
from flaxshard.workers.peers import Peers
from flaxshard.workers.progress import Progress
from flaxshard.wrappers.agn import AGN

PyTree = Any

# Seconds between two looks at requests of others, and at `should_stop`.
_LOOK_SECONDS = 0.05


class Stopped(Exception):
  """The worker shall stop, and does not wait on."""


class Waiting:
  """The waits of one worker's main thread.

  Only this thread may read the state: a step donates it. So it answers those
  who ask for the center, wherever it waits.

  Args:
    agn: The wrapper.
    peers: The other workers.
    copies: The requests for the center.
    progress: The progress of the worker.
    should_stop: Whether it shall stop.
    closed: Set when another thread closes this worker.
  """

  def __init__(
    self,
    agn: AGN,
    peers: Peers,
    copies: CenterCopies,
    progress: Progress,
    should_stop: Callable[[], bool],
    closed: threading.Event,
  ):
    self._agn = agn
    self._peers = peers
    self._copies = copies
    self._progress = progress
    self._should_stop = should_stop
    self._closed = closed

  @property
  def should_stop(self) -> bool:
    """Whether this worker shall stop, or was closed by another thread."""
    return self._closed.is_set() or self._should_stop()

  def serve(self, state: PyTree) -> None:
    """Answers requests for the center of this worker.

    Args:
      state: Its state.
    """
    self._copies.forget_old()
    if not self._copies.is_wanted:
      return
    progress = self._progress
    steps_per_call = progress.counter.steps_per_call
    # A commit that is under way is not in the center yet. Who starts from it
    # begins before that commit, and gets its result as well.
    if progress.sent:
      local_step = progress.sent[0].local_step - steps_per_call
    else:
      local_step = int(host_commits.local_step(state))
      if local_step > progress.last_commit_step:
        # Nor is one that is due now, and will be sent.
        is_due = bool(host_commits.due(self._agn, local_step))
        local_step -= is_due * steps_per_call
    self._copies.answer(
      lambda: center_copies.pack(
        host_commits.center_of(state),
        local_step=local_step,
        source=self._peers.incarnation,
      )
    )

  def sleep(self, state: PyTree | None, seconds: float) -> None:
    """Waits for some seconds.

    Args:
      state: The state of this worker; None: requests are not answered.
      seconds: The time.

    Raises:
      Stopped: This worker shall stop.
    """
    if self.should_stop:
      raise Stopped
    if state is not None:
      self.serve(state)
    time.sleep(seconds)

  def wait_for(
    self,
    result: futures.Future[Any],
    state: PyTree | None,
    grace: float = 0.0,
  ) -> Any:
    """Waits for a result.

    Args:
      result: The future result.
      state: The state of this worker; None: requests are not answered.
      grace: Seconds to wait when this worker shall stop.

    Raises:
      Stopped: This worker shall stop.
    """
    end = None
    while not futures.wait([result], _LOOK_SECONDS).done:
      if state is not None:
        self.serve(state)
      if self.should_stop:
        end = end or time.monotonic() + grace
        if self._closed.is_set() or time.monotonic() >= end:
          raise Stopped
    return result.result()
