"""Takes over the center of other workers."""

from __future__ import annotations

from collections.abc import Sequence
import logging
from typing import Any

from flaxshard.state import host_commits
from flaxshard.workers import center_copies
from flaxshard.workers.background import Background
from flaxshard.workers.center_copies import CenterCopies
from flaxshard.workers.exchange import Exchange
from flaxshard.workers.peers import Peers
from flaxshard.workers.programs import Programs
from flaxshard.workers.progress import Progress
from flaxshard.workers.waiting import Waiting
from flaxshard.wrappers.agn import AGN

_log = logging.getLogger("flaxshard")

PyTree = Any

# Seconds that a worker that shall stop waits for the newest center, to save it.
_LAST_PULL_SECONDS = 5.0


class CenterPulls:
  """Brings a worker to the center of the others.

  All methods raise `NotAMember` if the others have lost this worker, and
  `Stopped` if it shall stop.

  Args:
    peers: The other workers.
    agn: The wrapper.
    exchange: The commits.
    copies: Requests copies of centers.
    programs: The compiled functions.
    progress: The progress of this worker.
    waiting: Waits.
    background: The thread of commits.
  """

  def __init__(
    self,
    peers: Peers,
    agn: AGN,
    exchange: Exchange,
    copies: CenterCopies,
    programs: Programs,
    progress: Progress,
    waiting: Waiting,
    background: Background,
  ):
    self._peers = peers
    self._is_sequential = agn.commit == "sequential"
    self._exchange = exchange
    self._copies = copies
    self._programs = programs
    self._progress = progress
    self._waiting = waiting
    self._background = background

  def take_over_saved(self, state: PyTree, source: int) -> PyTree:
    """Returns the state with the center that a run starts again from.

    Args:
      state: The state.
      source: The worker whose center is the newest.
    """
    if not self._is_sequential or not self._progress.counter.local_step:
      return self.take_over(state, [source])
    # Each worker has saved its own local state, and the center at that time.
    wait = lambda seconds: self._waiting.sleep(state, seconds)
    answer = self._copies.pull([source], self._progress.commits, wait)
    like = host_commits.center_of(state)
    if answer is None:
      self._exchange.begin(like)
      return state
    center = center_copies.unpack(answer, like)
    self._progress.commits = int(center.commits)
    self._exchange.reset(center, self._progress.counter.local_step)
    return self._programs.replace_center(state, center)

  def take_over(
    self,
    state: PyTree,
    sources: Sequence[int] | None = None,
    least_step: int = 0,
  ) -> PyTree:
    """Returns the state that goes on from the center of another worker.

    Args:
      state: The state.
      sources: The workers to ask; None for all members.
      least_step: See `CenterCopies.pull`.
    """
    worker_id, progress = self._peers.worker_id, self._progress
    wait = lambda seconds: self._waiting.sleep(state, seconds)
    like, old = host_commits.center_of(state), progress.counter.local_step
    center, clock, commits = None, old, progress.commits
    while True:
      answer = self._copies.pull(sources, commits, wait, least_step)
      if answer is None:
        _log.warning(
          "worker %d goes on from %s, which is the newest",
          worker_id,
          "its own center" if center is None else "a lost worker's center",
        )
        self._exchange.begin(like if center is None else center)
        if center is None:
          return self.with_newest(state)
        break
      center = center_copies.unpack(answer, like)
      clock, commits = answer.fields["local_step"], int(center.commits)
      self._exchange.reset(center, clock)
      source = answer.fields["source"]
      if not source or source in {
        member.incarnation for member in self._peers.view.members
      }:
        break
      # If it died before `reset`, others may not know of its last commits, and
      # may make them anew. If nobody else has a center, this one counts.
      self._exchange.retract()
      sources, least_step = None, 0
    if sources is None:
      # By sequential commits, others have only parameters of their last ones.
      center = self._pull_newest(None, center)
    # Only now: what ends this earlier leaves all as it was.
    state = self._programs.with_center(
      state, center, local_step=clock, keep_slots=old > 0
    )
    progress.restart(clock, int(center.commits))
    _log.info(
      "worker %d goes on from the center of the others: commit %d, local step "
      "%d",
      worker_id,
      progress.commits,
      clock,
    )
    return state

  def with_newest(self, state: PyTree) -> PyTree:
    """Returns the state with the newest center of sequential commits."""
    if not self._is_sequential:
      return state
    center = self._pull_newest(state, host_commits.center_of(state))
    return self._programs.replace_center(state, center)

  def _pull_newest(self, state: PyTree | None, center: Any) -> Any:
    """Returns the newest center of sequential commits.

    Args:
      state: The state, for those who ask for it meanwhile; None: they wait.
      center: This worker's center, the newest otherwise.
    """
    result = self._background.submit(self._exchange.pull, center)
    grace = 0.0 if state is None else _LAST_PULL_SECONDS
    pulled = self._waiting.wait_for(result, state, grace)
    return center if pulled is None else pulled
