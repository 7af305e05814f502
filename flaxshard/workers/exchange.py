"""Exchanges one commit with the other workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, Protocol

import jax

from flaxshard.state import host_commits
from flaxshard.workers.center import Center
from flaxshard.workers.peers import Peers
from flaxshard.workers.programs import Programs
from flaxshard.workers.rounds import Rounds
from flaxshard.workers.schedule import commit_index
from flaxshard.wrappers import agn_schedule
from flaxshard.wrappers.agn import AGN

PyTree = Any
Commit = Mapping[str, Any]
Fragments = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of a commit.

  Attributes:
    arrays: By mean or sum the reduced commits, sequentially the new parameters.
    remainders: What quantization has cut off, for later commits.
    commit: The number of the commit, from 1, None for one more than before.
    workers: The workers whose commits are in the result.
    accepted: Whether this worker's is.
    collections: New collections; None if `arrays` has them.
    staleness: Commits of others since the last pull.
    bytes_sent: Bytes that were sent.
    bytes_received: Bytes that were received.
  """

  arrays: Commit
  remainders: Commit
  workers: tuple[int, ...]
  accepted: bool = True
  collections: Commit | None = None
  commit: int | None = None
  staleness: int = 0
  bytes_sent: int = 0
  bytes_received: int = 0


class Exchange(Protocol):
  """The commits of one worker, by mean, by sum, or sequential."""

  def commit(self, index: int, fragments: Fragments, arrays: Commit) -> Outcome:
    """Sends a commit and waits for its result.

    Args:
      index: The number of the commit in the schedule.
      fragments: Its fragments.
      arrays: The result of `host_commits.take`, on the host.

    Raises:
      NotAMember: The others have lost this worker.
      Missed: The result is not kept any more.
    """
    ...

  def apply(
    self,
    programs: Programs,
    state: PyTree,
    fragments: Fragments,
    outcome: Outcome,
  ) -> PyTree:
    """Returns the state with the result of a commit.

    Args:
      programs: The compiled functions.
      state: The state, which is donated.
      fragments: The fragments of the commit.
      outcome: The result.
    """
    ...

  def begin(self, center: Any) -> None:
    """Takes note that this worker goes on from its own center.

    Args:
      center: The center.
    """
    ...

  def reset(self, center: Any, local_step: int) -> None:
    """Takes note of another center, from another worker.

    Args:
      center: The center.
      local_step: The local step that this worker goes on from.
    """
    ...

  def retract(self) -> None:
    """Takes note that the run may go on without the center of `reset`."""
    ...

  def leave(self, seconds: float) -> None:
    """Leaves to the others what they need of this worker.

    Args:
      seconds: The longest time to wait for them.
    """
    ...

  def close(self) -> None:
    """Ends threads."""
    ...

  def pull(self, center: Any) -> Any:
    """Returns the newest center, from other workers if they may have it.

    Args:
      center: This worker's center.

    Returns:
      The center; None if this worker has it.

    Raises:
      NotAMember: The others have lost this worker.
    """
    ...


def create_exchange(
  peers: Peers, agn: AGN, state: PyTree, is_done: Callable[[str], bool]
) -> Exchange:
  """Returns the commits that AGN's arguments ask for.

  Args:
    peers: The other workers.
    agn: The wrapper.
    state: The first state of this worker.
    is_done: Whether a worker, given by its incarnation, commits no more.
  """
  if agn.commit == "sequential":
    return _Sequential(peers, agn, state)
  return _Combined(peers, agn, state, is_done)


class _Combined:
  """Commits by mean or sum: all workers update equal copies of the center."""

  def __init__(
    self,
    peers: Peers,
    agn: AGN,
    state: PyTree,
    is_done: Callable[[str], bool],
  ):
    self._agn = agn
    self._rounds = Rounds(
      peers,
      jax.eval_shape(lambda x: x, state),
      agn.quorum,
      agn.deadline,
      # Of two periods.
      num_kept=2 * len(agn_schedule.groups_of(agn)),
      is_done=is_done,
    )

  def commit(self, index: int, fragments: Fragments, arrays: Commit) -> Outcome:
    reduced = self._rounds.reduce(index, fragments, arrays)
    return Outcome(
      reduced.arrays,
      reduced.remainders,
      reduced.workers,
      reduced.accepted,
      bytes_sent=reduced.bytes_sent,
      bytes_received=reduced.bytes_received,
    )

  def apply(
    self,
    programs: Programs,
    state: PyTree,
    fragments: Fragments,
    outcome: Outcome,
  ) -> PyTree:
    state = programs.apply_mean(state, fragments, outcome.arrays)
    return programs.restore(state, outcome.remainders)

  def begin(self, center: Any) -> None:
    pass

  def reset(self, center: Any, local_step: int) -> None:
    del center
    self._rounds.reset(commit_index(self._agn, local_step))

  def retract(self) -> None:
    pass

  def leave(self, seconds: float) -> None:
    pass

  def close(self) -> None:
    self._rounds.close()

  def pull(self, center: Any) -> Any:
    return None


class _Sequential:
  """Sequential commits: owners of the center apply one after another."""

  def __init__(self, peers: Peers, agn: AGN, state: PyTree):
    self._worker_id = peers.worker_id
    self._center = Center(
      peers, state, agn.commit_dtype, host_commits.center_of(state)
    )

  def commit(self, index: int, fragments: Fragments, arrays: Commit) -> Outcome:
    del index
    updated = self._center.commit(fragments, arrays)
    return Outcome(
      updated.params,
      updated.remainders,
      (self._worker_id,),
      collections=updated.collections,
      staleness=updated.staleness,
      bytes_sent=updated.bytes_sent,
      bytes_received=updated.bytes_received,
    )

  def apply(
    self,
    programs: Programs,
    state: PyTree,
    fragments: Fragments,
    outcome: Outcome,
  ) -> PyTree:
    del fragments
    state = programs.replace_params(state, outcome.arrays, outcome.collections)
    return programs.restore(state, outcome.remainders)

  def begin(self, center: Any) -> None:
    self._center.begin(int(center.commits))

  def reset(self, center: Any, local_step: int) -> None:
    del local_step
    self._center.reset(center)

  def retract(self) -> None:
    self._center.retract()

  def leave(self, seconds: float) -> None:
    self._center.wait_for_backup(seconds)

  def close(self) -> None:
    self._center.close()

  def pull(self, center: Any) -> Any:
    return self._center.pull(center)
