"""Finds the processes of a program that have died or are frozen."""

from __future__ import annotations

import time
import traceback

import jax

from flaxshard.processes import events as events_lib

# Seconds in which a process answers a roll call.
ANSWER_SECONDS = 3.0


class Silences:
  """Measures for how long each process has sent no heartbeat.

  Clocks of hosts differ: this process measures how long a count stays equal.
  """

  def __init__(self) -> None:
    self._time = time.monotonic()
    self._beats: dict[int, str] = {}
    self._seconds: dict[int, float] = {}

  def update(
    self, beats: dict[int, str], max_elapsed: float, timeout: float
  ) -> list[int]:
    """Returns the processes that have been silent for too long.

    Args:
      beats: The latest heartbeat of each process.
      max_elapsed: Seconds since the last call that count at most: if more have
        passed, this process was frozen itself.
      timeout: Seconds of silence that are allowed.
    """
    now = time.monotonic()
    elapsed, self._time = min(now - self._time, max_elapsed), now
    for process, beat in beats.items():
      if self._beats.get(process) == beat:
        self._seconds[process] += elapsed
      else:
        self._seconds[process] = 0.0
    self._beats = beats
    return sorted(
      p for p, seconds in self._seconds.items() if seconds > timeout
    )


def call_roll(events: events_lib.Events, number: int) -> list[int]:
  """Asks all processes for an answer; returns those that do not answer.

  If another process calls the roll, or has failed, it returns an empty list
  once that process has sent the result.

  Args:
    events: The events of the program.
    number: The first number that the roll call may have.

  Raises:
    events.Closed, events.Unavailable: See the classes.
  """
  number, event = events.send({"kind": "roll call"}, number)
  if event["kind"] == "failure":
    return []
  if event["process"] != events.index:
    # One process asks for the answers: a thousand would keep process 0 busy.
    events.receive(number + 1, round(2000 * ANSWER_SECONDS))
    return []
  deadline = time.monotonic() + ANSWER_SECONDS
  while missing := events.missing(f"answer/{number}"):
    if time.monotonic() > deadline:
      break
    time.sleep(0.05)
  return missing


def describe(names: str, reason: str) -> str:
  """Returns the message about lost processes.

  Args:
    names: The names of the processes.
    reason: Why they count as lost.
  """
  return f"{names} {'are' if '), ' in names else 'is'} lost: {reason}."


def may_cause(error: BaseException) -> bool:
  """Returns whether an error may come from the loss of another process.

  Gloo's errors are JaxRuntimeErrors or ValueErrors, raised by JAX itself.

  Args:
    error: An error of this process.
  """
  seen: BaseException | None = error
  while seen is not None:
    if isinstance(seen, jax.errors.JaxRuntimeError):
      return True
    frames = list(traceback.walk_tb(seen.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    if module.partition(".")[0] in ("jax", "jaxlib"):
      return True
    seen = seen.__cause__ or seen.__context__
  return False
