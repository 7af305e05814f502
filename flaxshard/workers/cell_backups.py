"""Copies of an owner's cells, with slots, at the next member."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent import futures
import time

from flaxshard.workers import cells as cells_lib
from flaxshard.workers.background import Background
from flaxshard.workers.cell_copy import Copy
from flaxshard.workers.cell_store import CellStore
from flaxshard.workers.cells import Cell
from flaxshard.workers.messages import Message
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import Peers
from flaxshard.workers.peers import ViewChanged


class CellBackups:
  """Sends what this worker owns to the next member, from a thread.

  Args:
    peers: The other workers.
    store: What this worker has of all cells, its own backups of others too.
    copies: Returns the cells that this worker owns; called with the lock of
      the store.
  """

  def __init__(
    self,
    peers: Peers,
    store: CellStore,
    copies: Callable[[], Mapping[Cell, Copy]],
  ):
    self._peers = peers
    self._store = store
    self._copies = copies
    # The versions that the next member of a view has.
    self._sent: dict[Cell, int] = {}
    self._sent_in = peers.view.epoch
    self._last: futures.Future[None] | None = None
    self._thread = Background("flaxshard_backup")
    peers.register("keep_backup", self._handle)

  def close(self) -> None:
    """Ends the thread, once its calls have ended."""
    self._thread.close()

  def forget(self) -> None:
    """Takes note that others may not have any; called with the lock."""
    self._sent.clear()

  def lag(self, cell: Cell, version: int) -> int:
    """Returns how many commits older than a version the copy of a cell is.

    Called with the lock.
    """
    return version - self._sent.get(cell, 0)

  def start(self) -> None:
    """Sends the cells that have changed, unless the last ones are under way.

    Called with the lock.
    """
    if self._last is not None and not self._last.done():
      return
    view = self._peers.view
    if view.epoch != self._sent_in:
      # A new neighbor has no backups yet.
      self._sent.clear()
      self._sent_in = view.epoch
    changed = {
      cell: copy
      for cell, copy in self._copies().items()
      if copy.version != self._sent.get(cell)
    }
    me = self._peers.worker_id
    others = [k for k in view.worker_ids if k != me]
    if not (changed and others):
      return
    following = next((k for k in others if k > me), others[0])
    self._last = self._thread.submit(self._send, following, changed, view.epoch)

  def wait(self, seconds: float) -> None:
    """Sends what has changed, and waits until the next member has it.

    Args:
      seconds: The longest time to wait.
    """
    end = time.monotonic() + seconds
    # The one under way may be older.
    for _ in range(2):
      with self._store.changed:
        self.start()
        last = self._last
      if last is not None:
        futures.wait([last], end - time.monotonic())

  def _send(
    self, worker_id: int, copies: Mapping[Cell, Copy], epoch: int
  ) -> None:
    incarnation = self._peers.incarnation
    for cell, copy in copies.items():
      message = copy.to_message(
        cell=cells_lib.to_list(cell), incarnation=incarnation
      )
      try:
        answer = self._peers.call(worker_id, "keep_backup", message)
      except (PeerLost, ViewChanged, NotAMember):
        return
      with self._store.changed:
        self._store.bytes_sent += len(message.data)
        # With another view the next member may be another one.
        if answer.fields["status"] == "done" and self._sent_in == epoch:
          self._sent[cell] = copy.version

  def _handle(self, sender: int, message: Message) -> Message:
    cell = cells_lib.to_cell(message.fields["cell"])
    copy = Copy.from_message(message)
    with self._store.changed:
      self._store.check_incarnation()
      self._store.bytes_received += len(message.data)
      member = self._peers.view.member(sender)
      try:
        is_owner = self._peers.owner_of(cell[0]) == sender
      except NotAMember:
        is_owner = False
      if (
        not is_owner
        or member is None
        or member.incarnation != message.fields["incarnation"]
      ):
        # The next owner may have asked already: it goes on without this one.
        return Message({"status": "moved"})
      self._store.keep_backup(cell, copy)
    return Message({"status": "done"})
