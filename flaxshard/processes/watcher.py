"""The threads that watch the other processes of a program.

  listener    waits for events; see `events`
  heartbeats  sends the heartbeats of this process to process 0
  silences    looks for missing heartbeats in process 0, and for missing answers
              of process 0 in the others
  connection  waits for the end of the connection to process 0

The events are

  failure     an exception in a process, or the loss of processes
  roll call   all processes answer; those that do not are lost
  end         all processes have reached the end of the program
"""

from __future__ import annotations

from collections.abc import Collection
import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any, NoReturn

import jax

from flaxshard.core import multihost
from flaxshard.processes import connection
from flaxshard.processes import events as events_lib
from flaxshard.processes import losses

_log = logging.getLogger(__name__)

# Seconds between two heartbeats at most. Each is a request to process 0.
_HEARTBEAT_SECONDS = 5.0

# Milliseconds of a wait that an event ends. In JAX each wait that ends by its
# timeout leaves about 20 KiB in this process and 14 KiB in process 0.
_FOREVER_MS = 24 * 3600 * 1000

# Characters of a message: compilers and file systems append long texts.
_DETAILS_LENGTH = 2000

# Seconds in which the other processes may raise the same error by themselves,
# and in which the failed process may end what it has begun, such as a save.
_SAME_ERROR_SECONDS = 2.0
_CLEANUP_SECONDS = 8.0

# Seconds that process 0, which runs the service, waits for the others to end.
_END_SECONDS = 5.0

# Seconds between the end of the first and of the last process of a program, and
# seconds after which the first one says that it waits.
_EXIT_SECONDS = 300
_NOTICE_SECONDS = 15.0

_HOW_TO_RESUME = (
  "The same command on all processes continues from the last checkpoint."
)


class Watcher:
  """Ends this process when another one fails, and tells the others of failures.

  Args:
    heartbeat_timeout: Seconds without a sign of life after which a process
      counts as lost.

  Attributes:
    has_failed: Whether the last `share` block of this process raised.
  """

  def __init__(self, heartbeat_timeout: float):
    self.has_failed = False
    self._timeout = heartbeat_timeout
    self._events = events_lib.Events()
    self._coordinator = "process 0"
    self._number = 0  # of the next event
    self._next_failure = 0  # the first event that may be another failure
    self._failure: int | None = None  # the event when this process failed
    self._depth = 0  # of nested `share` blocks
    self._raised = threading.Event()  # another process failed, and so did this
    self._left = threading.Event()  # the failed `share` block has ended
    self._period = min(heartbeat_timeout / 10, _HEARTBEAT_SECONDS)
    self._answered = 0  # heartbeats that process 0 has answered
    self._stopped = threading.Event()
    self._ending = threading.Lock()
    self._threads: list[threading.Thread] = []
    self._hang_up: connection.HangUp | None = None

  @property
  def is_active(self) -> bool:
    """Whether the threads run."""
    return not self._stopped.is_set() and jax.distributed.is_initialized()

  def start(self, coordinator_address: str | None) -> None:
    """Starts the threads.

    Args:
      coordinator_address: `"host:port"` of the coordination service, if known.
    """
    self._events.announce()
    targets = [self._listen, self._look_for_silences]
    if self._events.index:
      targets.append(self._send_heartbeats)
    if self._events.index and coordinator_address:
      self._hang_up = connection.HangUp(coordinator_address)
      targets.append(self._wait_for_hang_up)
    for target in targets:
      thread = threading.Thread(target=target, daemon=True)
      thread.start()
      self._threads.append(thread)

  def stop(self) -> None:
    """Waits until all processes have reached their end; stops the threads."""
    if not self.is_active:
      return
    if self._failure is not None and self._others_ended(self._failure):
      # JAX's exit would wait for them.
      self.acknowledge()
      flush()
      os._exit(1)
    self._events.add("arrived")
    notice = threading.Timer(_NOTICE_SECONDS, self._log_missing)
    notice.daemon = True
    notice.start()
    # The threads still run: this process learns of a failure while it waits.
    if not self._events.wait_for_all("end", _EXIT_SECONDS * 1000):
      missing = self._events.names(self._events.missing("arrived"))
      self._end(
        f"{self._events.name} has reached the end of the program, but within "
        f"{_EXIT_SECONDS} s not {missing}."
      )
    notice.cancel()
    self._stopped.set()
    if self._events.index == 0:
      # Wakes the listeners.
      self._events.send({"kind": "end"}, self._number)
    if self._hang_up is not None:
      self._hang_up.close()
    for thread in self._threads:
      thread.join(_END_SECONDS)

  def enter(self) -> None:
    """Enters a `share` block."""
    if self._depth == 0:
      self.has_failed = False
      self._failure = None
      self._left.clear()
    self._depth += 1

  def leave(self) -> None:
    """Leaves a `share` block: after the outer one, all has been cleaned up."""
    self._depth -= 1
    if self._depth == 0 and self.is_active:
      self._announce_left()

  def publish(self, error: BaseException) -> None:
    """Publishes an exception of this process, unless another one has failed.

    Args:
      error: The exception.
    """
    if self.has_failed or not self.is_active:
      return
    self.has_failed = True
    try:
      self._publish(error)
    except events_lib.Unavailable:
      self._lose_coordinator("its coordination service does not answer")
    except events_lib.Closed:
      return

  def acknowledge(self, lost: Collection[int] = ()) -> None:
    """Tells process 0 that this process ends; in process 0, waits for them.

    Args:
      lost: The processes that are lost.
    """
    with contextlib.suppress(events_lib.Closed, events_lib.Unavailable):
      self._announce_left()
      if self._events.index:
        self._events.add("ended")
        return
      deadline = time.monotonic() + _END_SECONDS
      while set(self._events.missing("ended")) - {0, *lost}:
        if time.monotonic() > deadline:
          return
        time.sleep(0.05)

  def _publish(self, error: BaseException) -> None:
    from_jax = losses.may_cause(error)
    # The error may be that another process has died.
    lost = []
    if from_jax:
      number = max(self._number, self._next_failure)
      lost = losses.call_roll(self._events, number)
    summary = multihost.summarize_error(error)
    if lost:
      text = losses.describe(
        self._events.names(lost),
        f"no answer within {losses.ANSWER_SECONDS:g} s; {self._events.name} "
        f"saw {summary}",
      )
    else:
      lines = [*str(error).splitlines()[1:], *getattr(error, "__notes__", ())]
      details = "\n".join(lines)[:_DETAILS_LENGTH]
      text = f"{self._events.name} failed: {summary}\n{details}".rstrip()
    number, event = self._events.send(
      {
        "kind": "failure",
        "lost": lost,
        "error": str(error)[:_DETAILS_LENGTH],
        "text": text,
      },
      max(self._number, self._next_failure),
    )
    self._next_failure = number + 1
    is_first = event["process"] == self._events.index
    if is_first and lost:
      self._end(text, lost)
    if not is_first and (from_jax or event["lost"]):
      self._end(
        f"{event['text']}\n{self._events.name} then saw {summary}",
        event["lost"],
      )
    self._events.add(f"raised/{number}")
    self._failure = number
    threading.Thread(
      target=self._limit_cleanup, args=(number,), daemon=True
    ).start()
    if not is_first:
      # `raise_on_all_processes` puts the process before the message.
      if not str(error).endswith(event["error"]):
        _log.error("before the error of this process, %s", event["text"])
      self._raised.set()

  def _announce_left(self) -> None:
    if self._failure is not None and not self._left.is_set():
      self._left.set()
      with contextlib.suppress(events_lib.Closed, events_lib.Unavailable):
        self._events.add(f"left/{self._failure}")

  def _limit_cleanup(self, failure: int) -> None:
    """Ends this process if its cleanup waits for processes that have ended."""
    if self._left.wait(_CLEANUP_SECONDS) or self._depth == 0:
      return
    if self._others_ended(failure):
      self._end(
        f"{self._events.name} ends: it still waits {_CLEANUP_SECONDS:g} s "
        "after its error, perhaps for processes that have ended."
      )

  def _log_missing(self) -> None:
    with contextlib.suppress(events_lib.Closed, events_lib.Unavailable):
      missing = self._events.names(self._events.missing("arrived"))
      _log.warning(
        "%s has reached the end of the program and waits for %s, at most %d s",
        self._events.name,
        missing,
        _EXIT_SECONDS,
      )

  def _others_ended(self, failure: int) -> bool:
    """Returns whether a failure was not raised by all processes themselves."""
    try:
      return bool(self._events.missing(f"raised/{failure}"))
    except events_lib.Unavailable:
      return True
    except events_lib.Closed:
      return False

  def _listen(self) -> None:
    with contextlib.suppress(events_lib.Closed):
      try:
        if self._events.index:
          name = self._events.get("process/0", round(1000 * self._timeout))
          self._coordinator = name or self._coordinator
        while not self._stopped.is_set():
          self._handle_next_event()
      except events_lib.Unavailable:
        if self.is_active:
          self._lose_coordinator("its coordination service does not answer")

  def _handle_next_event(self) -> None:
    event = self._events.receive(self._number, _FOREVER_MS)
    if event is None:
      return
    if event["kind"] == "roll call":
      self._events.add(f"answer/{self._number}")
    elif event["kind"] == "failure":
      if event["process"] != self._events.index or event["lost"]:
        self._handle_failure(event)
    elif event["kind"] == "end":
      self._stopped.set()
    self._number += 1

  def _handle_failure(self, event: dict[str, Any]) -> None:
    """Ends this process unless it raises an exception of its own."""
    if not event["lost"]:
      has_raised = self._raised.wait(_SAME_ERROR_SECONDS)
      if not has_raised:
        # The failed process cleans up, or raised an error of all processes.
        left = f"left/{self._number}/{event['process']}"
        seconds = _CLEANUP_SECONDS - _SAME_ERROR_SECONDS
        self._events.get(left, round(1000 * seconds))
      if has_raised or self._raised.is_set():
        self._raised.clear()
        return
    self._end(event["text"], event["lost"])

  def _send_heartbeats(self) -> None:
    with contextlib.suppress(events_lib.Closed, events_lib.Unavailable):
      while not self._stopped.wait(self._period):
        self._events.add("heartbeat", str(self._answered + 1))
        self._answered += 1

  def _look_for_silences(self) -> None:
    silences = losses.Silences()
    reason = f"no sign of life for {self._timeout:g} s"
    with contextlib.suppress(events_lib.Closed, events_lib.Unavailable):
      while not self._stopped.wait(self._period):
        if not self.is_active:  # after jax.distributed.shutdown()
          return
        if self._events.index:
          # Process 0 answers a heartbeat unless it is frozen.
          beats = {0: str(self._answered)}
        else:
          beats = self._events.values("heartbeat")
        lost = silences.update(beats, 2 * self._period, self._timeout)
        if lost and self._events.index:
          self._lose_coordinator(reason)
        if lost:
          text = losses.describe(self._events.names(lost), reason)
          event = {"kind": "failure", "lost": lost, "text": text, "error": ""}
          self._events.send(event, self._number)
          return

  def _wait_for_hang_up(self) -> None:
    assert self._hang_up is not None
    if self._hang_up.wait() and self.is_active:
      reason = "the connection to its coordination service has ended"
      loss = losses.describe(self._coordinator, reason)
      # JAX aborts this process some milliseconds later: nothing that may wait.
      os.write(2, f"{loss}\n{_HOW_TO_RESUME}\n".encode())
      os._exit(1)

  def _lose_coordinator(self, reason: str) -> NoReturn:
    # Without the service there is nobody to tell.
    self._end(losses.describe(self._coordinator, reason), {0}, tell=False)

  def _end(
    self, text: str, lost: Collection[int] = (), *, tell: bool = True
  ) -> NoReturn:
    """Logs why this process ends, and ends it."""
    with self._ending:
      # A thread may hold the lock of a stream or of a log handler for ever.
      timer = threading.Timer(_END_SECONDS + 1, os._exit, (1,))
      timer.daemon = True
      timer.start()
      name = self._events.name
      ending = "" if text.startswith(name) else f"{name} ends: "
      _log.error("%s%s\n%s", ending, text, _HOW_TO_RESUME)
      flush()
      if tell:
        self.acknowledge(lost)
      os._exit(1)


def flush() -> None:
  """Writes out what the log and the standard streams hold back."""
  for stream in (sys.stdout, sys.stderr, *logging.getLogger().handlers):
    with contextlib.suppress(Exception):
      stream.flush()
