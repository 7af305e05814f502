"""A transport between memberships in threads, whose links can be cut.

    links = FakeLinks()
    create_transport = links.worker(0)  # for Membership
    links.split([0, 1], [2])

On a cut link, questions are lost. Calls and their answers arrive when the link
is healed, as those that TCP sends again do. A worker that is killed refuses
connections.
"""

from __future__ import annotations

import threading
import time
from typing import Any


class FakeLinks:
  """The links between workers, by index."""

  def __init__(self) -> None:
    self.changed = threading.Condition()
    self.transports: dict[str, FakeTransport] = {}
    self._cut: set[tuple[int, int]] = set()

  def worker(self, worker_id: int) -> Any:
    """Returns the argument `create_transport` of a worker."""

    def create(
      bind: str, heartbeat: float, answer_call: Any, answer_question: Any
    ) -> FakeTransport:
      del bind, heartbeat
      return FakeTransport(self, worker_id, answer_call, answer_question)

    return create

  def cut(self, a: int, b: int, *, one_way: bool = False) -> None:
    """Cuts the link from worker `a` to worker `b`, by default both ways."""
    with self.changed:
      self._cut |= {(a, b)} if one_way else {(a, b), (b, a)}

  def split(self, *groups: list[int]) -> None:
    """Cuts all links between workers of different groups."""
    group_of = {k: i for i, group in enumerate(groups) for k in group}
    with self.changed:
      self._cut = {
        (a, b) for a in group_of for b in group_of if group_of[a] != group_of[b]
      }
      self.changed.notify_all()

  def heal(self) -> None:
    """Brings all links back."""
    self.split()

  def is_cut(self, a: int, b: int) -> bool:
    return (a, b) in self._cut


class FakeTransport:
  """Stands in for `flaxshard.workers.transport.Transport`."""

  _next_port = 1000

  def __init__(
    self,
    links: FakeLinks,
    worker_id: int,
    answer_call: Any,
    answer_question: Any,
  ) -> None:
    self.worker_id = worker_id
    self.answer_call, self.answer_question = answer_call, answer_question
    self._links = links
    self._is_closed = False
    with links.changed:
      FakeTransport._next_port += 1
      self.port = FakeTransport._next_port
      links.transports[f"fake:{self.port}"] = self

  def call(
    self, address: str, header: Any, message: Any, timeout: Any, track: Any
  ) -> Any:
    links, me = self._links, self.worker_id
    other = self._find(address)
    cancelled = threading.Event()
    answers: list[Any] = []
    end = None if timeout is None else time.monotonic() + timeout

    def cancel() -> None:
      with links.changed:
        cancelled.set()
        links.changed.notify_all()

    def serve() -> None:
      if not wait(lambda: not links.is_cut(me, other.worker_id)):
        return
      answer = other.answer_call(header, lambda: message)
      with links.changed:
        answers.append(answer)
        links.changed.notify_all()

    def wait(is_done: Any) -> bool:
      with links.changed:
        while not cancelled.is_set() and not other._is_closed:
          if is_done():
            return True
          left = None if end is None else end - time.monotonic()
          if left is not None and left <= 0:
            raise TimeoutError(address)
          links.changed.wait(left)
      return False

    with track(cancel):
      thread = threading.Thread(target=_quietly, args=(serve,), daemon=True)
      thread.start()
      if wait(lambda: answers and not links.is_cut(other.worker_id, me)):
        return answers[0]
    raise ConnectionError(address)

  def ask(self, address: str, question: Any, timeout: float, done: Any) -> None:
    del timeout

    def serve() -> None:
      answer = None
      try:
        other = self._find(address)
        if not self._links.is_cut(self.worker_id, other.worker_id):
          answer = other.answer_question(question)
        if self._links.is_cut(other.worker_id, self.worker_id):
          answer = None
      except ConnectionError:
        pass
      done(answer)

    threading.Thread(target=serve, daemon=True).start()

  def forget(self, address: str) -> None:
    del address

  def close(self) -> None:
    with self._links.changed:
      self._is_closed = True
      self._links.changed.notify_all()

  def _find(self, address: str) -> FakeTransport:
    other = self._links.transports[address]
    if self._is_closed or other._is_closed:
      raise ConnectionError(address)
    return other


def _quietly(function: Any) -> None:
  try:
    function()
  except (TimeoutError, ConnectionError):
    pass
