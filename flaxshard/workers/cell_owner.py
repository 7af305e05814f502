"""The owner of cells: it updates them with one commit after another."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import numpy as np

from flaxshard.workers import cell_commit
from flaxshard.workers import cells as cells_lib
from flaxshard.workers.cell_backups import CellBackups
from flaxshard.workers.cell_copy import Copy
from flaxshard.workers.cell_store import CellStore
from flaxshard.workers.cells import Cell
from flaxshard.workers.messages import Message
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import Peers
from flaxshard.workers.peers import ViewChanged
from flaxshard.workers.view_log import View

Arrays = Mapping[str, np.ndarray]

# Seconds between two looks at the members.
LOOK_SECONDS = 0.05

_MOVED = Message({"status": "moved"})
_NONE = Message({"status": "none"})


@dataclasses.dataclass
class _Owned:
  """A cell that this worker owns.

  Attributes:
    copy: Its newest version.
    collections: The last collections of each worker, by path.
    is_updating: Whether a thread computes the next version.
  """

  copy: Copy
  collections: dict[int, dict[str, np.ndarray]]
  is_updating: bool = False


class CellOwner:
  """The cells that this worker owns.

  Args:
    peers: The other workers.
    cells: All cells.
    commit_dtype: The format of commits; None: as they are.
    store: What this worker has of all cells.

  Attributes:
    backups: The copies that the next member has.
  """

  def __init__(
    self,
    peers: Peers,
    cells: cells_lib.Cells,
    commit_dtype: str | None,
    store: CellStore,
  ):
    self._peers = peers
    self._cells = cells
    self._fmt = commit_dtype
    self._store = store
    self._changed = store.changed
    self._owned: dict[Cell, _Owned] = {}
    # Who asks the members for a cell: an object for each time.
    self._opening: dict[Cell, object] = {}
    self._seen_epoch = peers.view.epoch
    self.backups = CellBackups(peers, store, self._copies)
    store.on_forget(self._forget)
    peers.register("commit_cell", self._handle_commit)
    peers.register("read_cell", self._handle_read)
    peers.register("find_copy", self._handle_find)
    peers.on_view(self._follow)

  # -- Commits.

  def _handle_commit(self, sender: int, message: Message) -> Message:
    cell = cells_lib.to_cell(message.fields["cell"])
    with self._changed:
      try:
        copy = self._commit(sender, cell, message)
      except NotAMember:
        copy = None
    if copy is None:
      return _MOVED
    staleness = copy.version - message.fields["pulled"]
    if copy.applied[str(sender)][1] == message.fields["number"]:
      staleness -= 1  # the commit itself
    result = copy.without_slots().to_message(
      status="done", staleness=max(staleness, 0)
    )
    if sender != self._peers.worker_id:
      with self._changed:
        self._store.bytes_received += len(message.data)
        self._store.bytes_sent += len(result.data)
    return result

  def _commit(self, sender: int, cell: Cell, message: Message) -> Copy | None:
    """Returns a cell with a commit; called and returns with the lock."""
    incarnation = message.fields["incarnation"]
    number = message.fields["number"]
    owned = self._wait_until_owned(cell)
    if owned is None:
      return None
    if owned.copy.has(sender, incarnation, number):
      return owned.copy
    member = self._peers.view.member(sender)
    if member is None or member.incarnation != incarnation:
      return None  # nobody waits for it, or its sender has another center
    return self._update(cell, owned, sender, message)

  def _update(
    self, cell: Cell, owned: _Owned, sender: int, message: Message
  ) -> Copy | None:
    """Applies a commit; called and returns with the lock.

    Returns:
      The new copy, None if the cell has another owner now.
    """
    owned.is_updating = True
    copy = owned.copy
    self._changed.release()
    try:
      commit = cell_commit.decode(message, self._fmt)
      commit |= self._mean_collections(owned, copy, sender, commit)
      arrays = self._cells.update(cell, copy.arrays, commit)
    finally:
      self._changed.acquire()
      owned.is_updating = False
      self._changed.notify_all()
    if self._owned.get(cell) is not owned or not self._is_owner(cell):
      return None
    name = message.fields["incarnation"], message.fields["number"]
    owned.copy = Copy(
      copy.version + 1,
      copy.version + 1,
      arrays,
      {**copy.applied, str(sender): name},
      copy.rank,
    )
    # Usually an owner's own commits start backups. It may be slow, or at its
    # end.
    num_members = len(self._peers.view.members)
    if self.backups.lag(cell, owned.copy.version) >= 2 * num_members:
      self.backups.start()
    return owned.copy

  def _mean_collections(
    self, owned: _Owned, copy: Copy, sender: int, commit: Arrays
  ) -> dict[str, np.ndarray]:
    """Returns the mean of the last collections of all members."""
    keys = cells_lib.collections_of(copy.arrays)
    if not keys:
      return {}
    owned.collections[sender] = {key: commit[key] for key in keys}
    members = {*self._peers.view.worker_ids, sender}
    of_members = [x for k, x in owned.collections.items() if k in members]
    return {
      key: np.asarray(np.mean([x[key] for x in of_members], 0, np.float32))
      for key in keys
    }

  def _handle_read(self, sender: int, message: Message) -> Message:
    del sender
    cell = cells_lib.to_cell(message.fields["cell"])
    with self._changed:
      try:
        owned = self._wait_until_owned(cell)
      except NotAMember:
        owned = None
      if owned is None:
        return _MOVED
      copy = owned.copy
    return copy.to_message(status="done")

  # -- Taking over.

  def _is_owner(self, cell: Cell) -> bool:
    """Whether this worker owns a cell, and has followed all views.

    Before that, it may have ceased to own the cell and own it again.
    """
    return (
      self._seen_epoch == self._peers.view.epoch
      and self._store.is_current
      and self._peers.owner_of(cell[0]) == self._peers.worker_id
    )

  def _wait_until_owned(self, cell: Cell) -> _Owned | None:
    """Waits until a cell can be updated; None if it has another owner.

    Called and returns with the lock, which it does not hold meanwhile.

    Raises:
      NotAMember: The others have lost this worker.
    """
    while True:
      self._store.check_incarnation()
      if self._peers.owner_of(cell[0]) != self._peers.worker_id:
        return None
      owned = self._owned.get(cell)
      if not self._is_owner(cell):
        pass  # a view is being followed
      elif owned is not None and not owned.is_updating:
        return owned
      elif owned is None and cell not in self._opening:
        self._take_over(cell)
        continue
      self._changed.wait(LOOK_SECONDS)

  def _take_over(self, cell: Cell) -> None:
    """Asks all members for their copies of a cell, and owns the newest.

    Called and returns with the lock, which it does not hold meanwhile.
    """
    me = self._opening[cell] = object()
    newest, asked = self._store.best(cell), {self._peers.incarnation}
    try:
      # Dropped with a view in which another worker owns the cell: what members
      # have said before may be old, even if this worker owns it again.
      while self._opening.get(cell) is me:
        if not self._is_owner(cell):
          self._store.check_incarnation()
          self._changed.wait(LOOK_SECONDS)
          continue
        others = [
          m for m in self._peers.view.members if m.incarnation not in asked
        ]
        if not others:
          newest = newest.merge(self._store.best(cell))
          self._owned[cell] = _Owned(newest, {})
          return
        self._changed.release()
        try:
          answer = self._ask(others[0].worker_id, cell, newest)
        finally:
          self._changed.acquire()
        if answer is None:
          self._changed.wait(LOOK_SECONDS)
          continue
        asked.add(others[0].incarnation)
        if answer.fields["status"] == "done":
          newest = newest.merge(Copy.from_message(answer))
    finally:
      if self._opening.get(cell) is me:
        del self._opening[cell]
      self._changed.notify_all()

  def _ask(self, worker_id: int, cell: Cell, known: Copy) -> Message | None:
    message = Message(
      {
        "cell": cells_lib.to_list(cell),
        "version": known.version,
        "slots_version": known.slots_version,
        "rank": known.rank,
      }
    )
    try:
      return self._peers.call(worker_id, "find_copy", message)
    except (PeerLost, ViewChanged):
      return None

  def _handle_find(self, sender: int, message: Message) -> Message:
    del sender
    fields = message.fields
    cell = cells_lib.to_cell(fields["cell"])
    with self._changed:
      self._store.check_incarnation()
      copy = self._store.best(cell)
      if cell in self._owned:
        copy = copy.merge(self._owned[cell].copy)
    # Without a reason no model is sent.
    if copy.is_newer_than(
      fields["version"], fields["slots_version"], fields["rank"]
    ):
      return copy.to_message(status="done")
    return _NONE

  def begin(self) -> None:
    """Drops cells without a commit that are older than this worker's center.

    It was not known whether the run begins with it when they were taken over.
    """
    with self._changed:
      for cell, owned in list(self._owned.items()):
        if not owned.copy.version and (
          owned.copy.rank < self._store.best(cell).rank
        ):
          del self._owned[cell]
      self._changed.notify_all()

  def retract(self) -> None:
    """Drops cells without a commit: the run may go on from another center."""
    with self._changed:
      for cell, owned in list(self._owned.items()):
        if not owned.copy.version:
          del self._owned[cell]
      self._changed.notify_all()

  # -- Views.

  def _copies(self) -> dict[Cell, Copy]:
    return {cell: owned.copy for cell, owned in self._owned.items()}

  def _follow(self, view: View) -> None:
    """Gives cells up that have another owner in a view."""
    with self._changed:
      self._store.check_incarnation()
      for cell in list(self._owned):
        if not self._owns_in(view, cell):
          # The next owner asks for it.
          self._store.keep_backup(cell, self._owned.pop(cell).copy)
      for cell in list(self._opening):
        if not self._owns_in(view, cell):
          del self._opening[cell]
      self._seen_epoch = view.epoch
      self._changed.notify_all()
      # The next member may be another one.
      self.backups.start()

  def _owns_in(self, view: View, cell: Cell) -> bool:
    ids, me = view.worker_ids, self._peers.worker_id
    return me in ids and next((k for k in ids if k >= cell[0]), ids[0]) == me

  def _forget(self) -> None:
    """Gives all cells up, after the others have lost this worker."""
    for cell, owned in self._owned.items():
      self._store.keep_backup(cell, owned.copy)
    self._owned.clear()
    self._opening.clear()
    self.backups.forget()
