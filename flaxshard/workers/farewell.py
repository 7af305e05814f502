"""Waits until all members have done something, such as their last commit."""

from __future__ import annotations

from collections.abc import Callable, Collection
import time
from typing import Any

from flaxshard.workers import membership
from flaxshard.workers.messages import Message

_POLL_SECONDS = 0.05
# A call waits for a worker that is dead as long as it is a member.
_CALL_SECONDS = 1.0
# Until a worker that was not done is asked again.
_ASK_SECONDS = 1.0


class Farewell:
  """Waits until all members are done.

  Args:
    peers: The other workers.
    name: What they are done with: the `"start"`, `"commits"`, or `"pulls"` of
      the last center.
  """

  def __init__(self, peers: Any, name: str):
    self._peers = peers
    self._method = f"done_with_{name}"
    # By incarnation: a worker that comes back is not done.
    self._done: set[str] = set()
    self._own = ""
    peers.register(self._method, self._handle)

  def is_done(self, incarnation: str) -> bool:
    """Returns whether a worker has said that it is done.

    Args:
      incarnation: Its incarnation.
    """
    return incarnation in self._done

  def mark_done(self) -> None:
    """Answers those who ask that this worker is done."""
    self._own = self._peers.incarnation

  def wait(
    self,
    wait: Callable[[float], None],
    among: Collection[str] | None = None,
  ) -> None:
    """Says that this worker is done, and waits for the others.

    Args:
      wait: Waits for some seconds, or raises if this worker shall stop.
      among: The incarnations to wait for, as long as they are members; None:
        all members.

    Raises:
      NotAMember: The others have lost this worker.
    """
    told: dict[str, float] = {}
    while True:
      members = {m.worker_id: m for m in self._peers.view.members}
      me = members.pop(self._peers.worker_id, None)
      if me is None:
        raise membership.NotAMember("the others have lost this worker")
      others = {
        m.incarnation: k
        for k, m in members.items()
        if among is None or m.incarnation in among
      }
      self._own = me.incarnation
      for incarnation, k in others.items():
        if not self._is_next(incarnation, told):
          continue
        message = Message({"incarnation": me.incarnation}, b"")
        try:
          answer = self._peers.call(
            k, self._method, message, timeout=_CALL_SECONDS
          )
        except (membership.PeerLost, membership.ViewChanged, TimeoutError):
          break
        told[incarnation] = time.monotonic()
        if answer.fields["done"] == incarnation:
          # It may have waited before this worker came, and not told it.
          self._done.add(incarnation)
      else:
        if others.keys() <= self._done:
          return
      wait(_POLL_SECONDS)

  def _is_next(self, incarnation: str, told: dict[str, float]) -> bool:
    """Returns whether to call a worker now."""
    if incarnation not in told:
      return True
    is_old = time.monotonic() - told[incarnation] > _ASK_SECONDS
    return is_old and incarnation not in self._done

  def _handle(self, sender: int, message: Message) -> Message:
    del sender
    self._done.add(message.fields["incarnation"])
    return Message({"done": self._own}, b"")
