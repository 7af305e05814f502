"""Runs whose AGN has its center in a store: commits, and their merging.

The loop calls `commit` after each step. Other runs have none of this: their
commits are part of the compiled step. `flaxshard --synchronize` merges beside
the store what the workers commit.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from typing import Any

from flaxshard.center import facts as facts_lib
from flaxshard.center import heads
from flaxshard.center import merge
from flaxshard.center import store
from flaxshard.center.worker import Worker
from flaxshard.core import files
from flaxshard.state.train_state import TrainState
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import endings
from flaxshard.train import load
from flaxshard.train import report
from flaxshard.train import same_run
from flaxshard.train import setup as setup_lib

_log = logging.getLogger(__name__)

# Seconds until `synchronize` looks again whether a worker has come, or the run
# has ended.
_PAUSE_SECONDS = 0.2


class Commits:
  """The commits of a run.

  Args:
    setup: The setup of the config.
    root: The folder of all workers, which is that of worker 0.
    stop_request: The signals of this process: after one, nothing is waited for.
    train_iter: The training batches, which go on with those of the others when
      the worker joins.

  Attributes:
    worker: The worker, to be entered.
  """

  def __init__(
    self,
    setup: setup_lib.Setup,
    root: str,
    stop_request: endings.StopRequest,
    train_iter: Any,
  ):
    self.setup, self.root, self.train_iter = setup, root, train_iter
    self.worker = Worker(
      root,
      setup.rank.worker_id,
      setup.rank.num_workers,
      start_timeout=setup.rank.start_timeout,
      should_stop=lambda: stop_request.signum is not None,
    )

  def start(self, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Joins the other workers.

    Args:
      state: The state, restored or new.
      step: Its step.

    Returns:
      The state to train from, and the step that it goes on from: that of the
      others, if they are further.
    """
    facts = same_run.worker_facts(self.setup)
    state = self.worker.start(state, facts=facts)
    # One step is left at least: it is evaluated and saved.
    last = self.setup.config.num_train_steps - 1
    return state, step + self._skip(step, 0, last)

  def commit(self, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Commits if a period ends; called after each step.

    Args:
      state: The state.
      step: The step just taken.

    Returns:
      The state, and the number of skipped steps: not 0 if this worker was away
      for so long that the others have left it behind.
    """
    before = self.worker.missed_steps
    state = self.worker.commit(state)
    last = self.setup.config.num_train_steps
    return state, self._skip(step, before, last)

  def publish(self, step: int, state: TrainState, row: report.Row) -> None:
    """Saves the final center in the workdir of worker 0, if that is gone.

    If that is locked, `fs.load` finds the final center in the store.

    Args:
      step: The last step.
      state: The state with the final center.
      row: The last row of metrics, with the evaluation.
    """
    worker, root, config = self.worker, self.root, self.setup.config
    if not worker.worker_id or not worker.is_leader:
      return
    with contextlib.ExitStack() as stack:
      try:
        stack.callback(files.lock("workdir", root))
      except ValueError as e:
        _log.warning("the final center is in the store only: %s", e)
        return
      saver = stack.enter_context(same_run.open_checkpointer(config, root))
      latest = saver.latest_step()
      if latest is not None and latest >= step:
        return
      _log.warning(
        "worker 0 is gone: worker %d saves the final center in %s",
        worker.worker_id,
        root,
      )
      same_run.write_files(self.setup, root)
      evaluation = {k: x for k, x in row.items() if k.startswith("eval_")}
      saver.save(step, state, data=self.train_iter, metrics=evaluation)
      # Rows of this step may be those of a worker 0 that could not save it.
      with contextlib.closing(report.MetricsFile(root, step - 1)) as file:
        file.write(step, row)
    report.draw(config, root)
    report.log_result(root, level=logging.WARNING)

  def _skip(self, step: int, before: int, last: int) -> int:
    """Skips batches up to the step of the others; returns their number.

    Args:
      step: The step of this worker.
      before: `Worker.missed_steps` at the step.
      last: The last step to skip.
    """
    missed = self.worker.missed_steps - before
    if self.worker.is_finished:
      missed = last
    count = max(0, min(missed, last - step))
    if count:
      self.train_iter.skip(count)
    return count


def synchronize(workdir: str) -> None:
  """Merges the commits of the workers of a run until it has ended.

  The config of the run comes from its center. Nothing is trained, and no data
  is read. After a signal the workers go on without it.

  Args:
    workdir: The workdir of the run; its first worker may come later.

  Raises:
    StoreError: The store cannot be read or written.
    SystemExit: After a signal; the code is 128 plus its number.
    ValueError, TypeError: The run's model or optimizer cannot be created here.
  """
  workdir = files.absolute(workdir)
  files.check_writable("workdir", workdir, create=False)
  objects = store.Objects(store.center_url(workdir))
  for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
  with console.show_log():
    has_begun = lambda: heads.read(objects, has_begun=False).heads
    if not has_begun():
      _log.info("waiting for the first worker in %s", objects.url)
    while not has_begun():
      time.sleep(_PAUSE_SECONDS)
    facts = facts_lib.read(objects)
    if "config" not in facts:
      raise ValueError(
        "--synchronize needs a run from a config: the workers of this one "
        "have a loop of their own, and merge themselves."
      )
    # One device, whatever the workers have.
    config = {**facts["config"], "mesh": {"replica": 1}}
    setup = load.plan(config_lib.check(config), facts["example"])
    merger = merge.synchronizer(objects, setup.abstract_state)
    with contextlib.closing(merger):
      # A signal is handled between two looks.
      while not merger.watch.has_ended(_PAUSE_SECONDS):
        pass
      _log.info("the run has ended")
