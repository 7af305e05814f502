"""The owner of parts: it collects commits, reduces them, and answers them."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import time

from flaxshard.workers.messages import Message
from flaxshard.workers.parts import Layout
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import Peers
from flaxshard.workers.peers import ViewChanged
from flaxshard.workers.round_results import Commit
from flaxshard.workers.round_results import Key
from flaxshard.workers.round_results import Result
from flaxshard.workers.round_results import Results
from flaxshard.workers.view_log import View

Fragments = tuple[int, ...]

# Seconds between two looks at the members and the deadline.
LOOK_SECONDS = 0.05


@dataclasses.dataclass
class _Round:
  """A round of one part that its owner has opened.

  Attributes:
    fragments: The fragments of its commits.
    opened: When the first commit came.
    given: The newest commit of each worker.
    may_close: Whether no member has a result of it.
    is_missed: Whether it is behind a member, and no member has its result.
    is_asking: Whether a thread is asking them.
    is_closing: Whether a thread is reducing it.
  """

  fragments: Fragments
  opened: float
  given: dict[int, Commit] = dataclasses.field(default_factory=dict)
  may_close: bool = False
  is_missed: bool = False
  is_asking: bool = False
  is_closing: bool = False


class RoundOwner:
  """The open rounds of the parts that this worker owns.

  Args:
    peers: The other workers.
    layout_of: Returns the layout of the commits of some fragments.
    results: The results that this worker keeps.
    quorum: Least number of workers in a round.
    deadline: Seconds that a round waits for others after its first commit.
    is_done: Whether a worker, given by its incarnation, commits no more.

  Attributes:
    bytes_sent: Bytes of the answers to others.
    bytes_received: Bytes of the commits of others.
  """

  def __init__(
    self,
    peers: Peers,
    layout_of: Callable[[Fragments], Layout],
    results: Results,
    quorum: int,
    deadline: float,
    is_done: Callable[[str], bool],
  ):
    self._peers = peers
    self._layout_of = layout_of
    self._results = results
    self._changed = results.changed
    self._quorum = quorum
    self._deadline = deadline
    self._is_done = is_done
    self._rounds: dict[Key, _Round] = {}
    # For each part that this worker owns, once it has asked for it: the newest
    # round that may have been closed by the owner before.
    self._closed_before: dict[int, int] = {}
    self._is_closed = False
    self.bytes_sent = self.bytes_received = 0
    peers.register("commit_part", self._handle_commit)
    peers.register("find_result", self._handle_find)
    peers.on_view(self._follow)

  def close(self) -> None:
    """Ends the calls that wait for a round."""
    with self._changed:
      self._is_closed = True
      self._changed.notify_all()

  # -- Commits.

  def _handle_commit(self, sender: int, message: Message) -> Message:
    fields = message.fields
    key = fields["index"], fields["part"]
    commit = Commit(fields["incarnation"], fields["number"], message.data)
    with self._changed:
      try:
        answer = self._answer(sender, key, tuple(fields["fragments"]), commit)
      except NotAMember:
        answer = Message({"status": "moved"})
      if sender != self._peers.worker_id:
        self.bytes_received += len(message.data)
        self.bytes_sent += len(answer.data)
    return answer

  def _answer(
    self, sender: int, key: Key, fragments: Fragments, commit: Commit
  ) -> Message:
    """Waits for the result of a round; called and returns with the lock."""
    while not self._is_closed:
      self._check_incarnation()
      if not self._results.is_settled:
        self._changed.wait(LOOK_SECONDS)
        continue
      member = self._peers.view.member(sender)
      if member is None or member.incarnation != commit.incarnation:
        break  # nobody waits for this answer
      if self._peers.owner_of(key[1]) != self._peers.worker_id:
        break
      result = self._results.find(key)
      if result is not None:
        return result.to_message()
      if self._results.is_dropped(key):
        return Message({"status": "missed"})
      found = self._rounds.get(key)
      if found is None:
        found = self._rounds[key] = _Round(fragments, time.monotonic())
        found.may_close = key[0] > self._closed_before.get(key[1], key[0])
      self._add(found, sender, commit)
      if not (found.may_close or found.is_asking):
        self._ask_members(key, found)
        if found.is_missed:
          return Message({"status": "missed"})
      elif self._may_close(found):
        self._reduce(key, found)
      else:
        self._changed.wait(LOOK_SECONDS)
    return Message({"status": "moved"})

  def _add(self, found: _Round, sender: int, commit: Commit) -> None:
    old = found.given.get(sender)
    # A worker that has come back replaces what it sent before.
    if (
      old is None
      or old.incarnation != commit.incarnation
      or old.number < commit.number
    ):
      found.given[sender] = commit
      self._changed.notify_all()

  def _may_close(self, found: _Round) -> bool:
    if found.is_closing or not found.may_close:
      return False
    if len(found.given) < self._quorum:
      return False
    given = {commit.incarnation for commit in found.given.values()}
    if all(
      member.incarnation in given or self._is_done(member.incarnation)
      for member in self._peers.view.members
    ):
      return True
    return time.monotonic() - found.opened >= self._deadline

  def _reduce(self, key: Key, found: _Round) -> None:
    """Reduces a round; called and returns with the lock."""
    found.is_closing = True
    layout = self._layout_of(found.fragments)
    commits = dict(sorted(found.given.items()))
    self._changed.release()
    try:
      data, remainders = layout.reduce([c.data for c in commits.values()])
    finally:
      self._changed.acquire()
      found.is_closing = False
    if self._wait_until_settled(key, found):
      names = {worker: commit.name for worker, commit in commits.items()}
      self._keep(
        key, Result(data, names), remainders if layout.is_quantized else None
      )

  def _wait_until_settled(self, key: Key, found: _Round) -> bool:
    """Returns whether this worker has owned an open round all the time.

    A round is dropped with a view in which another worker owns it. That one may
    have closed it, even if this worker owns it again in a later view.
    """
    while not (self._results.is_settled or self._is_closed):
      self._changed.wait(LOOK_SECONDS)
    self._check_incarnation()
    return self._rounds.get(key) is found and not self._is_closed

  def _keep(self, key: Key, result: Result, remainders: list | None) -> None:
    self._results.keep(key, result, remainders)
    self._rounds.pop(key, None)

  # -- Results of the owner before.

  def _ask_members(self, key: Key, found: _Round) -> None:
    """Asks all members for a result of a round, and keeps it if there is one.

    Called and returns with the lock, which it does not hold meanwhile.
    """
    index, part = key
    found.is_asking = True
    # The newest round of the part that each member knows.
    newest = {self._peers.incarnation: self._results.newest_of(part)}
    try:
      while self._wait_until_settled(key, found):
        members = self._peers.view.members
        left = [m for m in members if m.incarnation not in newest]
        if not left:
          self._closed_before.setdefault(part, max(newest.values()))
          # What a dead worker had in its center is lost with it.
          found.is_missed = index <= max(newest[m.incarnation] for m in members)
          found.may_close = not found.is_missed
          if found.is_missed:
            del self._rounds[key]
          self._changed.notify_all()
          return
        answer = self._ask(left[0].worker_id, key)
        if answer is None:
          self._changed.wait(LOOK_SECONDS)
        elif not self._wait_until_settled(key, found):
          return
        elif answer.fields["status"] == "done":
          self._keep(key, Result.of(answer), None)
        else:
          newest[left[0].incarnation] = answer.fields["newest"]
    finally:
      found.is_asking = False

  def _ask(self, worker_id: int, key: Key) -> Message | None:
    message = Message({"index": key[0], "part": key[1]})
    self._changed.release()
    try:
      return self._peers.call(worker_id, "find_result", message)
    except (PeerLost, ViewChanged):
      return None
    finally:
      self._changed.acquire()

  def _handle_find(self, sender: int, message: Message) -> Message:
    del sender
    key = message.fields["index"], message.fields["part"]
    with self._changed:
      self._check_incarnation()
      result = self._results.find(key)
      if result is not None:
        return result.to_message()
      newest = self._results.newest_of(key[1])
    return Message({"status": "none", "newest": newest})

  # -- Views.

  def _check_incarnation(self) -> None:
    if self._results.check_incarnation():
      self._rounds.clear()
      self._closed_before.clear()

  def _follow(self, view: View) -> None:
    """Drops what this worker does not own in a view; wakes those who wait."""
    with self._changed:
      self._check_incarnation()
      owned = self._owned_in(view)
      for key in [key for key in self._rounds if key[1] not in owned]:
        del self._rounds[key]
      for part in self._closed_before.keys() - owned:
        del self._closed_before[part]
      self._results.seen_epoch = view.epoch
      self._changed.notify_all()

  def _owned_in(self, view: View) -> set[int]:
    """Returns the parts that this worker owns in a view."""
    ids, me = view.worker_ids, self._peers.worker_id
    if me not in ids:
      return set()
    return {
      part
      for part in range(self._peers.num_workers)
      if next((k for k in ids if k >= part), ids[0]) == me
    }
