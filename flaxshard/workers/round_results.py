"""The results of rounds that a worker keeps, for those who still need them."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from flaxshard.workers.messages import Message
from flaxshard.workers.peers import Peers

Key = tuple[int, int]  # the number of a round, and a part
Buffer = bytes | bytearray | memoryview


@dataclasses.dataclass(frozen=True)
class Commit:
  """A part of the commit of one worker.

  Attributes:
    incarnation: The incarnation of the worker.
    number: How many commits this incarnation has begun.
    data: The bytes of the part.
  """

  incarnation: str
  number: int
  data: Buffer

  @property
  def name(self) -> str:
    """A name that no other commit has."""
    return f"{self.incarnation}/{self.number}"


@dataclasses.dataclass(frozen=True)
class Result:
  """The reduced part of a round.

  Attributes:
    data: Its bytes, the same for all workers.
    commits: The names of the commits that are in it, by worker.
  """

  data: Buffer
  commits: dict[int, str]

  @classmethod
  def of(cls, message: Message) -> Result:
    """Returns the result that a message holds."""
    fields = message.fields
    names = zip(fields["workers"], fields["commits"], strict=True)
    return cls(message.data, dict(names))

  def to_message(self) -> Message:
    """Returns a message with the status `done`."""
    fields = {
      "status": "done",
      "workers": list(self.commits),
      "commits": list(self.commits.values()),
    }
    return Message(fields, self.data)


class Results:
  """The results of the last rounds that a worker has seen.

  It forgets them when the others have lost this worker and it has joined again:
  they may have reduced the same rounds without it.

  Args:
    peers: The other workers.
    num_kept: The number of rounds whose results are kept.

  Attributes:
    changed: Guards everything here; callers of the methods hold it. Notified
      when a round may close, or has a result.
    seen_epoch: The newest view that has come through `on_view`.
  """

  def __init__(self, peers: Peers, num_kept: int):
    self.changed = threading.Condition()
    self.seen_epoch = peers.view.epoch
    self._peers = peers
    self._num_kept = num_kept
    self._incarnation = peers.incarnation
    self._results: dict[Key, Result] = {}
    self._remainders: dict[Key, list[np.ndarray]] = {}
    # The newest round of each part that has a result here.
    self._newest: dict[int, int] = {}
    self._passed = 0

  @property
  def is_settled(self) -> bool:
    """Whether `on_view` has caught up with the newest view.

    Before that, this worker may have ceased to own a part and own it again.
    """
    return self.seen_epoch == self._peers.view.epoch

  def check_incarnation(self) -> bool:
    """Forgets what is from before the others have lost this worker.

    Returns:
      Whether they have, since the last call.
    """
    if self._incarnation == self._peers.incarnation:
      return False
    self._incarnation = self._peers.incarnation
    self._results.clear()
    self._remainders.clear()
    self._newest.clear()
    self._passed = 0
    return True

  def find(self, key: Key) -> Result | None:
    """Returns the result of a round, if it is kept."""
    return self._results.get(key)

  def keep(
    self,
    key: Key,
    result: Result,
    remainders: list[np.ndarray] | None = None,
  ) -> Result:
    """Keeps a result, and drops those that are too old.

    Args:
      key: The round and the part.
      result: Its result.
      remainders: What encoding has cut off, for the owner's next commit.

    Returns:
      The result, or the one that was there before.
    """
    result = self._results.setdefault(key, result)
    if remainders is not None:
      self._remainders[key] = remainders
    self._newest[key[1]] = max(self._newest.get(key[1], 0), key[0])
    for old in [k for k in self._results if self.is_dropped(k)]:
      del self._results[old]
      self._remainders.pop(old, None)
    self.changed.notify_all()
    return result

  def pop_remainders(self, key: Key) -> list[np.ndarray] | None:
    """Returns the remainders of a round that this worker has closed, once."""
    return self._remainders.pop(key, None)

  def is_dropped(self, key: Key) -> bool:
    """Returns whether a round is so old that its result is not kept."""
    newest = max(self._newest.values(), default=0)
    return key[0] <= newest - self._num_kept

  def passed(self, index: int) -> None:
    """Takes note that this worker's center holds a round and those before.

    Args:
      index: The number of the round.
    """
    self._passed = max(self._passed, index)

  def newest_of(self, part: int) -> int:
    """Returns the newest round of a part that is closed, as is known here."""
    return max(self._passed, self._newest.get(part, 0))
