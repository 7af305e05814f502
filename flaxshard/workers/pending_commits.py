"""The commits of a worker that are under way."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np

from flaxshard.state import host_commits
from flaxshard.workers.background import Background
from flaxshard.workers.commit_log import CommitLog
from flaxshard.workers.commit_log import CommitRecord
from flaxshard.workers.exchange import Exchange
from flaxshard.workers.exchange import Outcome
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.programs import Programs
from flaxshard.workers.progress import Progress
from flaxshard.workers.progress import Sent
from flaxshard.workers.rounds import Missed
from flaxshard.workers.schedule import commit_index
from flaxshard.workers.waiting import Stopped
from flaxshard.workers.waiting import Waiting
from flaxshard.wrappers.agn import AGN

_log = logging.getLogger("flaxshard")

PyTree = Any

# Seconds that a worker that shall stop waits for the answer to a sequential
# commit: without it, nobody knows whether the center has it.
_LAST_ANSWER_SECONDS = 5.0


class Lost(Exception):
  """This worker's commits under way are lost; it has to come back.

  Attributes:
    state: The state; the one that was passed to `commit` is donated.
    reason: Why.
  """

  def __init__(self, state: PyTree, reason: Exception):
    super().__init__(str(reason))
    self.state, self.reason = state, reason


class PendingCommits:
  """Sends commits from a thread, and applies their results.

  Args:
    worker_id: The index of this worker.
    agn: The wrapper.
    exchange: Exchanges commits with the others.
    programs: The compiled functions.
    progress: The progress of this worker, with the commits under way.
    waiting: Waits.
    background: The thread.
    log: Where commits are recorded.
  """

  def __init__(
    self,
    worker_id: int,
    agn: AGN,
    exchange: Exchange,
    programs: Programs,
    progress: Progress,
    waiting: Waiting,
    background: Background,
    log: CommitLog,
  ):
    self._worker_id = worker_id
    self._agn = agn
    self._exchange = exchange
    self._programs = programs
    self._progress = progress
    self._waiting = waiting
    self._background = background
    self._log = log

  def run_due(self, state: PyTree, local_step: int) -> PyTree:
    """Applies the commits that arrive at a local step, and sends the next.

    Args:
      state: The state.
      local_step: Its number of local steps.

    Raises:
      Lost: The others go on without this worker.
      FloatingPointError: A commit has NaN or infinity.
    """
    agn, sent = self._agn, self._progress.sent
    while sent and sent[0].local_step + agn.delay <= local_step:
      state = self._apply(state)
    fragments = host_commits.due(agn, local_step)
    if not fragments:
      return state
    self._check_deadline()
    state, commit = self._programs.take(state, fragments)
    self._send(fragments, local_step, commit)
    self._progress.last_commit_step = local_step
    return state if agn.delay else self._apply(state)

  def drain(self, state: PyTree) -> PyTree:
    """Waits for all commits under way, and applies them.

    Args:
      state: The state.

    Raises:
      Lost: The others go on without this worker.
    """
    while self._progress.sent:
      state = self._apply(state)
    return state

  def stop(self, state: PyTree) -> PyTree:
    """Ends commits under way, for a worker that shall stop.

    Args:
      state: The state.

    Raises:
      Lost: The others go on without this worker.
    """
    if self._agn.commit == "sequential":
      return self.drain(state)
    return self._take_back(state)

  def end(self, state: PyTree) -> None:
    """Waits for commits that the thread has begun, and lets it drop the others.

    Otherwise it might send them after this worker has another center.

    Args:
      state: The state.

    Raises:
      Stopped: This worker shall stop.
    """
    for sent in self._progress.sent:
      sent.result.cancel()
    # The thread takes one after another.
    self._waiting.wait_for(self._background.submit(lambda: None), state)

  def _send(
    self, fragments: tuple[int, ...], local_step: int, commit: Any
  ) -> None:
    index = commit_index(self._agn, local_step)

    def run() -> tuple[Outcome, float]:
      start = time.monotonic()
      arrays = {key: np.asarray(x) for key, x in commit.items()}
      _check_finite(self._worker_id, local_step, arrays)
      outcome = self._exchange.commit(index, fragments, arrays)
      return outcome, time.monotonic() - start

    result = self._background.submit(run)
    self._progress.sent.append(Sent(fragments, local_step, commit, result))

  def _apply(self, state: PyTree) -> PyTree:
    """Waits for the result of the oldest commit, and applies it."""
    progress, sent = self._progress, self._progress.sent[0]
    is_sequential = self._agn.commit == "sequential"
    grace = _LAST_ANSWER_SECONDS if is_sequential else 0.0
    start = time.monotonic()
    try:
      outcome, seconds = self._waiting.wait_for(sent.result, state, grace)
    except Stopped:
      return self._take_back(state)
    except (NotAMember, Missed) as e:
      raise Lost(state, e) from e
    progress.sent.pop(0)
    waited = time.monotonic() - start
    state = self._exchange.apply(self._programs, state, sent.fragments, outcome)
    progress.commits = outcome.commit or progress.commits + 1
    if not outcome.accepted:
      _log.warning(
        "worker %d: commit %d came after deadline=%s s: the result is that of "
        "workers %s, and the last %d local steps of this worker are not in it",
        self._worker_id,
        progress.commits,
        self._agn.deadline,
        ", ".join(map(str, outcome.workers)),
        self._agn.communication_period,
      )
    self._log.add(
      CommitRecord(
        commit=progress.commits,
        local_step=sent.local_step,
        fragments=sent.fragments,
        workers=tuple(outcome.workers),
        accepted=outcome.accepted,
        staleness=outcome.staleness,
        bytes_sent=outcome.bytes_sent,
        bytes_received=outcome.bytes_received,
        seconds=seconds,
        waited_seconds=waited,
      )
    )
    return state

  def _take_back(self, state: PyTree) -> PyTree:
    """Returns commits under way to the accumulators, to stop here.

    By mean and sum, who starts again takes the newest center over, and with it
    whatever it has of them.
    """
    for sent in self._progress.sent:
      if self._agn.commit == "sequential" and not sent.result.cancel():
        _log.warning(
          "worker %d: it stops without an answer to its commit at local step "
          "%d, which the center has or has not: it is not sent again",
          self._worker_id,
          sent.local_step,
        )
        continue
      keys = host_commits.parameter_keys(state, sent.fragments)
      commit = {key: sent.commit[key] for key in keys}
      state = self._programs.restore(state, commit)
    self._progress.sent.clear()
    return state

  def _check_deadline(self) -> None:
    seconds, deadline = (
      self._progress.counter.seconds_per_step,
      self._agn.deadline,
    )
    if (
      seconds is not None
      and deadline < seconds
      and self._agn.commit != "sequential"
    ):
      raise ValueError(
        f"AGN: deadline={deadline} must be above the seconds of one local "
        f"step, {seconds:.3g} here: workers are never so close to each other."
      )


def _check_finite(
  worker_id: int, local_step: int, commit: dict[str, np.ndarray]
) -> None:
  """Raises if a commit would spoil the center of all workers."""
  bad = [key for key, x in commit.items() if not np.isfinite(x).all()]
  if bad:
    more = f" and {len(bad) - 1} others" if len(bad) > 1 else ""
    raise FloatingPointError(
      f"Worker: the commit of worker {worker_id} at local step {local_step} "
      f"has NaN or infinity in {bad[0]!r}{more}. It was not sent: the center "
      "of all workers would have them. The others go on. Use a lower learning "
      "rate, clip gradients, or wrap AGN in LossScale('dynamic'), which skips "
      "such steps."
    )
