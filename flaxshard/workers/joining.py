"""Makes a worker a member of the view."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import logging
import time
from typing import Any

from flaxshard.workers import admission
from flaxshard.workers import questions
from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.join_requests import JoinRequests
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View
from flaxshard.workers.view_log import ViewLog

_log = logging.getLogger(__name__)

Wait = Callable[[float], None]


class Joining:
  """One attempt to join.

  Args:
    current: The current view; its `me` is to join.
    log: The log of views.
    transport: Has the method `ask`.
    num_workers: Number of workers of the run.
    heartbeat: Seconds without a sign of life after which a worker is dead.
    past: Earlier incarnations of this worker in this process.
    wait: Waits for some seconds, or raises.
  """

  def __init__(
    self,
    current: CurrentView,
    log: ViewLog,
    transport: Any,
    num_workers: int,
    heartbeat: float,
    past: set[str],
    wait: Wait,
  ):
    self._current = current
    self._me = current.me
    self._log = log
    self._transport = transport
    self._num_workers = num_workers
    self._heartbeat = heartbeat
    self._past = past
    self._wait = wait
    self._taken_since: float | None = None
    self._logged = ""

  def run(self, started: bool, timeout: float | None) -> View:
    """Joins; see `Membership.join`."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
      latest = self._log.latest() or View(0, ())
      self._current.adopt(latest)
      if self._current.is_member:
        return self._current.view
      refusal = self._ask_members(latest, started)
      if self._current.is_member:
        return self._current.view
      if refusal is None:
        continue
      if refusal != self._logged:
        _log.warning("worker %d cannot join: %s", self._me.worker_id, refusal)
        self._logged = refusal
      if end is not None and time.monotonic() > end:
        raise TimeoutError(
          f"worker {self._me.worker_id} could not join within {timeout:g} s: "
          f"{refusal}."
        )
      self._wait(min(self._heartbeat / 10, 0.5))

  def _ask_members(self, latest: View, started: bool) -> str | None:
    """Asks the members to admit this worker, or takes over from dead ones.

    Returns:
      Why it was refused; None if the view has changed.
    """
    others = [
      m
      for m in latest.members
      if m.incarnation not in self._past and not admission.has_ended(m)
    ]
    alive = self._probe(others)
    if alive:
      return self._ask_alive(alive, started)
    if others and self._is_answered(latest, others):
      addresses = ", ".join(m.address for m in others)
      return f"the members live, but cannot be reached at {addresses}"
    if (self._log.latest() or View(0, ())).epoch == latest.epoch:
      view = latest.next([self._me], self._describe(latest), started)
      self._current.adopt(self._log.propose(view))
    return None

  def _probe(self, members: list[Member]) -> list[Member]:
    """Returns those of some workers that answer."""
    timeout = min(max(self._heartbeat / 2, 1.0), 5.0)
    return list(
      questions.ask_all(
        self._transport,
        members,
        {"kind": "probe"},
        timeout,
        until_first=True,
      )
    )

  def _ask_alive(self, alive: list[Member], started: bool) -> str:
    # Its own index last: another process that uses it knows least of the rest.
    alive.sort(key=lambda m: (m.worker_id == self._me.worker_id, m.worker_id))
    refusals = []
    is_taken = False
    for member in alive:
      question = {
        "kind": "join",
        "member": dataclasses.asdict(self._me),
        "num_workers": self._num_workers,
        "started": started,
      }
      answers = questions.ask_all(
        self._transport, [member], question, 2 * self._heartbeat + 5.0
      )
      answer = answers.get(member, {"refused": "no answer"})
      if answer.get("view") is not None:
        self._current.adopt(View.from_fields(answer["view"]))
        return "the view has changed meanwhile"
      if answer.get("error"):
        raise ValueError(answer["refused"])
      is_taken |= answer.get("taken", False)
      refusals.append(answer["refused"])
    self._check_taken(is_taken, refusals)
    return "; ".join(dict.fromkeys(refusals))

  def _check_taken(self, is_taken: bool, refusals: list[str]) -> None:
    """Raises if another worker with this index lives for too long."""
    now = time.monotonic()
    if not is_taken:
      self._taken_since = None
    elif self._taken_since is None:
      self._taken_since = now
    elif now - self._taken_since > 2 * self._heartbeat:
      raise ValueError(
        f"{refusals[-1]}. Each worker needs an index of its own."
      )

  def _is_answered(self, latest: View, others: list[Member]) -> bool:
    """Returns whether a member lives, as it answers in the directory, or late.

    Members look for requests every half of a heartbeat.
    """
    requests = JoinRequests(self._log.directory)
    _log.warning(
      "worker %d: no member of view %d answers; waiting %.1f s for a sign of "
      "life in %s",
      self._me.worker_id,
      latest.epoch,
      self._heartbeat + 1.0,
      self._log.directory,
    )
    requests.add(self._me)
    try:
      end = time.monotonic() + self._heartbeat + 1.0
      while time.monotonic() < end:
        if requests.is_answered(self._me):
          return True
        if self._probe(others):
          return True
        if (self._log.latest() or View(0, ())).epoch != latest.epoch:
          return False
        self._wait(min(self._heartbeat / 10, 0.5))
      return requests.is_answered(self._me)
    finally:
      requests.remove(self._me)

  def _describe(self, latest: View) -> str:
    if not latest.members:
      return f"worker {self._me.worker_id} is the first one"
    lost = ", ".join(map(str, latest.worker_ids))
    return f"worker {self._me.worker_id} goes on alone: {lost} do not answer"
