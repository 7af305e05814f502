"""Reduces the commits of all workers by mean or sum, in numbered rounds.

A commit is divided into parts (`parts.Layout`), each with an owner among the
members. A worker sends every owner its part of the commit. The owner waits for
the other members, at most for a deadline, reduces what has come, and answers
all with the same bytes. So all workers update their centers equally.

When an owner dies, another one takes its parts over. Some workers may have the
result of a round already. So the new owner asks all members for it before it
opens the round anew. A worker that has said that it has none does not take one
from the old owner any more: it takes answers of current owners alone.

A member tells as well up to which round its center goes. No such round is
opened anew, even if nobody has kept its result. Who commits to one of them must
go on from another center (`Missed`).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import time
from typing import Any

import numpy as np

from flaxshard.workers.background import Background
from flaxshard.workers.messages import Message
from flaxshard.workers.parts import finite_difference
from flaxshard.workers.parts import Layout
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import Peers
from flaxshard.workers.peers import ViewChanged
from flaxshard.workers.round_owner import LOOK_SECONDS
from flaxshard.workers.round_owner import RoundOwner
from flaxshard.workers.round_results import Commit
from flaxshard.workers.round_results import Key
from flaxshard.workers.round_results import Result
from flaxshard.workers.round_results import Results
from flaxshard.workers.view_log import Member

PyTree = Any


class Missed(Exception):
  """The commit came so late that its result is not kept any more."""


@dataclasses.dataclass(frozen=True)
class Reduced:
  """The result of a commit.

  Attributes:
    arrays: The reduced arrays, by key.
    remainders: What encoding has cut off, by key; empty without a format.
    workers: The workers whose commits are in all parts.
    accepted: Whether this commit is in all parts.
    bytes_sent: Bytes that this worker has sent since the last result.
    bytes_received: Bytes that it has received.
  """

  arrays: dict[str, np.ndarray]
  remainders: dict[str, np.ndarray]
  workers: tuple[int, ...]
  accepted: bool
  bytes_sent: int
  bytes_received: int


class Rounds:
  """The rounds of one worker, as a participant and as an owner.

  Args:
    peers: The other workers.
    state: A train state, for the shapes of commits.
    quorum: Least number of workers in a round.
    deadline: Seconds that a round waits for others after its first commit.
    num_kept: Number of rounds whose results are kept, for workers that are
      late or that take over.
    is_done: Whether a worker, given by its incarnation, commits no more.
  """

  def __init__(
    self,
    peers: Peers,
    state: PyTree,
    quorum: int,
    deadline: float,
    num_kept: int,
    is_done: Callable[[str], bool] = lambda incarnation: False,
  ):
    self._peers = peers
    self._layout = functools.cache(
      lambda fragments: Layout.of(state, fragments, peers.num_workers)
    )
    self._results = Results(peers, num_kept)
    self._changed = self._results.changed
    self._owner = RoundOwner(
      peers, self._layout, self._results, quorum, deadline, is_done
    )
    self._num_commits = 0
    self._is_closed = False
    self._bytes_sent = self._bytes_received = 0
    self._threads = Background("flaxshard_rounds", peers.num_workers)

  def close(self) -> None:
    """Ends the threads, once their calls have ended."""
    self._is_closed = True
    self._owner.close()
    self._threads.close()

  def reset(self, index: int) -> None:
    """Takes note of another center that this worker goes on from.

    Its results stay: other workers may need them.

    Args:
      index: The newest round that is in the center.
    """
    with self._changed:
      self._results.check_incarnation()
      self._results.passed(index)

  def reduce(
    self, index: int, fragments: tuple[int, ...], commit: Any
  ) -> Reduced:
    """Sends a commit to the owners of its parts, and waits for the result.

    Args:
      index: The number of the round.
      fragments: The fragments of the commit.
      commit: Arrays by key, on the host.

    Raises:
      NotAMember: The others have lost this worker.
      Missed: The result is not kept any more.
    """
    incarnation = self._peers.incarnation
    with self._changed:
      self._results.check_incarnation()
      self._results.passed(index - 1)
      self._num_commits += 1
      number = self._num_commits
    layout = self._layout(fragments)
    vectors = layout.to_vectors(commit)
    rests = [np.zeros_like(x) for x in vectors if layout.is_quantized]
    calls = []
    for part in range(layout.num_parts):
      data, decoded = layout.encode([x[part] for x in vectors])
      for rest, x, d in zip(rests, vectors, decoded, strict=False):
        rest[part] = finite_difference(x[part], d)
      calls.append(
        self._threads.submit(
          self._commit_part,
          (index, part),
          fragments,
          Commit(incarnation, number, data),
        )
      )
    results = [call.result() for call in calls]
    with self._changed:
      own = {
        part: self._results.pop_remainders((index, part))
        for part in range(layout.num_parts)
      }
      sent, received = self._pop_bytes()
    for part, rest_of_part in own.items():
      for rest, x in zip(rests, rest_of_part or (), strict=False):
        rest[part] += x
    parts = [layout.decode(result.data) for result in results]
    for vector, *of_section in zip(vectors, *parts, strict=True):
      np.stack(of_section, out=vector)
    commits = set.intersection(*(set(r.commits.items()) for r in results))
    mine = Commit(incarnation, number, b"").name
    return Reduced(
      layout.from_vectors(vectors),
      layout.quantized(layout.from_vectors(rests)) if rests else {},
      tuple(sorted(worker for worker, _ in commits)),
      (self._peers.worker_id, mine) in commits,
      sent,
      received,
    )

  def _commit_part(
    self, key: Key, fragments: tuple[int, ...], commit: Commit
  ) -> Result:
    """Sends one part to its owner, whoever that is at last."""
    index, part = key
    fields = {
      "index": index,
      "part": part,
      "fragments": list(fragments),
      "incarnation": commit.incarnation,
      "number": commit.number,
    }
    message = Message(fields, commit.data)
    while True:
      self._check_sender(commit)
      owner = self._find_owner(part)
      try:
        answer = self._peers.call(owner.worker_id, "commit_part", message)
      except (PeerLost, ViewChanged):
        time.sleep(LOOK_SECONDS)
        continue
      if answer.fields["status"] == "missed":
        raise Missed(f"the result of commit {index} is not kept any more")
      if answer.fields["status"] == "moved":
        time.sleep(LOOK_SECONDS)
        continue
      result = Result.of(answer)
      with self._changed:
        self._check_sender(commit)
        if owner.worker_id != self._peers.worker_id:
          self._bytes_sent += len(commit.data)
          self._bytes_received += len(result.data)
        # Another owner, or this one after it has come back, may have asked
        # meanwhile, and was told that there is no result here.
        if self._find_owner(part) == owner:
          return self._results.keep(key, result)

  def _find_owner(self, part: int) -> Member:
    while True:
      worker_id = self._peers.owner_of(part)
      member = self._peers.view.member(worker_id)
      if member is not None:
        return member

  def _check_sender(self, commit: Commit) -> None:
    """Raises if this worker has come back meanwhile, with another center."""
    if self._is_closed or self._peers.incarnation != commit.incarnation:
      raise NotAMember("the others had lost this worker")

  def _pop_bytes(self) -> tuple[int, int]:
    """Returns the bytes that were sent and received since the last call."""
    owner = self._owner
    sent = self._bytes_sent + owner.bytes_sent
    received = self._bytes_received + owner.bytes_received
    self._bytes_sent = owner.bytes_sent = 0
    self._bytes_received = owner.bytes_received = 0
    return sent, received
