"""Workers in one process, without a network: a fake of `workers.peers.Peers`.

    network = FakeNetwork(3)
    peers = [network.join(k) for k in range(3)]
    peers[0].register("add", handler)
    peers[1].call(0, "add", Message({"a": 1}))
    network.kill(0)  # calls to it raise PeerLost, at once

Calls run in the thread of the caller. Callbacks of `on_view` run in the thread
that changes the view.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import threading
from typing import Any

from flaxshard.workers import membership
from flaxshard.workers.messages import Message
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View


class FakeNetwork:
  """Connects `FakePeers`, and holds the view that all of them have."""

  def __init__(self, num_workers: int):
    self.num_workers = num_workers
    self.view = View(0, ())
    self.peers: dict[int, FakePeers] = {}
    self._changed = threading.Condition()

  def join(self, worker_id: int) -> FakePeers:
    """Adds a worker; one with this index before is dead."""
    with self._changed:
      if worker_id in self.peers:
        self.peers[worker_id].is_member = False
      peers = FakePeers(self, worker_id, f"{worker_id}.{self.view.epoch}")
      self.peers[worker_id] = peers
      others = [m for m in self.view.members if m.worker_id != worker_id]
      self._set([*others, Member(worker_id, "fake:1", peers.incarnation)])
    self._call_back()
    return peers

  def rejoin(self, peers: FakePeers) -> None:
    """Adds a worker again that was removed, with a new incarnation."""
    with self._changed:
      peers.incarnation = f"{peers.worker_id}.{self.view.epoch}"
      peers.is_member = True
      self.peers[peers.worker_id] = peers
      me = Member(peers.worker_id, "fake:1", peers.incarnation)
      self._set([*self.view.members, me])
    self._call_back()

  def kill(self, *worker_ids: int) -> None:
    """Removes workers; an answer that one of them gives later is not used."""
    with self._changed:
      for k in worker_ids:
        self.peers.pop(k).is_member = False
      self._set([m for m in self.view.members if m.worker_id in self.peers])
    self._call_back()

  def begin(self) -> None:
    """Marks the run as started."""
    with self._changed:
      self._set(self.view.members, True)
    self._call_back()

  def _set(self, members: Any, started: bool | None = None) -> None:
    self.view = View(
      self.view.epoch + 1,
      tuple(sorted(members, key=lambda m: m.worker_id)),
      self.view.started if started is None else started,
    )
    self._changed.notify_all()

  def _call_back(self) -> None:
    for peers in list(self.peers.values()):
      for callback in peers.callbacks:
        callback(self.view)

  def call(self, caller: FakePeers, worker_id: int, run: Any) -> Message:
    """Runs a handler, and waits for its answer as long as both are members."""
    with self._changed:
      callee = self.peers.get(worker_id)
    answers: list[Any] = []

    def answer() -> None:
      try:
        result = run(callee)
      except Exception as e:
        result = membership.CallFailed(f"{type(e).__name__}: {e}")
      with self._changed:
        answers.append(result)
        self._changed.notify_all()

    if callee is not None:
      threading.Thread(target=answer, daemon=True).start()
    with self._changed:
      self._changed.wait_for(
        lambda: (
          answers
          or not caller.is_member
          or callee is None
          or not callee.is_member
        )
      )
      if not caller.is_member:
        raise membership.NotAMember(str(caller.worker_id))
      if callee is None or not callee.is_member:
        raise membership.PeerLost(str(worker_id))
    if isinstance(answers[0], Exception):
      raise answers[0]
    return answers[0]


@dataclasses.dataclass(eq=False)
class FakePeers:
  """One worker of a `FakeNetwork`."""

  network: FakeNetwork
  worker_id: int
  incarnation: str

  def __post_init__(self) -> None:
    self.is_member = True
    self.handlers: dict[str, Any] = {}
    self.callbacks: list[Callable[[View], None]] = []

  @property
  def num_workers(self) -> int:
    return self.network.num_workers

  @property
  def view(self) -> View:
    return self.network.view

  def call(
    self,
    worker_id: int,
    method: str,
    message: Message,
    timeout: float | None = None,
  ) -> Message:
    del timeout
    copy = Message(dict(message.fields), bytes(message.data))
    return self.network.call(
      self,
      worker_id,
      lambda callee: callee.handlers[method](self.worker_id, copy),
    )

  def register(self, method: str, handler: Any) -> None:
    self.handlers[method] = handler

  def on_view(self, callback: Callable[[View], None]) -> None:
    self.callbacks.append(callback)

  def owner_of(self, part: int) -> int:
    ids = self.view.worker_ids
    return next((k for k in ids if k >= part), ids[0])

  def begin(self) -> None:
    self.network.begin()
