"""The commits of a run whose AGN commits from host to host.

The loop calls `commit` after each step. In other runs that does nothing: their
commits are part of the compiled step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import logging
import os
from typing import Any

import numpy as np

from flaxshard.checkpoint import step_names
from flaxshard.state.train_state import TrainState
from flaxshard.train import preemption
from flaxshard.train import ranks
from flaxshard.train import same_run
from flaxshard.train import setup as setup_lib

_log = logging.getLogger(__name__)


class Commits:
  """The commits of a run that has none on the host."""

  def start(self, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Joins the other workers.

    Args:
      state: The state, restored or new.
      step: Its step.

    Returns:
      The state to train from, and the step that it goes on from: that of the
      others, if they are further.
    """
    return state, step

  def commit(self, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Commits if a period ends; called after each step.

    Args:
      state: The state.
      step: The step just taken.

    Returns:
      The state, and the step: a later one if this worker was away for so long
      that the others have left it behind.
    """
    return state, step

  def find_end(self) -> str | None:
    """Returns why there is nothing left to commit to, or None."""
    return None

  def settle(self, state: TrainState) -> TrainState:
    """Returns a state to be saved: with the commits that are under way."""
    return state

  def finish(self, state: TrainState) -> TrainState:
    """Waits for the other workers; returns the state with the last center."""
    return state

  def row(self) -> dict[str, float]:
    """Returns the columns of `metrics.jsonl` for the commits since the last."""
    return {}


class HostCommits(Commits):
  """The commits of a worker.

  Args:
    worker: The worker, which has been entered.
    facts: What all workers must have in common.
    train_iter: The training batches, which go on with those of the others when
      the worker joins.
    num_train_steps: The last step of the run.
    workdir: The folder of all workers.
  """

  def __init__(
    self,
    worker: Any,
    facts: Mapping[str, Any],
    train_iter: Any,
    num_train_steps: int,
    workdir: str,
  ):
    self._worker = worker
    self._facts = facts
    self._train_iter = train_iter
    self._num_train_steps = num_train_steps
    self._workdir = workdir
    self._missed = 0
    self._is_finished = False

  def start(self, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Joins the other workers; see `Commits.start`."""
    state = self._worker.start(state, facts=self._facts)
    # One step is left at least: it is evaluated and saved.
    return state, self._catch_up(step, self._num_train_steps - 1)

  def commit(self, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Commits if a period ends; see `Commits.commit`."""
    state = self._worker.commit(state)
    return state, self._catch_up(step, self._num_train_steps)

  def find_end(self) -> str | None:
    """Returns that the others have finished; see `Commits.find_end`.

    A worker finishes when all members do: nobody would come any more.
    """
    for k in range(self._worker.num_workers):
      folder = ranks.folder_of_worker(self._workdir, k)
      saved = step_names.steps(
        os.path.join(folder, "checkpoints"), step_names.OURS
      )
      if k != self._worker.worker_id and self._num_train_steps in saved:
        last = self._num_train_steps
        return f"worker {k} has finished the run: step {last} is in {folder}"
    return None

  def settle(self, state: TrainState) -> TrainState:
    """Waits for commits under way; see `Commits.settle`."""
    # After `finish` there are none.
    return state if self._is_finished else self._worker.settle(state)

  def finish(self, state: TrainState) -> TrainState:
    """Waits for the other workers; see `Commits.finish`."""
    self._is_finished = True
    return self._worker.finish(state)

  def row(self) -> dict[str, float]:
    """Returns the columns of `metrics.jsonl`; see `Commits.row`."""
    return summarize(self._worker.records())

  def _catch_up(self, step: int, last: int) -> int:
    """Returns the step that the others are at, and skips batches up to there.

    Args:
      step: The step of this worker.
      last: The last step to return.
    """
    missed = self._worker.missed_steps - self._missed
    self._missed += missed
    count = min(missed, last - step)
    if count <= 0:
      return step
    self._train_iter.skip(count)
    _log.warning(
      "worker %d goes on from step %d, where the others are: it has missed %d "
      "steps",
      self._worker.worker_id,
      step + count,
      count,
    )
    return step + count


def summarize(records: Any) -> dict[str, float]:
  """Returns the columns of `metrics.jsonl` of some commits.

  Args:
    records: `CommitRecord`s; without any there are no columns.
  """
  if not records:
    return {}
  return {
    "commit_workers": len(records[-1].workers),
    "commit_staleness": float(np.mean([r.staleness for r in records])),
    "commit_megabytes": sum(r.bytes_sent for r in records) / 1e6,
    "commit_seconds": float(np.mean([r.seconds for r in records])),
  }


def create_worker(*args: Any, **kwargs: Any) -> Any:
  """Returns a `flaxshard.Worker`."""
  # Imported here: other runs do not need its packages.
  from flaxshard.workers.worker import Worker

  return Worker(*args, **kwargs)


@contextlib.contextmanager
def open_commits(
  setup: setup_lib.Setup,
  workdir: str,
  stop_request: preemption.StopRequest,
  train_iter: Any,
) -> Iterator[Commits]:
  """Opens the commits of a run.

  Args:
    setup: The setup of the config.
    workdir: The folder of all workers.
    stop_request: The signals of this process: after one, nothing is waited for.
    train_iter: The training batches.
  """
  config, rank = setup.config, setup.rank
  if ranks.host_agn(config) is None:
    yield Commits()
    return
  worker = create_worker(
    os.path.join(workdir, ranks.WORKERS),
    rank.worker_id,
    rank.num_workers,
    start_timeout=rank.start_timeout,
    should_stop=lambda: stop_request.signum is not None,
  )
  facts = same_run.worker_facts(config, setup.splits)
  with worker:
    yield HostCommits(
      worker, facts, train_iter, config.num_train_steps, workdir
    )
