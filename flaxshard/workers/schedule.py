"""When a worker looks at its state: at the steps where a commit may be due."""

from __future__ import annotations

import time

from flaxshard.state import host_commits
from flaxshard.wrappers.agn import AGN


def commit_index(agn: AGN, local_step: int) -> int:
  """Returns how many commits are due up to a local step.

  Workers number their commits by it: those of the same number are reduced
  together.

  Args:
    agn: The wrapper.
    local_step: The number of local steps.

  Example:
    >>> agn = AGN(4, "mean", fragments=2, transport="host")
    >>> [commit_index(agn, step) for step in (1, 2, 3, 4, 8)]
    [0, 1, 1, 2, 4]
  """
  period = agn.communication_period
  whole, rest = divmod(local_step, period)
  in_period = lambda end: sum(
    bool(host_commits.due(agn, step)) for step in range(1, end + 1)
  )
  return whole * in_period(period) + in_period(rest)


class StepCounter:
  """Counts local steps without asking the device for them.

  A call of `Worker.commit` takes at most as many local steps as a call has ever
  taken. So until the next commit may be due, no call needs the state.

  Args:
    agn: The wrapper.
    local_step: The number of local steps so far.

  Attributes:
    steps_per_call: The most local steps that a call has taken.
    seconds_per_step: Seconds of a local step; None if not known yet.
  """

  def __init__(self, agn: AGN, local_step: int):
    self._agn = agn
    self._period = agn.communication_period
    self.steps_per_call = 1
    self._timed: tuple[float, int] | None = None
    self.seconds_per_step: float | None = None
    self.restart(local_step)

  def restart(self, local_step: int) -> None:
    """Goes on from another local step.

    Args:
      local_step: The number of local steps.
    """
    self.local_step = local_step
    self._calls = 0
    # The first call shows how many steps a call takes.
    self._look_after = 1
    self._timed = None

  @property
  def clock(self) -> int:
    """The local step, if none of the last calls has skipped one."""
    return self.local_step + self._calls * self.steps_per_call

  def tick(self) -> bool:
    """Counts a call; returns whether it has to look at the state."""
    self._calls += 1
    return self._calls >= self._look_after

  def look(self, local_step: int) -> bool:
    """Takes note of the number of local steps; returns whether there are new.

    Args:
      local_step: That of the state.

    Raises:
      ValueError: A step at which a commit was due was not seen.
    """
    taken = local_step - self.local_step
    if taken > self._calls * self.steps_per_call:
      self.steps_per_call = -(-taken // self._calls)
    for step in range(self.local_step + 1, local_step):
      if self._is_event(step):
        raise ValueError(
          "Worker: commit must be called after each local step at which a "
          f"commit is due or arrives, but {taken} local steps have been taken "
          f"since step {self.local_step}, and step {step} is one. Call it "
          "after every step, or after a number of steps that divides the "
          "period, the offsets of fragments and the delay."
        )
    self._measure(local_step)
    self.local_step, self._calls = local_step, 0
    self._look_after = self._calls_to_next_event()
    return taken > 0

  def resume(self) -> None:
    """Starts the clock again, after a commit: that is no part of a step."""
    self._timed = (time.monotonic(), self.local_step)

  def _calls_to_next_event(self) -> int:
    step = self.local_step + 1
    while not self._is_event(step):
      step += 1
    return max((step - self.local_step) // self.steps_per_call, 1)

  def _is_event(self, step: int) -> bool:
    agn = self._agn
    return bool(host_commits.due(agn, step) or host_commits.arriving(agn, step))

  def _measure(self, local_step: int) -> None:
    """Measures the seconds per step, between two looks without a commit."""
    if self.seconds_per_step is not None:
      return
    now = time.monotonic()
    if self._timed is not None and local_step > self._timed[1]:
      start, step = self._timed
      self.seconds_per_step = (now - start) / (local_step - step)
    self._timed = (now, local_step)
