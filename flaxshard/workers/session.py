"""The part of a worker in a run, from `start` to `finish`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import hashlib
import logging
import os
import threading
from typing import Any

from flaxshard.state import host_commits
from flaxshard.workers import center_copies
from flaxshard.workers import facts as facts_lib
from flaxshard.workers import membership as membership_lib
from flaxshard.workers.background import Background
from flaxshard.workers.barrier import Barrier
from flaxshard.workers.barrier import Hello
from flaxshard.workers.center_pulls import CenterPulls
from flaxshard.workers.commit_log import CommitLog
from flaxshard.workers.commit_log import CommitRecord
from flaxshard.workers.exchange import create_exchange
from flaxshard.workers.farewell import Farewell
from flaxshard.workers.member_log import MemberLog
from flaxshard.workers.messages import Message
from flaxshard.workers.pending_commits import Lost
from flaxshard.workers.pending_commits import PendingCommits
from flaxshard.workers.programs import Programs
from flaxshard.workers.progress import Progress
from flaxshard.workers.schedule import StepCounter
from flaxshard.workers.waiting import Stopped
from flaxshard.workers.waiting import Waiting
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers.agn import AGN

_log = logging.getLogger("flaxshard")

PyTree = Any

# Seconds that a worker waits, as it leaves, until another one has its last
# updates.
_LEAVE_SECONDS = 2.0

_EXCLUDED = "the others have lost it, as they had no sign of life"


class Session:
  """The part of a run that one worker takes.

  Args:
    directory: The directory of all workers.
    worker_id: The index of this worker.
    num_workers: The number of workers.
    start_timeout: Seconds to wait for missing workers.
    should_stop: Whether this worker shall stop.
    agn: The wrapper of its state.
  """

  def __init__(
    self,
    directory: str,
    worker_id: int,
    num_workers: int,
    start_timeout: float,
    should_stop: Callable[[], bool],
    agn: AGN,
  ):
    self._worker_id = worker_id
    self._num_workers = num_workers
    self._start_timeout = start_timeout
    self._should_stop = should_stop
    self._agn = agn
    self._log = CommitLog(os.path.join(directory, str(worker_id)))
    self._is_finished = False
    self._closed = threading.Event()
    self._background = Background(f"flaxshard_commits_{worker_id}")
    self._exchange: Any = None
    self._peers = membership_lib.Membership(
      os.path.join(directory, "views"),
      worker_id,
      num_workers,
      heartbeat=agn.heartbeat,
      quorum=agn.quorum,
    )

  # -- Start.

  def start(self, state: PyTree, facts: Mapping[str, Any]) -> PyTree:
    """Joins the other workers; see `Worker.start`."""
    agn, peers = self._agn, self._peers
    center = host_commits.center_of(state)
    local_step = int(host_commits.local_step(state))
    copy = center_copies.pack(center, local_step=local_step, source="")
    commits = int(center.commits)
    hello = Hello(
      facts_lib.describe(agn, center, self._num_workers, facts),
      commits,
      local_step,
      hashlib.sha256(copy.data).hexdigest(),
    )
    programs = Programs(state)
    # Compiled before others wait for this worker.
    programs.warm(state, agn_schedule.groups_of(agn))
    self._progress = progress = Progress(
      StepCounter(agn, local_step), commits, local_step, local_step
    )
    self._copies = center_copies.CenterCopies(peers)
    self._waiting = Waiting(
      agn, peers, self._copies, progress, self._should_stop, self._closed
    )
    # One that joins may have an old center.
    self._join_wait = functools.partial(self._waiting.sleep, None)
    self._barrier = Barrier(
      peers, hello, agn.quorum, agn.commit != "sequential"
    )
    self._ready = Farewell(peers, "start")
    self._farewell = Farewell(peers, "commits")
    self._last_farewell = Farewell(peers, "pulls")
    members = MemberLog(self._worker_id, self._farewell.is_done)
    peers.on_view(members.follow)
    self._exchange = create_exchange(peers, agn, state, self._farewell.is_done)
    self._pulls = CenterPulls(
      peers,
      agn,
      self._exchange,
      self._copies,
      programs,
      progress,
      self._waiting,
      self._background,
    )
    self._pending = PendingCommits(
      self._worker_id,
      agn,
      self._exchange,
      programs,
      progress,
      self._waiting,
      self._background,
      self._log,
    )
    while True:
      try:
        self._copies.hold(commits)
        self._peers.join(wait=self._join_wait)
        return self._begin(state, center, copy)
      except membership_lib.NotAMember:
        _log.warning(
          "worker %d: %s, at its start: it joins again",
          self._worker_id,
          _EXCLUDED,
        )
      except Stopped:
        raise InterruptedError(
          "Worker: should_stop has ended the wait for other workers."
        ) from None
      finally:
        self._copies.offer(None)

  def _begin(self, state: PyTree, center: Any, copy: Message) -> PyTree:
    """Waits for the others, and takes the newest center over.

    Args:
      state: The state.
      center: Its center.
      copy: The center as a message.
    """
    wait = lambda seconds: self._waiting.sleep(state, seconds)
    verdict = self._barrier.agree(self._start_timeout, wait)
    if verdict is None:
      self._compare()
      state = self._pulls.take_over(state)
      # Those who wait for all that were there at the start may wait for this.
      self._ready.mark_done()
      return state
    self._copies.release()
    if self._worker_id not in verdict.behind:
      self._exchange.begin(center)
    if not verdict.behind:
      return state
    if verdict.source == self._worker_id:
      self._copies.offer(copy)
    if self._worker_id in verdict.behind:
      state = self._pulls.take_over_saved(state, verdict.source)
    # No owner receives a commit before it has taken the center over.
    self._ready.wait(wait, verdict.incarnations)
    return state

  def _compare(self) -> None:
    """Compares this worker with a member of a run that is under way."""
    for other in self._others():
      try:
        self._barrier.compare_with(other)
        break
      except (
        membership_lib.PeerLost,
        membership_lib.ViewChanged,
        TimeoutError,
      ):
        continue

  def _others(self) -> list[int]:
    return [k for k in self._peers.view.worker_ids if k != self._worker_id]

  # -- Commits.

  @property
  def clock(self) -> int:
    """The local step of this worker, if its last steps were not skipped."""
    return self._progress.counter.clock

  @property
  def missed_steps(self) -> int:
    """Local steps that the run has taken without this worker."""
    return self._progress.missed_steps

  @property
  def members(self) -> tuple[int, ...]:
    """The workers that take part now."""
    return tuple(sorted([*self._others(), self._worker_id]))

  def records(self) -> list[CommitRecord]:
    """Returns the commits since the last call."""
    return self._log.drain()

  def commit(self, state: PyTree) -> PyTree:
    """Commits if a commit is due; see `Worker.commit`."""
    progress = self._progress
    self._waiting.serve(state)
    try:
      if self._peers.view.member(self._worker_id) is None:
        raise Lost(state, membership_lib.NotAMember(_EXCLUDED))
      if progress.sent and self._waiting.should_stop:
        return self._pending.stop(state)
      if not progress.counter.tick():
        return state
      local_step = int(host_commits.local_step(state))
      if not progress.counter.look(local_step):
        return state
      state = self._pending.run_due(state, local_step)
      progress.counter.resume()
      return state
    except Lost as e:
      return self._come_back(e.state, e.reason)

  def settle(self, state: PyTree) -> PyTree:
    """Waits for commits under way, and applies them; see `Worker.settle`."""
    state = self._drain(state)
    try:
      return self._pulls.with_newest(state)
    except Stopped:
      return state
    except membership_lib.NotAMember as e:
      return self._come_back(state, e)

  def _drain(self, state: PyTree) -> PyTree:
    try:
      return self._pending.drain(state)
    except Lost as e:
      return self._come_back(e.state, e.reason)

  def _come_back(self, state: PyTree, reason: Exception) -> PyTree:
    """Joins again after the others have lost this worker, or left it behind."""
    if self._closed.is_set():
      return state
    progress, period = self._progress, self._agn.communication_period
    local_step = int(host_commits.local_step(state))
    sent_at = progress.sent[0].local_step if progress.sent else None
    last = progress.last_commit_step
    if sent_at is not None:
      last = min(last, sent_at) - period
    _log.warning(
      "worker %d: %s: its last %d local steps are lost. It goes on from the "
      "others' center",
      self._worker_id,
      reason,
      local_step - max(last, progress.first_step),
    )
    is_member = not isinstance(reason, membership_lib.NotAMember)
    # By a commit whose result nobody has, the centers of others may be as old.
    least_step = sent_at if is_member and sent_at is not None else 0
    progress.counter.local_step = local_step
    try:
      self._pending.end(state)
      while True:
        try:
          if not is_member:
            self._copies.hold(progress.commits)
            self._peers.join(started=True, wait=self._join_wait)
          return self._pulls.take_over(state, least_step=least_step)
        except membership_lib.NotAMember:
          is_member = False
    except Stopped:
      return state
    finally:
      self._copies.release()
      # Up to here they tell what the center lacks.
      progress.sent.clear()

  # -- Finish.

  def finish(self, state: PyTree) -> PyTree:
    """Waits for the others; see `Worker.finish`."""
    wait = lambda seconds: self._waiting.sleep(state, seconds)
    is_sequential, is_lost = self._agn.commit == "sequential", False
    while True:
      try:
        if is_lost:
          self._peers.join(started=True, wait=self._join_wait)
          is_lost = False
        state = self._drain(state)
        self._farewell.wait(wait)
        state = self._pulls.with_newest(state)
        if is_sequential:
          # An owner that has left answers nobody.
          self._last_farewell.wait(wait)
        self._is_finished = True
        return state
      except Stopped:
        return state
      except membership_lib.NotAMember:
        if self._closed.is_set():
          return state
        _log.warning("worker %d: %s, at its end", self._worker_id, _EXCLUDED)
        if not is_sequential:
          # Its center has all of its commits.
          return state
        is_lost = True

  def close(self) -> None:
    """Leaves the others, and ends threads and connections."""
    self._closed.set()
    self._background.close()
    if self._exchange is not None and not self._is_finished:
      self._exchange.leave(_LEAVE_SECONDS)
    self._peers.leave()
    self._peers.close()
    if self._exchange is not None:
      self._exchange.close()
