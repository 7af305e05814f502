"""Membership: which workers take part, and calls between them."""

from __future__ import annotations

import atexit
from collections.abc import Callable
import contextlib
import logging
import os
import time
from typing import Any
import uuid
import weakref

from flaxshard.core import local_processes
from flaxshard.processes import cluster
from flaxshard.workers import calls
from flaxshard.workers import proposals
from flaxshard.workers import questions
from flaxshard.workers.admission import Admission
from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.joining import Joining
from flaxshard.workers.messages import Message
from flaxshard.workers.peers import CallFailed
from flaxshard.workers.peers import Handler
from flaxshard.workers.peers import NotAMember
from flaxshard.workers.peers import PeerLost
from flaxshard.workers.peers import ViewChanged
from flaxshard.workers.signs_of_life import SignsOfLife
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View
from flaxshard.workers.view_log import ViewLog
from flaxshard.workers.view_watch import ViewWatch

__all__ = ["CallFailed", "Membership", "NotAMember", "PeerLost", "ViewChanged"]

_log = logging.getLogger(__name__)

# Seconds that `leave` waits until the others know it.
_FAREWELL_SECONDS = 1.0

_open: weakref.WeakSet[Membership] = weakref.WeakSet()


class Membership:
  """This worker among the members of a run; implements `Peers`.

  Members ping each other. A member that does not answer for `heartbeat` seconds
  is excluded by a new view, which any of the others may propose. The log of
  views decides; see `view_log`. A worker that has been excluded learns it from
  any other one, or from the log, and joins again.

  Args:
    directory: Directory of the views, which all workers can reach.
    worker_id: Index of this worker, from 0.
    num_workers: Number of workers of the run.
    heartbeat: Seconds without a sign of life after which a worker is dead.
    quorum: Least number of members: a view with fewer is not proposed, except
      by `join` and `leave`.
    address: `"host:port"` where others reach this worker; port 0 is the one
      where it listens. None: the variable FLAXSHARD_WORKER_ADDRESS, or the
      address of this host.
    bind: `"host:port"` where this worker listens. None: the variable
      FLAXSHARD_WORKER_BIND, or a free port.
    create_transport: Creates what sends messages, by default
      `transport.Transport`, with the same arguments.

  Attributes:
    log: The log of views.

  Raises:
    ImportError: gRPC is not installed.
    ValueError: One of the two variables is not `"host:port"`.
    OSError: This worker cannot listen at `bind`.
  """

  def __init__(
    self,
    directory: str,
    worker_id: int,
    num_workers: int,
    heartbeat: float = 10.0,
    quorum: int = 1,
    address: str | None = None,
    bind: str | None = None,
    create_transport: Callable[..., Any] | None = None,
  ):
    # Here, so that flaxshard can be imported without gRPC.
    from flaxshard.workers import transport

    self._num_workers = num_workers
    self._heartbeat = heartbeat
    self._handlers: dict[str, Handler] = {}
    self._past: set[str] = set()
    self.log = ViewLog(directory)
    address = address or _read_address("FLAXSHARD_WORKER_ADDRESS")
    if address is None and num_workers == 1:
      address = "127.0.0.1:0"
    bind = bind or _read_address("FLAXSHARD_WORKER_BIND")
    # The server answers before there is a view.
    self._current = CurrentView(Member(worker_id, "", ""))
    self._transport = (create_transport or transport.Transport)(
      bind or transport.listening_address(address),
      heartbeat,
      self._answer_call,
      self._answer_question,
    )
    host, _, port = (address or f"{transport.host_address()}:0").rpartition(":")
    self._address = f"{host}:{self._transport.port if port == '0' else port}"
    watch = ViewWatch(self._current, self.log, heartbeat, quorum)
    self._signs = SignsOfLife(
      self._current, self._transport, heartbeat, watch.exclude
    )
    self._admission = Admission(
      self._current,
      self.log,
      self._transport,
      self._signs,
      num_workers,
      heartbeat,
    )
    watch.start(self._admission.answer_requests)
    _open.add(self)

  @property
  def worker_id(self) -> int:
    """See `Peers`, as for the other methods without a description."""
    return self._current.me.worker_id

  @property
  def num_workers(self) -> int:
    """Number of workers of the run."""
    return self._num_workers

  @property
  def incarnation(self) -> str:
    """The incarnation of this worker."""
    return self._current.me.incarnation

  @property
  def view(self) -> View:
    """The newest view that this worker knows."""
    return self._current.view

  def join(
    self,
    *,
    started: bool = False,
    timeout: float | None = None,
    wait: Callable[[float], None] = time.sleep,
  ) -> View:
    """Becomes a member, through any member that lives, or as the only one.

    Call it at the start, and again after `NotAMember`. If no member of the
    latest view answers, and their processes are not known to have ended, waits
    for a little more than the heartbeat: they may be cut off from this worker,
    and answer in the directory. Then they are dead, and this worker goes on
    without them.

    Args:
      started: Whether the run has begun. A worker that comes back says so, one
        that starts does not know it.
      timeout: Seconds to try; None: without end.
      wait: Waits for some seconds, or raises to end this.

    Returns:
      A view with this worker.

    Raises:
      ValueError: Another process has the same index, or another number of
        workers.
      TimeoutError: Members live, but they cannot reach this worker, or it them.
      OSError: The directory cannot be read or written.
    """
    if self._current.is_member:
      return self._current.view
    if self.incarnation:
      self._past.add(self.incarnation)
    process = f"{local_processes.space()}:{os.getpid()}"
    self._current.become(
      Member(self.worker_id, self._address, uuid.uuid4().hex, process)
    )
    return Joining(
      self._current,
      self.log,
      self._transport,
      self._num_workers,
      self._heartbeat,
      self._past,
      wait,
    ).run(started, timeout)

  def leave(self) -> None:
    """Ceases to be a member: others go on without waiting for the heartbeat."""
    me = self._current.me

    def remove(view: View) -> View | None:
      left = [m for m in view.members if m != me]
      if len(left) == len(view.members):
        return None
      reason = f"worker {me.worker_id} has left"
      return view.next(left, reason, view.started and bool(left))

    others = self._current.others()
    try:
      view = proposals.change(self._current, self.log, remove)
    except OSError as e:
      _log.warning("worker %d cannot leave: %s", me.worker_id, e)
      return
    question = {"kind": "ping", "view": view.to_fields()}
    questions.ask_all(self._transport, others, question, _FAREWELL_SECONDS)

  def close(self) -> None:
    """Ends all threads and connections, without `leave`."""
    _open.discard(self)
    self._current.close()
    self._transport.close()

  def call(
    self,
    worker_id: int,
    method: str,
    message: Message,
    timeout: float | None = None,
  ) -> Message:
    """Calls a member."""
    call = calls.Call(self._current, worker_id, method, message, timeout)
    if worker_id == self.worker_id:
      return call.run_here(self._handlers)
    return call.send(self._transport)

  def register(self, method: str, handler: Handler) -> None:
    """Sets the handler of a method."""
    self._handlers[method] = handler

  def on_view(self, callback: Callable[[View], None]) -> None:
    """Calls a function with each new view."""
    self._current.on_view(callback)

  def owner_of(self, part: int) -> int:
    """Returns the worker that owns a part."""
    with self._current.changed:
      me = self._current.me
      self._current.check(me, me)
      ids = self._current.view.worker_ids
    return next((k for k in ids if k >= part), ids[0])

  def begin(self) -> None:
    """Marks the run as started."""
    with self._current.changed:
      me, base = self._current.me, self._current.view
      self._current.check(me, me)
    if base.started:
      raise ViewChanged(f"view {base.epoch}: the run has begun")
    view = base.next(base.members, "the run begins", started=True)
    stored = self.log.propose(view)
    self._current.adopt(stored)
    if stored != view:
      with self._current.changed:
        self._current.check(me, me)
      raise ViewChanged(f"view {self.view.epoch}: {self.view.reason}")
    self._signs.ping_now()

  def _answer_call(
    self, header: dict[str, Any], read: Callable[[], Message]
  ) -> tuple[dict[str, Any], Message]:
    return calls.answer(self._current, self._handlers, header, read)

  def _answer_question(self, question: dict[str, Any]) -> dict[str, Any]:
    me = self._current.me
    if not me.incarnation or question["to"] != me.incarnation:
      # Only those who can read the log of views know incarnations.
      return {"incarnation": "", "view": None}
    answer: dict[str, Any] = {"incarnation": me.incarnation, "view": None}
    match question["kind"]:
      case "ping":
        theirs = View.from_fields(question["view"])
        self._current.adopt(theirs)
        view = self._current.view
        if view.epoch > theirs.epoch:
          answer["view"] = view.to_fields()
      case "join":
        answer |= self._admission.admit(question)
      case "reach":
        member = Member(**question["member"])
        answer["reaches"] = self._admission.reaches(member)
    return answer


@atexit.register
def _close_all() -> None:
  """Ends connections before the interpreter stops the threads that use them."""
  for membership in list(_open):
    with contextlib.suppress(Exception):
      membership.close()


def _read_address(variable: str) -> str | None:
  """Returns the address in an environment variable; port 0 is a free one."""
  address = os.environ.get(variable)
  if not address:
    return None
  host, _, port = address.rpartition(":")
  cluster.split_address(variable, f"{host}:1" if port == "0" else address)
  return address
