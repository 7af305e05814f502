"""The view that a worker knows, and the calls that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import logging
import queue
import threading

from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View

_log = logging.getLogger(__name__)

Cancel = Callable[[], None]


class CurrentView:
  """The newest view that this worker knows.

  Attributes:
    changed: Guards the view, and is notified of each change.
    me: This worker, in its newest incarnation.
  """

  def __init__(self, me: Member):
    self.changed = threading.Condition()
    self.me = me
    self._view = View(0, ())
    # What is under way: the incarnation of the other one, and how to cancel.
    self._calls: dict[int, tuple[str, Cancel]] = {}
    self._next_call = 0
    self._callbacks: list[Callable[[View], None]] = []
    self._views: queue.SimpleQueue[View | None] = queue.SimpleQueue()
    self._is_closed = False
    threading.Thread(
      target=self._call_back, name="flaxshard_views", daemon=True
    ).start()

  @property
  def view(self) -> View:
    """The view."""
    return self._view

  @property
  def is_member(self) -> bool:
    """Whether this incarnation is a member."""
    return not self._is_closed and self.me in self._view.members

  @property
  def is_closed(self) -> bool:
    """Whether `close` was called."""
    return self._is_closed

  def others(self) -> list[Member]:
    """Returns the other members; none if this worker is no member."""
    with self.changed:
      if not self.is_member:
        return []
      return [m for m in self._view.members if m != self.me]

  def adopt(self, view: View) -> bool:
    """Replaces the view if another one is newer.

    Calls to workers that are no longer members are cancelled. An answer that
    they have given is not used: `check` fails from now on.

    Args:
      view: A view that is stored.

    Returns:
      Whether it was newer.
    """
    with self.changed:
      if view.epoch <= self._view.epoch or self._is_closed:
        return False
      was_member = self.is_member
      self._view = view
      self._views.put(view)
      if was_member or self.is_member:
        ids = ", ".join(map(str, view.worker_ids))
        _log.info(
          "worker %d: view %d: %s; members: %s",
          self.me.worker_id,
          view.epoch,
          view.reason,
          ids or "none",
        )
      cancels = self._obsolete_calls()
      self.changed.notify_all()
    for cancel in cancels:
      cancel()
    return True

  def become(self, me: Member) -> None:
    """Gives this worker a new incarnation, which is no member yet."""
    with self.changed:
      self.me = me
      cancels = self._obsolete_calls()
      self.changed.notify_all()
    for cancel in cancels:
      cancel()

  def check(self, me: Member, other: Member) -> None:
    """Raises unless this worker and another one are members.

    Args:
      me: This worker, when the call began.
      other: The other worker, when the call began.

    Raises:
      NotAMember: This worker is no member.
      PeerLost: The other one is no member.
    """
    if self._is_closed or self.me != me or me not in self._view.members:
      raise NotAMember(
        f"worker {me.worker_id} is no member of view {self._view.epoch}: "
        f"{self._view.reason}"
      )
    if other not in self._view.members:
      raise PeerLost(
        f"worker {other.worker_id} is no member of view {self._view.epoch}: "
        f"{self._view.reason}"
      )

  @contextlib.contextmanager
  def cancel_if_lost(
    self, me: Member, other: Member, cancel: Cancel
  ) -> Iterator[None]:
    """Cancels what is in the `with` block when one is no longer a member."""
    with self.changed:
      self.check(me, other)
      key = self._next_call
      self._next_call += 1
      self._calls[key] = (other.incarnation, cancel)
    try:
      yield
    finally:
      with self.changed:
        self._calls.pop(key, None)

  def on_view(self, callback: Callable[[View], None]) -> None:
    """Calls a function with each new view, from one thread."""
    self._callbacks.append(callback)

  def close(self) -> None:
    """Ends the thread, and cancels all calls."""
    with self.changed:
      self._is_closed = True
      self._views.put(None)
      cancels = self._obsolete_calls()
      self.changed.notify_all()
    for cancel in cancels:
      cancel()

  def _obsolete_calls(self) -> list[Cancel]:
    alive = {m.incarnation for m in self._view.members}
    if not self.is_member:
      alive = set()
    return [
      cancel
      for incarnation, cancel in self._calls.values()
      if incarnation not in alive
    ]

  def _call_back(self) -> None:
    while (view := self._views.get()) is not None:
      for callback in list(self._callbacks):
        try:
          callback(view)
        except Exception:
          _log.exception("a callback of view %d has failed", view.epoch)
