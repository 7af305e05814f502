"""The progress of a worker: its steps, and its commits under way."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
import dataclasses
from typing import Any

from flaxshard.workers.exchange import Outcome
from flaxshard.workers.schedule import StepCounter


@dataclasses.dataclass
class Sent:
  """A commit that is under way.

  Attributes:
    fragments: Its fragments.
    local_step: The local step at which it was sent.
    commit: Its arrays, on the device or on the host.
    result: Its future outcome, and the seconds that it took.
  """

  fragments: tuple[int, ...]
  local_step: int
  commit: Mapping[str, Any]
  result: futures.Future[tuple[Outcome, float]]


@dataclasses.dataclass
class Progress:
  """The progress of a worker.

  Attributes:
    counter: Counts local steps.
    commits: The number of commits in its center.
    first_step: The local step at which it has started, or has come back.
    last_commit_step: The local step of its last commit, or `first_step`.
    missed_steps: Local steps that the run has taken without it.
    sent: Its commits under way, the oldest first.
  """

  counter: StepCounter
  commits: int
  first_step: int
  last_commit_step: int
  missed_steps: int = 0
  sent: list[Sent] = dataclasses.field(default_factory=list)

  def restart(self, local_step: int, commits: int) -> None:
    """Goes on from the center of another worker.

    Args:
      local_step: The local step of that worker.
      commits: The number of commits in the center.
    """
    self.missed_steps += max(local_step - self.counter.local_step, 0)
    self.counter.restart(local_step)
    self.first_step = self.last_commit_step = local_step
    self.commits = commits
