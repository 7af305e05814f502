"""Records of commits: who took part, how stale they were, bytes and seconds."""

from __future__ import annotations

import dataclasses
import json
import logging
import os

from flaxshard.core import files

_log = logging.getLogger(__name__)

FILE = "commits.jsonl"


@dataclasses.dataclass(frozen=True)
class CommitRecord:
  """One commit, as the worker that sent it sees it.

  Attributes:
    commit: The number of the commit, from 1: the center's `commits` after it.
    local_step: The local step of the worker that sent it.
    fragments: The fragments that were committed.
    workers: The workers whose commits are in the result, in ascending order.
      Of a sequential commit, the worker itself.
    accepted: Whether the worker's own commit is in the result. It is not if the
      commit arrived after the deadline.
    staleness: Commits of others that the center received between the worker's
      last pull and this commit. 0 by mean or sum.
    bytes_sent: Bytes that the worker sent for this commit.
    bytes_received: Bytes that it received.
    seconds: Seconds from the commit's sending to its result.
    waited_seconds: Seconds of these that training stood still.
  """

  commit: int
  local_step: int
  fragments: tuple[int, ...]
  workers: tuple[int, ...]
  accepted: bool
  staleness: int
  bytes_sent: int
  bytes_received: int
  seconds: float
  waited_seconds: float


class CommitLog:
  """The records of a worker: in memory until drained, and in a file.

  Args:
    directory: The folder of the worker. A bucket has no files that grow: there
      the records are in memory alone.
  """

  def __init__(self, directory: str):
    self._path = os.path.join(directory, FILE)
    self._records: list[CommitRecord] = []
    self._writes = not files.is_bucket(directory)
    if self._writes:
      os.makedirs(directory, exist_ok=True)

  def add(self, record: CommitRecord) -> None:
    """Adds a record. A file that cannot be written does not end a run.

    Args:
      record: The record.
    """
    self._records.append(record)
    if not self._writes:
      return
    try:
      with open(self._path, "a") as f:
        f.write(json.dumps(dataclasses.asdict(record)) + "\n")
    except OSError as e:
      self._writes = False
      _log.warning("%s is not written any more: %s", self._path, e)

  def drain(self) -> list[CommitRecord]:
    """Returns the records since the last call, in order."""
    records, self._records = self._records, []
    return records
