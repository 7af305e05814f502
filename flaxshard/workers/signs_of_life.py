"""Pings the other members, and measures how long each has been silent."""

from __future__ import annotations

from collections.abc import Callable
import queue
import threading
import time
from typing import Any

from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View


class SignsOfLife:
  """Pings all other members, from a thread.

  Only answers count: they prove that both directions of a link work. Time in
  which this process did not run, as when it was stopped, does not count.

  Args:
    current: The current view.
    transport: Has the method `ask`.
    heartbeat: Seconds without a sign of life after which a worker is dead.
    on_silence: Is called with this object, again and again, while a member is
      silent for longer.
  """

  def __init__(
    self,
    current: CurrentView,
    transport: Any,
    heartbeat: float,
    on_silence: Callable[[SignsOfLife], None],
  ):
    self._current = current
    self._transport = transport
    self._heartbeat = heartbeat
    # Often: the sides of a split network must know alike who is silent, as a
    # minority waits for a second longer.
    self._interval = min(heartbeat / 5, 0.5)
    self._on_silence = on_silence
    self._silence: dict[str, float] = {}  # seconds, by incarnation
    self._mutex = threading.Lock()
    # Incarnations that have answered; None to ping at once, or to end.
    self._answered: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(
      target=self._run, name="flaxshard_pings", daemon=True
    ).start()

  def silence(self, member: Member) -> float:
    """Returns how long a member has been silent, in seconds."""
    with self._mutex:
      return self._silence.get(member.incarnation, 0.0)

  def ping_now(self) -> None:
    """Pings all other members at once, such as to spread a new view."""
    self._answered.put(None)

  def _run(self) -> None:
    tick = min(self._heartbeat / 20, 0.2)
    last = time.monotonic()
    next_ping = last
    addresses: dict[str, str] = {}  # by incarnation
    while not self._current.is_closed:
      answered = self._collect_answers(tick)
      now = time.monotonic()
      # If this process was stopped, the others could not reach it: the answers
      # that they have sent since are read before the next tick.
      elapsed = min(now - last, self._heartbeat / 5)
      last = now
      others = self._current.others()
      with self._mutex:
        self._silence = {
          m.incarnation: 0.0
          if m.incarnation in answered
          else self._silence.get(m.incarnation, 0.0) + elapsed
          for m in others
        }
        is_silent = max(self._silence.values(), default=0) >= self._heartbeat
      # If this worker was excluded, it still asks these to join.
      members = self._current.view.members
      found = {m.incarnation: m.address for m in members}
      for incarnation in addresses.keys() - found.keys():
        if addresses[incarnation] not in found.values():
          self._transport.forget(addresses[incarnation])
      is_new = found.keys() - addresses.keys()
      addresses = found
      if now >= next_ping or is_new or None in answered:
        next_ping = now + self._interval
        for member in others:
          self._ping(member)
      if is_silent:
        self._on_silence(self)

  def _collect_answers(self, seconds: float) -> set[str | None]:
    answered: set[str | None] = set()
    try:
      answered.add(self._answered.get(timeout=seconds))
      while True:
        answered.add(self._answered.get_nowait())
    except queue.Empty:
      return answered

  def _ping(self, member: Member) -> None:
    def done(answer: dict[str, Any] | None) -> None:
      if answer is None:
        return
      if answer["incarnation"] == member.incarnation:
        self._answered.put(member.incarnation)
      if answer["view"] is not None:
        self._current.adopt(View.from_fields(answer["view"]))

    question = {
      "kind": "ping",
      "to": member.incarnation,
      "view": self._current.view.to_fields(),
    }
    self._transport.ask(member.address, question, self._heartbeat, done)
