"""Keeps the view up to date: reads newer ones, and excludes silent members."""

from __future__ import annotations

from collections.abc import Callable
import logging
import threading
import time

from flaxshard.workers import proposals
from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.signs_of_life import SignsOfLife
from flaxshard.workers.view_log import View
from flaxshard.workers.view_log import ViewLog

_log = logging.getLogger(__name__)

# Seconds until an exclusion is tried again, and until a warning is repeated.
_RETRY_SECONDS = 0.5
_LOG_SECONDS = 30.0


class ViewWatch:
  """Watches the members and the log of views, from threads of its own.

  Args:
    current: The current view.
    log: The log of views.
    heartbeat: Seconds without a sign of life after which a worker is dead.
    quorum: Least number of members: a view with fewer is not proposed.
  """

  def __init__(
    self, current: CurrentView, log: ViewLog, heartbeat: float, quorum: int
  ):
    self._current = current
    self._view_log = log
    self._heartbeat = heartbeat
    self._quorum = quorum
    self._excluding = threading.Lock()
    self._warned = -_LOG_SECONDS

  def start(self, answer_requests: Callable[[], None]) -> None:
    """Looks for newer views in the log, and for requests, now and then.

    So a worker that is cut off learns that it was excluded.

    Args:
      answer_requests: Answers the requests of workers that want to join.
    """
    threading.Thread(
      target=self._poll,
      args=(answer_requests,),
      name="flaxshard_views_poll",
      daemon=True,
    ).start()

  def exclude(self, signs: SignsOfLife) -> None:
    """Excludes silent members, from a thread: storage may take its time."""
    if self._excluding.acquire(blocking=False):
      threading.Thread(
        target=self._exclude,
        args=(signs,),
        name="flaxshard_exclude",
        daemon=True,
      ).start()

  def _poll(self, answer_requests: Callable[[], None]) -> None:
    while not self._wait_until_closed(self._heartbeat / 2):
      if not self._current.is_member:
        continue
      try:
        view = self._view_log.latest()
        if view is not None:
          self._current.adopt(view)
        if self._current.is_member:
          answer_requests()
      except OSError as e:
        self._warn(f"the views cannot be read or written: {e}")

  def _wait_until_closed(self, seconds: float) -> bool:
    with self._current.changed:
      self._current.changed.wait_for(lambda: self._current.is_closed, seconds)
    return self._current.is_closed

  def _exclude(self, signs: SignsOfLife) -> None:
    try:
      before = self._current.view
      view = proposals.change(
        self._current,
        self._view_log,
        lambda view: (
          proposals.without_silent(
            view, signs.silence, self._heartbeat, self._quorum
          )
          if self._current.is_member
          else None
        ),
      )
      if view != before:
        signs.ping_now()
      else:
        self._warn_below_quorum(view, signs)
    except OSError as e:
      self._warn(f"a silent worker cannot be excluded: {e}")
      time.sleep(_RETRY_SECONDS)
    finally:
      self._excluding.release()

  def _warn_below_quorum(self, view: View, signs: SignsOfLife) -> None:
    silent = [
      str(member.worker_id)
      for member in view.members
      if signs.silence(member) >= self._heartbeat
    ]
    left = len(view.members) - len(silent)
    if self._current.is_member and left < self._quorum:
      self._warn(
        f"no sign of life from {', '.join(silent)}; waiting for them, because "
        f"without them there would be fewer than quorum={self._quorum}"
      )

  def _warn(self, text: str) -> None:
    now = time.monotonic()
    if now - self._warned >= _LOG_SECONDS:
      self._warned = now
      _log.warning("worker %d: %s", self._current.me.worker_id, text)
