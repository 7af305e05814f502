"""The center of sequential commits: each cell has an owner among the members.

Whoever's period has ended sends its commit to the owners of the cells
(`cells.Cells`). An owner updates its cells with one commit after another, in
the order in which they come, and answers with the new parameters. Nobody waits
for the commits of others.

Each update of a cell has a version, and a cell remembers the last commit of
each worker. When an owner dies, the next one asks all members for what they
have of the cell: the parameters of the last answer that each has received, and
backups with slots, which an owner sends to the next member after each of its
own commits. It goes on from the newest parameters. So no commit that was
answered is lost, and a commit that is sent again is not applied twice. Slots
may be older than the parameters by as much as the last backup.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import time
from typing import Any

import numpy as np

from flaxshard.workers import cell_commit
from flaxshard.workers import cells as cells_lib
from flaxshard.workers.background import Background
from flaxshard.workers.cell_copy import Copy
from flaxshard.workers.cell_owner import CellOwner
from flaxshard.workers.cell_owner import LOOK_SECONDS
from flaxshard.workers.cell_store import CellStore
from flaxshard.workers.cells import Cell
from flaxshard.workers.messages import Message
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import Peers
from flaxshard.workers.peers import ViewChanged
from flaxshard.workers.view_log import Member

PyTree = Any
Arrays = Mapping[str, np.ndarray]
Fragments = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Updated:
  """The answer to a commit.

  Attributes:
    params: New parameters, by path.
    collections: New collections, by path.
    remainders: What encoding has cut off, by key.
    staleness: The most commits of others since the last pull, of any cell.
    bytes_sent: Bytes that this worker has sent since the last answer.
    bytes_received: Bytes that it has received.
  """

  params: dict[str, np.ndarray]
  collections: dict[str, np.ndarray]
  remainders: dict[str, np.ndarray]
  staleness: int
  bytes_sent: int
  bytes_received: int


class Center:
  """The sequential commits of one worker.

  Until `begin` or `reset`, the centers of other workers come before its own.

  Args:
    peers: The other workers.
    state: The first train state of this worker.
    commit_dtype: The format of commits; None: as they are.
    center: The center of this worker.
  """

  def __init__(
    self, peers: Peers, state: PyTree, commit_dtype: str | None, center: Any
  ):
    self._peers = peers
    self._fmt = commit_dtype
    self._cells = cells_lib.Cells(state, peers.num_workers)
    self._store = CellStore(peers, self._cells, center)
    self._owner = CellOwner(peers, self._cells, commit_dtype, self._store)
    self._number = 0
    self._threads = Background("flaxshard_center", peers.num_workers)

  def close(self) -> None:
    """Ends the threads, once their calls have ended."""
    self._threads.close()
    self._owner.backups.close()

  def begin(self, commits: int) -> None:
    """Takes note that the run begins, or goes on, with what is here.

    Args:
      commits: The number of commits of this worker's center.
    """
    self._store.begin(commits)
    self._owner.begin()

  def reset(self, center: Any) -> None:
    """Takes note of a center that was received from another worker.

    Args:
      center: The center.
    """
    self._store.reset(center)
    self._owner.begin()

  def retract(self) -> None:
    """Takes note that the run may go on without the center of `reset`."""
    self._store.retract()
    self._owner.retract()

  def wait_for_backup(self, seconds: float) -> None:
    """Waits until another member has what this worker owns.

    Args:
      seconds: The longest time to wait.
    """
    self._owner.backups.wait(seconds)

  def commit(self, fragments: Fragments, commit: Arrays) -> Updated:
    """Sends a commit to the owners of the cells, and waits for their answers.

    Args:
      fragments: The fragments of the commit.
      commit: Arrays by key, on the host.

    Raises:
      NotAMember: The others have lost this worker.
    """
    self._number += 1
    incarnation = self._peers.incarnation
    counts = {key: x for key, x in commit.items() if key.startswith("@")}
    remainders: dict[str, np.ndarray] = {}
    calls = []
    for cell in self._cells.of(fragments):
      given = {key: commit[key] for key in self._cells.keys[cell]}
      quantized = self._cells.quantized[cell[1]]
      message, rest = cell_commit.encode(given | counts, quantized, self._fmt)
      message.fields.update(incarnation=incarnation, number=self._number)
      remainders |= rest
      calls.append(
        self._threads.submit(self._commit_cell, cell, message, incarnation)
      )
    answers, error = [], None
    # All of them end before this worker may come back with another center.
    for call in calls:
      try:
        answers.append(call.result())
      except Exception as e:
        error = e
    if error is not None:
      raise error
    with self._store.changed:
      sent, received = self._store.take_bytes()
      self._owner.backups.start()
    arrays: dict[str, np.ndarray] = {}
    for copy, _ in answers:
      arrays |= copy.arrays
    return Updated(
      cells_lib.params_of(arrays),
      cells_lib.collections_of(arrays),
      remainders,
      max(staleness for _, staleness in answers),
      sent,
      received,
    )

  def pull(self, center: Any) -> Any:
    """Returns the newest center, with slots, from the owners of its cells.

    Args:
      center: This worker's center.

    Raises:
      NotAMember: The others have lost this worker.
    """
    incarnation = self._peers.incarnation
    copies, arrays = {}, {}
    for cell in self._cells.keys:
      answer = self._call_owner(cell, "read_cell", Message(), incarnation)
      copy = copies[cell] = Copy.from_message(answer)
      arrays[cell] = self._store.like_cell(cell, copy.arrays)
    commits = max(_count_commits(copies), int(center.commits))
    center = center._replace(commits=np.int32(commits))
    return self._cells.join(center, arrays)

  def _commit_cell(
    self, cell: Cell, message: Message, incarnation: str
  ) -> tuple[Copy, int]:
    """Sends a commit of one cell to its owner, whoever that is at last."""
    with self._store.changed:
      message.fields["pulled"] = self._store.seen_version(cell)
    answer = self._call_owner(cell, "commit_cell", message, incarnation)
    return Copy.from_message(answer), answer.fields["staleness"]

  def _call_owner(
    self, cell: Cell, method: str, message: Message, incarnation: str
  ) -> Message:
    """Calls the owner of a cell, and keeps the copy that it answers with."""
    message.fields["cell"] = cells_lib.to_list(cell)
    while True:
      self._check_incarnation(incarnation)
      owner = self._find_owner(cell)
      try:
        answer = self._peers.call(owner.worker_id, method, message)
      except (PeerLost, ViewChanged):
        time.sleep(LOOK_SECONDS)
        continue
      if answer.fields["status"] == "moved":
        time.sleep(LOOK_SECONDS)
        continue
      with self._store.changed:
        self._check_incarnation(incarnation)
        if owner.worker_id != self._peers.worker_id:
          self._store.bytes_sent += len(message.data)
          self._store.bytes_received += len(answer.data)
        # The next owner, or this one after it has come back, may have asked
        # already: it goes on without this answer.
        if self._find_owner(cell) == owner:
          self._store.keep_answer(cell, Copy.from_message(answer))
          return answer

  def _find_owner(self, cell: Cell) -> Member:
    while True:
      worker_id = self._peers.owner_of(cell[0])
      member = self._peers.view.member(worker_id)
      if member is not None:
        return member

  def _check_incarnation(self, incarnation: str) -> None:
    """Raises if this worker has come back meanwhile, with another center."""
    if self._peers.incarnation != incarnation:
      raise NotAMember("the others had lost this worker")


def _count_commits(copies: Mapping[Cell, Copy]) -> int:
  """Returns the number of commits in a center, with those of its first one."""
  versions: dict[Fragments, int] = {}
  for (_, fragments), copy in copies.items():
    versions[fragments] = max(copy.version, versions.get(fragments, 0))
  newest = max(copies.values(), key=lambda copy: copy.version)
  return sum(versions.values()) + max(newest.rank, 0)
