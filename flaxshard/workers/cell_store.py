"""The copies of cells that a worker has, whoever owns the cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import threading
from typing import Any

import numpy as np

from flaxshard.workers import cells as cells_lib
from flaxshard.workers.cell_copy import Copy
from flaxshard.workers.cells import Cell
from flaxshard.workers.peers import Peers

# The rank of a first copy of which it is not known whether the run begins with
# it: that of any other worker comes before it.
_UNRANKED = -1


class CellStore:
  """The copies of cells that a worker has, for whoever owns them next.

  Callers of the methods hold `changed`, except for those of `begin`, `reset`
  and `retract`.

  When the others have lost this worker and it has joined again, its copies are
  no longer those of the run: the others may have gone on without them. They
  only count if nobody has another one.

  Args:
    peers: The other workers.
    cells: The cells.
    center: The center of this worker.

  Attributes:
    changed: Guards everything here, and in `CellOwner`; notified when a cell
      may have changed.
    answers: The newest answer of an owner, by cell: without slots.
    backups: Copies with slots, which another worker has sent, or which are from
      the time when this worker was the owner.
    bytes_sent: Bytes that this worker has sent since they were taken.
    bytes_received: Bytes that it has received.
  """

  def __init__(self, peers: Peers, cells: cells_lib.Cells, center: Any):
    self.changed = threading.Condition()
    self.answers: dict[Cell, Copy] = {}
    self.backups: dict[Cell, Copy] = {}
    self.bytes_sent = self.bytes_received = 0
    self._peers = peers
    self._cells = cells
    self._incarnation = peers.incarnation
    self._forget: Callable[[], None] = lambda: None
    self._start = self._copies_of(center, _UNRANKED)

  def on_forget(self, callback: Callable[[], None]) -> None:
    """Calls a function before copies are given up, with the lock."""
    self._forget = callback

  def begin(self, commits: int) -> None:
    """Takes note that the run begins, or goes on, with what is here.

    Args:
      commits: The number of commits in this worker's center.
    """
    self._rank_start(commits)

  def reset(self, center: Any) -> None:
    """Takes note of a center that was received from another worker.

    Args:
      center: The center.
    """
    with self.changed:
      self.check_incarnation()
      self._start = self._copies_of(center, int(center.commits))

  def retract(self) -> None:
    """Takes note that the run may go on without the center of `reset`."""
    self._rank_start(_UNRANKED)

  def _rank_start(self, rank: int) -> None:
    with self.changed:
      self.check_incarnation()
      self._start = {
        cell: dataclasses.replace(copy, rank=rank)
        for cell, copy in self._start.items()
      }

  def _copies_of(self, center: Any, rank: int) -> dict[Cell, Copy]:
    return {
      cell: Copy(0, 0, arrays, {}, rank)
      for cell, arrays in self._cells.split(center).items()
    }

  def check_incarnation(self) -> None:
    """Gives up what is from before the others have lost this worker."""
    if self.is_current:
      return
    self._forget()
    self._start = {
      cell: Copy(0, 0, self.best(cell).arrays, {}, _UNRANKED)
      for cell in self._start
    }
    self.answers.clear()
    self.backups.clear()
    self._incarnation = self._peers.incarnation
    self.changed.notify_all()

  @property
  def is_current(self) -> bool:
    """Whether what is here is from this incarnation of the worker."""
    return self._incarnation == self._peers.incarnation

  def best(self, cell: Cell) -> Copy:
    """Returns the newest parameters and slots of a cell."""
    copy = self._start[cell]
    for copies in (self.backups, self.answers):
      if cell in copies:
        copy = copy.merge(copies[cell])
    return copy

  def keep_answer(self, cell: Cell, copy: Copy) -> None:
    """Keeps the answer of an owner, if it is the newest.

    Args:
      cell: The cell.
      copy: The answer.
    """
    self.check_incarnation()
    known = self.answers.get(cell)
    if known is None or copy.version >= known.version:
      self.answers[cell] = copy.without_slots()

  def keep_backup(self, cell: Cell, copy: Copy) -> None:
    """Keeps a copy with slots.

    Args:
      cell: The cell.
      copy: The copy.
    """
    known = self.backups.get(cell)
    self.backups[cell] = copy if known is None else known.merge(copy)

  def seen_version(self, cell: Cell) -> int:
    """Returns the version of the last answer that this worker has received."""
    self.check_incarnation()
    return self.answers[cell].version if cell in self.answers else 0

  def like_cell(
    self, cell: Cell, arrays: Mapping[str, np.ndarray]
  ) -> dict[str, np.ndarray]:
    """Returns the arrays of a cell with the dtypes of the center."""
    return {
      name: np.asarray(arrays[name], x.dtype)
      for name, x in self._start[cell].arrays.items()
    }

  def take_bytes(self) -> tuple[int, int]:
    """Returns the bytes sent and received since the last call."""
    found = self.bytes_sent, self.bytes_received
    self.bytes_sent = self.bytes_received = 0
    return found
