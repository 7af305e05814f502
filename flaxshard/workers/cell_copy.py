"""One version of a cell of the center, as workers keep it and send it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from flaxshard.workers import arrays as arrays_lib
from flaxshard.workers import cells as cells_lib
from flaxshard.workers.messages import Message

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Copy:
  """A cell at one version.

  Attributes:
    version: Number of commits that the parameters have received in this run.
    slots_version: That of the slots; -1 if there are none.
    arrays: Arrays by name; all of the cell, or those of an answer.
    applied: The last commit of each worker, by its index as a string: its
      incarnation, and the number of the commit.
    rank: The commits of the center that version 0 is from. They are those of
      all fragments, and cannot be compared with versions.
  """

  version: int
  slots_version: int
  arrays: Arrays
  applied: Mapping[str, Sequence[Any]]
  rank: int = 0

  def has(self, worker: int, incarnation: str, number: int) -> bool:
    """Returns whether a commit is in this version.

    Args:
      worker: The worker that has sent it.
      incarnation: Its incarnation then.
      number: The number of the commit. A message may come again when its sender
        is at later commits.
    """
    last = self.applied.get(str(worker))
    return last is not None and last[0] == incarnation and last[1] >= number

  def without_slots(self) -> Copy:
    """Returns the copy that a worker continues from."""
    arrays = cells_lib.answer_of(self.arrays)
    return dataclasses.replace(self, slots_version=-1, arrays=arrays)

  def is_newer_than(self, version: int, slots_version: int, rank: int) -> bool:
    """Returns whether parameters or slots are newer than others."""
    if (self.version, self.rank) > (version, rank):
      return True
    return self.slots_version > slots_version

  def to_message(self, **fields: Any) -> Message:
    """Returns a message with the copy and further fields."""
    header, data = arrays_lib.pack(self.arrays)
    return Message(
      {
        "version": self.version,
        "slots_version": self.slots_version,
        "applied": dict(self.applied),
        "rank": self.rank,
        "arrays": header,
        **fields,
      },
      data,
    )

  @classmethod
  def from_message(cls, message: Message) -> Copy:
    """Undoes `to_message`."""
    fields = message.fields
    return cls(
      fields["version"],
      fields["slots_version"],
      arrays_lib.unpack(fields["arrays"], message.data),
      fields["applied"],
      fields["rank"],
    )

  def merge(self, other: Copy) -> Copy:
    """Returns the newest parameters and the newest slots of two copies."""
    old, new = sorted(
      (self, other), key=lambda c: (c.version, c.rank, c.slots_version)
    )
    if new.slots_version >= old.slots_version:
      return new
    newer = cells_lib.answer_of(new.arrays)
    return dataclasses.replace(
      new, slots_version=old.slots_version, arrays={**old.arrays, **newer}
    )
