"""The interface through which a worker calls the others, and its exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flaxshard.workers.messages import Message
from flaxshard.workers.view_log import View

# Gets the index of the sender and its message, and returns the answer.
Handler = Callable[[int, Message], Message]


class PeerLost(Exception):
  """The worker that was called is not, or is no longer, a member."""


class ViewChanged(Exception):
  """The view has changed since the caller has looked at it.

  The worker that was called is still a member, but did not see the message.
  """


class NotAMember(Exception):
  """The others have lost this worker: it must join again."""


class CallFailed(Exception):
  """The handler of the other worker has raised an exception, or is missing."""


class Peers(Protocol):
  """The other workers, as rounds, the center and `Worker` see them."""

  @property
  def worker_id(self) -> int:
    """Index of this worker."""
    ...

  @property
  def num_workers(self) -> int:
    """Number of workers of the run, also of those that are no members."""
    ...

  @property
  def incarnation(self) -> str:
    """The incarnation of this worker; each `join` makes a new one."""
    ...

  @property
  def view(self) -> View:
    """The newest view that this worker knows."""
    ...

  def call(
    self,
    worker_id: int,
    method: str,
    message: Message,
    timeout: float | None = None,
  ) -> Message:
    """Sends a message to a member, which may be this worker, and waits.

    The message is sent again after a failure of the connection, as long as the
    other worker is a member. So its handler may get it more than once, also
    while the first call of it has not returned yet.

    Args:
      worker_id: Index of the member.
      method: Name of the method, which the other one has registered.
      message: The message.
      timeout: Seconds to wait for the answer; None: as long as the other worker
        is a member.

    Returns:
      The answer. At this moment the other worker is a member of `view`.

    Raises:
      PeerLost: The other worker is not a member, or ceased to be one.
      ViewChanged: The other worker has refused the message, because it knew a
        newer view. `view` is that one now.
      NotAMember: This worker is no longer a member.
      CallFailed: The handler has raised an exception.
      TimeoutError: There was no answer within `timeout`.
    """
    ...

  def register(self, method: str, handler: Handler) -> None:
    """Sets the handler of a method.

    Each call runs in a thread of its own, so a handler may wait. Handlers are
    called by members of the same view only. Register all before `join`.

    Args:
      method: Name of the method.
      handler: Gets the sender's index and its message; returns the answer.
    """
    ...

  def on_view(self, callback: Callable[[View], None]) -> None:
    """Calls a function with each new view, in order, from one thread.

    `view` may be newer by then. After an exclusion the view does not have this
    worker.

    Args:
      callback: The function.
    """
    ...

  def owner_of(self, part: int) -> int:
    """Returns the worker that owns a part in the current view.

    Args:
      part: Index of the part, from 0 to `num_workers` - 1.

    Returns:
      The worker with this index, or the next member in cyclic order.
    """
    ...

  def begin(self) -> None:
    """Marks the run as started, in a new view with the same members.

    Does nothing if it is marked.

    Raises:
      ViewChanged: The members have changed meanwhile.
      NotAMember: This worker is no longer a member.
      OSError: The view cannot be written.
    """
    ...
