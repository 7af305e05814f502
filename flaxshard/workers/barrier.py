"""The first start of a run: all workers come together and compare themselves.

The member with the lowest index, the leader, hears all others and decides. They
ask it again and again, so that another one can take its place if it dies.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import json
import logging
import threading
import time
from typing import Any

from flaxshard.core import checks
from flaxshard.workers import facts
from flaxshard.workers import membership
from flaxshard.workers.messages import Message

_log = logging.getLogger(__name__)

_METHOD = "hello"
_POLL_SECONDS = 0.05
# A call waits for a worker that is dead as long as it is a member.
_CALL_SECONDS = 2.0
# How long the leader of an error stays for those who have not heard it.
_TELL_SECONDS = 10.0

_SAME = "Start all workers with the same model, wrappers and config."


@dataclasses.dataclass(frozen=True)
class Hello:
  """The facts and the progress of one worker, for the leader.

  Attributes:
    facts: The result of `facts.describe`.
    commits: The number of commits of its center.
    local_step: Its local step.
    digest: A digest of its center.
  """

  facts: dict[str, Any]
  commits: int
  local_step: int
  digest: str

  def to_json(self) -> str:
    """Returns the text for `from_json`."""
    return json.dumps(dataclasses.asdict(self), sort_keys=True)

  @classmethod
  def from_json(cls, text: str) -> Hello:
    """Undoes `to_json`, which turns tuples into lists."""
    return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The decision of the leader: who begins, and with whose center.

  Attributes:
    present: The workers that the run begins with.
    source: The one whose center is the newest.
    behind: Those that receive its center.
    incarnations: Those of the workers that are present: one that is killed and
      comes back is not.
    error: The name and the message of the error that all raise, if any.
  """

  present: list[int]
  source: int
  behind: list[int]
  incarnations: list[str]
  error: list[str] | None = None


class Barrier:
  """Waits for the workers of a run, and compares them.

  Args:
    peers: The other workers.
    hello: What this worker says about itself.
    quorum: Least number of workers.
    equal_centers: Whether centers with the same number of commits must be
      equal. Those of sequential commits are not: each worker has another time
      of its last pull.
  """

  def __init__(
    self, peers: Any, hello: Hello, quorum: int, equal_centers: bool = True
  ):
    self._equal_centers = equal_centers
    self._peers = peers
    self._hello = Hello.from_json(hello.to_json())
    self._quorum = quorum
    self._mutex = threading.Lock()
    # By incarnation.
    self._hellos: dict[str, Hello] = {}
    self._verdict: Verdict | None = None
    self._told: set[int] = set()
    peers.register(_METHOD, self._handle)

  def agree(
    self, timeout: float, wait: Callable[[float], None]
  ) -> Verdict | None:
    """Waits until the run begins.

    Args:
      timeout: Seconds to wait for workers that are missing.
      wait: Waits for some seconds, or raises if this worker shall stop.

    Returns:
      The verdict; None if the run has begun without this worker.

    Raises:
      ValueError: Two workers differ.
      TimeoutError: Fewer workers than the quorum have come.
    """
    end = time.monotonic() + timeout
    while True:
      verdict = self._verdict or self._ask_leader(end)
      if verdict is not None:
        if self._peers.incarnation not in verdict.incarnations:
          return None
        self._verdict = verdict
        if verdict.error is not None:
          self._pass_on(verdict, wait)
          _raise(*verdict.error)
        return verdict
      view = self._peers.view
      if view.started and _leader(view) == self._peers.worker_id:
        return None
      wait(_POLL_SECONDS)

  def compare_with(self, other: int) -> None:
    """Raises a ValueError if this worker differs from another one.

    Args:
      other: The other worker.

    Raises:
      PeerLost: The other worker is gone.
      ViewChanged: It may be gone: ask again.
      TimeoutError: It does not answer.
    """
    answer = self._peers.call(
      other, _METHOD, self._message(), timeout=_CALL_SECONDS
    )
    hello = Hello.from_json(answer.fields["hello"])
    error = _find_difference(
      {other: hello, self._peers.worker_id: self._hello}, False
    )
    if error is not None:
      raise ValueError(error)

  def _ask_leader(self, end: float) -> Verdict | None:
    view, me = self._peers.view, self._peers.worker_id
    leader = _leader(view)
    if leader == me:
      return None if view.started else self._decide(view, end)
    try:
      answer = self._peers.call(
        leader, _METHOD, self._message(), timeout=_CALL_SECONDS
      )
    except (membership.ViewChanged, membership.PeerLost, TimeoutError):
      return None
    found = answer.fields["verdict"]
    if found is not None:
      return Verdict(**json.loads(found))
    # The leader has joined a run that had begun.
    return Verdict([], me, [], []) if view.started else None

  def _decide(self, view: Any, end: float) -> Verdict | None:
    incarnations = {m.worker_id: m.incarnation for m in view.members}
    with self._mutex:
      hellos = {
        k: self._hellos[x] for k, x in incarnations.items() if x in self._hellos
      }
    hellos[self._peers.worker_id] = self._hello
    missing = sorted(set(range(self._peers.num_workers)) - set(hellos))
    if missing and time.monotonic() < end:
      return None
    present = sorted(hellos)
    error = self._find_error(hellos, missing)
    source = max(present, key=lambda k: (hellos[k].commits, -k))
    newest = hellos[source].commits
    behind = [k for k in present if hellos[k].commits < newest]
    if not self._equal_centers:
      digest = hellos[source].digest
      behind = [k for k in present if hellos[k].digest != digest]
    verdict = Verdict(
      present, source, behind, [incarnations[k] for k in present], error
    )
    if error is None:
      if missing:
        checks.warn(
          f"workers {', '.join(map(str, missing))} of "
          f"{self._peers.num_workers} have not come: the run begins with "
          f"{len(present)}. They may join at any time."
        )
      try:
        self._peers.begin()
      except membership.ViewChanged:
        return None
    return verdict

  def _find_error(
    self, hellos: dict[int, Hello], missing: list[int]
  ) -> list[str] | None:
    is_first = not any(hello.commits for hello in hellos.values())
    difference = _find_difference(hellos, self._equal_centers or is_first)
    if difference is not None:
      return ["ValueError", difference]
    if len(hellos) < self._quorum:
      names = ", ".join(map(str, missing))
      return [
        "TimeoutError",
        f"Worker: of {self._peers.num_workers} workers {len(hellos)} have come "
        f"in time, which is below quorum={self._quorum}. Missing: {names}. "
        "Start them, or raise start_timeout.",
      ]
    return None

  def _message(self, has_verdict: bool = False) -> Message:
    fields = {
      "hello": self._hello.to_json(),
      "incarnation": self._peers.incarnation,
      "has_verdict": has_verdict,
    }
    return Message(fields)

  def _handle(self, sender: int, message: Message) -> Message:
    with self._mutex:
      hello = Hello.from_json(message.fields["hello"])
      self._hellos[message.fields["incarnation"]] = hello
      verdict = self._verdict
      if message.fields["has_verdict"]:
        self._told.add(sender)
    text = None
    if verdict is not None:
      text = json.dumps(dataclasses.asdict(verdict))
    return Message({"hello": self._hello.to_json(), "verdict": text}, b"")

  def _pass_on(self, verdict: Verdict, wait: Callable[[float], None]) -> None:
    """Waits until all others know the error, as its leader alone does."""
    me = self._peers.worker_id
    leader = _leader(self._peers.view)
    if leader != me:
      with contextlib.suppress(
        membership.PeerLost, membership.ViewChanged, TimeoutError
      ):
        # Only now may the leader go: its first answer has arrived.
        message = self._message(has_verdict=True)
        self._peers.call(leader, _METHOD, message, timeout=_CALL_SECONDS)
      return
    end = time.monotonic() + _TELL_SECONDS
    while time.monotonic() < end:
      members = set(self._peers.view.worker_ids)
      if (set(verdict.present) & members) - {me} <= self._told:
        return
      wait(_POLL_SECONDS)


def _find_difference(hellos: dict[int, Hello], centers: bool) -> str | None:
  """Returns how two workers differ, in a sentence, or None.

  Args:
    hellos: What the workers say, by index.
    centers: Whether to compare centers with the same number of commits.
  """
  first = min(hellos)
  for k, hello in sorted(hellos.items()):
    found = facts.first_difference(hellos[first].facts, hello.facts)
    if found is not None:
      where, a, b = found
      return (
        f"Worker: workers must be the same, but {where} is {a} at worker "
        f"{first} and {b} at worker {k}. {_SAME}"
      )
  newest = max(hello.commits for hello in hellos.values())
  same = {k: h.digest for k, h in hellos.items() if h.commits == newest}
  first = min(same)
  for k, digest in sorted(same.items()):
    if centers and digest != same[first]:
      return (
        f"Worker: the centers of workers {first} and {k} differ, but have both "
        f"{newest} commits: state.params must be equal. Create the state of "
        "all workers with the same random key, or restore the same run."
      )
  return None


def _leader(view: Any) -> int:
  return min(member.worker_id for member in view.members)


def _raise(name: str, text: str) -> None:
  raise {"ValueError": ValueError, "TimeoutError": TimeoutError}[name](text)
