"""Admission of workers that want to join, by a member."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from flaxshard.core import local_processes
from flaxshard.workers import proposals
from flaxshard.workers import questions
from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.join_requests import JoinRequests
from flaxshard.workers.signs_of_life import SignsOfLife
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View
from flaxshard.workers.view_log import ViewLog

_log = logging.getLogger(__name__)


class Admission:
  """Admits workers to the view.

  Args:
    current: The current view.
    log: The log of views.
    transport: Has the method `ask`.
    signs: Says who is silent.
    num_workers: Number of workers of the run.
    heartbeat: Seconds without a sign of life after which a worker is dead.
  """

  def __init__(
    self,
    current: CurrentView,
    log: ViewLog,
    transport: Any,
    signs: SignsOfLife,
    num_workers: int,
    heartbeat: float,
  ):
    self._current = current
    self._log = log
    self._transport = transport
    self._signs = signs
    self._num_workers = num_workers
    self._heartbeat = heartbeat
    self._requests = JoinRequests(log.directory)

  def admit(self, question: dict[str, Any]) -> dict[str, Any]:
    """Answers a worker that wants to join.

    Args:
      question: Its `member` and `num_workers`, and whether the run has
        `started`.

    Returns:
      The view with it as `view`, or why it was refused as `refused`; `error`
      says that trying again is useless, `taken` that its index is.
    """
    newcomer = Member(**question["member"])
    if question["num_workers"] != self._num_workers:
      return {
        "refused": f"worker {newcomer.worker_id} has num_workers="
        f"{question['num_workers']}, worker {self._current.me.worker_id} has "
        f"num_workers={self._num_workers}.",
        "error": True,
      }
    if (found := self._find_obstacle(newcomer)) is not None:
      return found
    unreachable = self._find_unreachable(newcomer)
    if unreachable is not None:
      return {"refused": unreachable}

    def add(view: View) -> View | None:
      if not self._current.is_member or newcomer in view.members:
        return None
      if self._find_obstacle(newcomer) is not None:
        return None
      kept = [m for m in view.members if m.worker_id != newcomer.worker_id]
      return view.next(
        [*kept, newcomer],
        f"worker {newcomer.worker_id} has joined",
        # A worker that comes back knows that the run has begun.
        view.started or question["started"],
      )

    try:
      view = proposals.change(self._current, self._log, add)
    except OSError as e:
      return {
        "refused": f"worker {self._current.me.worker_id} cannot write the "
        f"views: {e}"
      }
    if newcomer not in view.members:
      return {"refused": "the view has changed meanwhile"}
    self._signs.ping_now()
    return {"view": view.to_fields()}

  def reaches(self, member: Member) -> bool:
    """Returns whether this worker reaches another one."""
    question = {"kind": "probe"}
    return bool(
      questions.ask_all(self._transport, [member], question, self._patience)
    )

  def answer_requests(self) -> None:
    """Answers those that cannot reach any member.

    Raises:
      OSError: The directory cannot be read or written.
    """
    for worker_id, address in self._requests.answer_all():
      _log.warning(
        "worker %d at %s wants to join, and cannot reach worker %d at %s: is "
        "the network cut, or an address wrong? FLAXSHARD_WORKER_ADDRESS says "
        "what a worker advertises.",
        worker_id,
        address,
        self._current.me.worker_id,
        self._current.me.address,
      )

  @property
  def _patience(self) -> float:
    return max(self._heartbeat / 2, 1.0)

  def _find_obstacle(self, newcomer: Member) -> dict[str, Any] | None:
    view = self._current.view
    if not self._current.is_member:
      return {"refused": f"no member of view {view.epoch}"}
    other = view.member(newcomer.worker_id)
    if other is None or other == newcomer or has_ended(other):
      return None
    if other != self._current.me and self._is_silent(other):
      return None
    return {
      "refused": f"worker_id={newcomer.worker_id} is in use by a worker at "
      f"{other.address}, which lives",
      "taken": True,
    }

  def _is_silent(self, member: Member) -> bool:
    # Pings are at most a fifth of a heartbeat apart: two were not answered.
    return self._signs.silence(member) > 0.4 * self._heartbeat

  def _find_unreachable(self, newcomer: Member) -> str | None:
    """Returns who does not reach a worker, which would be excluded again."""
    me = self._current.me
    unreachable = [] if self.reaches(newcomer) else [me.worker_id]
    if not unreachable:
      others = [
        m
        for m in self._current.others()
        if m.worker_id != newcomer.worker_id and not self._is_silent(m)
      ]
      question = {"kind": "reach", "member": dataclasses.asdict(newcomer)}
      # Those that do not answer may be dead.
      answers = questions.ask_all(
        self._transport, others, question, 2 * self._patience
      )
      unreachable = [
        m.worker_id for m, answer in answers.items() if not answer["reaches"]
      ]
    if not unreachable:
      return None
    return (
      f"worker{'s' * (len(unreachable) > 1)} "
      f"{', '.join(map(str, sorted(unreachable)))} cannot reach worker "
      f"{newcomer.worker_id} at {newcomer.address}"
    )


def has_ended(member: Member) -> bool:
  """Returns whether a member's process is known to have ended."""
  space, _, pid = member.process.rpartition(":")
  return pid.isdecimal() and local_processes.has_ended(space, int(pid))
