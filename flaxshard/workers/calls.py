"""Calls between members of one view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import logging
import threading
import time
from typing import Any

from flaxshard.workers.current_view import CurrentView
from flaxshard.workers.messages import Message
from flaxshard.workers.peers import CallFailed
from flaxshard.workers.peers import Handler
from flaxshard.workers.peers import ViewChanged
from flaxshard.workers.view_log import Member
from flaxshard.workers.view_log import View

_log = logging.getLogger(__name__)

# Seconds between attempts to reach a worker: from the first to the later ones.
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0

_NOTHING = Message()


class Call:
  """One call of a member.

  Args:
    current: The current view.
    worker_id: Index of the member.
    method: Name of the method.
    message: The message.
    timeout: Seconds to wait for the answer; None: without end.

  Raises:
    NotAMember: This worker is no member.
    PeerLost: The other one is no member.
  """

  def __init__(
    self,
    current: CurrentView,
    worker_id: int,
    method: str,
    message: Message,
    timeout: float | None,
  ):
    self._current = current
    self._method = method
    self._message = message
    self._timeout = timeout
    self._end = None if timeout is None else time.monotonic() + timeout
    with current.changed:
      self._me = current.me
      missing = Member(worker_id, "", "")
      self._other = current.view.member(worker_id) or missing
      current.check(self._me, self._other)

  def send(self, transport: Any) -> Message:
    """Sends the call, until there is an answer; see `Peers.call`."""
    pause = _FIRST_PAUSE
    while True:
      with self._current.changed:
        self._current.check(self._me, self._other)
        view = self._current.view
      header = {
        "to": self._other.incarnation,
        "from": self._me.incarnation,
        "view": view.to_fields(),
        "method": self._method,
      }
      try:
        answer, message = transport.call(
          self._other.address,
          header,
          self._message,
          self._seconds_left(),
          lambda cancel: self._current.cancel_if_lost(
            self._me, self._other, cancel
          ),
        )
      except TimeoutError:
        self._seconds_left()
        continue
      except ConnectionError as e:
        _log.debug("worker %d: %s: %s", self._other.worker_id, self._method, e)
        self._pause(pause)
        pause = min(2 * pause, _LAST_PAUSE)
        continue
      if answer["view"] is not None:
        self._current.adopt(View.from_fields(answer["view"]))
      # From here on a newer view does not matter: this is the moment at which
      # the call returns.
      with self._current.changed:
        self._current.check(self._me, self._other)
        if answer["status"] == "ok":
          return message
      if answer["status"] == "view":
        raise ViewChanged(f"view {self._current.view.epoch}")
      if answer["status"] == "failed":
        raise CallFailed(f"worker {self._other.worker_id}: {answer['error']}")
      self._pause(pause)  # another process has this address

  def run_here(self, handlers: Mapping[str, Handler]) -> Message:
    """Runs the handler of this worker, as for a call of another one."""
    results: list[Message | Exception] = []

    def run() -> None:
      result: Message | Exception
      try:
        result = handlers[self._method](self._me.worker_id, self._message)
      except Exception as e:
        result = _failure(self._method, handlers, e)
      with self._current.changed:
        results.append(result)
        self._current.changed.notify_all()

    threading.Thread(target=run, name="flaxshard_call", daemon=True).start()
    with self._current.changed:
      while not results:
        self._current.check(self._me, self._other)
        self._current.changed.wait(self._seconds_left())
      self._current.check(self._me, self._other)
    if isinstance(results[0], Exception):
      raise results[0]
    return results[0]

  def _seconds_left(self) -> float | None:
    """Returns the rest of the timeout; raises if there is none."""
    if self._end is None:
      return None
    left = self._end - time.monotonic()
    if left <= 0:
      raise TimeoutError(
        f"worker {self._other.worker_id} has not answered "
        f"{self._method!r} within {self._timeout:g} s"
      )
    return left

  def _pause(self, seconds: float) -> None:
    """Waits, but not if one of both is no longer a member."""
    end = time.monotonic() + seconds
    if self._end is not None:
      end = min(end, self._end)
    with self._current.changed:
      while (left := end - time.monotonic()) > 0:
        self._current.check(self._me, self._other)
        self._current.changed.wait(left)
    self._seconds_left()


def answer(
  current: CurrentView,
  handlers: Mapping[str, Handler],
  header: dict[str, Any],
  read: Callable[[], Message],
) -> tuple[dict[str, Any], Message]:
  """Answers a call of another worker.

  Args:
    current: The current view.
    handlers: The handlers by method.
    header: The header of the call.
    read: Receives its message.

  Returns:
    A header with the status `ok`, `failed`, `view` (the caller's view is old)
    or `wrong` (another process was meant), and the message.
  """
  me = current.me
  if not me.incarnation or header["to"] != me.incarnation:
    # The caller has to learn by itself what became of whom it has called.
    return {"status": "wrong", "view": None}, _NOTHING
  theirs = View.from_fields(header["view"])
  current.adopt(theirs)
  sender = theirs.member_of(header["from"])
  if sender is None or not _is_current(current, me, sender, theirs):
    return _refuse(current)
  method = header["method"]
  message = read()
  try:
    result = handlers[method](sender.worker_id, message)
    status = {"status": "ok"}
  except Exception as e:
    failure = _failure(method, handlers, e)
    result, status = _NOTHING, {"status": "failed", "error": str(failure)}
  with current.changed:
    view = current.view
    # If either was excluded meanwhile, the caller must not use the result.
    if not current.is_member or current.me != me or sender not in view.members:
      return _refuse(current)
  newer = view.to_fields() if view.epoch > theirs.epoch else None
  return {**status, "view": newer}, result


def _is_current(
  current: CurrentView, me: Member, sender: Member, theirs: View
) -> bool:
  with current.changed:
    view = current.view
    return (
      current.me == me
      and current.is_member
      and view.epoch == theirs.epoch
      and sender in view.members
    )


def _refuse(current: CurrentView) -> tuple[dict[str, Any], Message]:
  return {"status": "view", "view": current.view.to_fields()}, _NOTHING


def _failure(
  method: str, handlers: Mapping[str, Handler], error: Exception
) -> CallFailed:
  if method not in handlers:
    return CallFailed(f"no handler of {method!r} is registered")
  _log.debug("the handler of %r has failed", method, exc_info=error)
  return CallFailed(f"{type(error).__name__}: {error}")
