"""Opens the files of a run, and restores or creates its state."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import logging
import os
from typing import Any

from flaxshard import checkpoint
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.data import distribute
from flaxshard.state.train_state import TrainState
from flaxshard.train import commits as commits_lib
from flaxshard.train import config as config_lib
from flaxshard.train import fine_tuning
from flaxshard.train import hooks as hooks_lib
from flaxshard.train import metrics as metrics_lib
from flaxshard.train import preemption
from flaxshard.train import report
from flaxshard.train import resume
from flaxshard.train import rollouts
from flaxshard.train import same_run
from flaxshard.train import setup as setup_lib

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Run:
  """Resources that a run holds from its start to its end.

  Attributes:
    root: The workdir of all workers, which is that of worker 0.
    workdir: The workdir of this worker, locked: no other run can use it.
    stop_request: The signal that this process received, if any.
    train_iter: The training batches; checkpoints hold its position.
    checkpointer: The checkpointer of `workdir/checkpoints`.
    call_hooks: Calls the hooks with a step, the state and a row of metrics.
    commits: The commits of AGN to a center in a store, if it has one.
  """

  root: str
  workdir: str
  stop_request: preemption.StopRequest
  train_iter: distribute.DistributedIterator | rollouts.RolloutIterator
  checkpointer: checkpoint.Checkpointer
  call_hooks: hooks_lib.Hooks
  commits: commits_lib.Commits


@contextlib.contextmanager
def open_run(
  setup: setup_lib.Setup, workdir: str, call_hooks: hooks_lib.Hooks
) -> Iterator[Run]:
  """Locks the workdir, and opens the training batches and the checkpointer.

  Args:
    setup: The setup of the config.
    workdir: The absolute path of the workdir, the same for all workers.
    call_hooks: Calls the hooks.

  Raises:
    ValueError: Another run is using the workdir, or it cannot be written.
  """
  config = setup.config
  folder = setup.rank.workdir(workdir)
  with contextlib.ExitStack() as exit_stack:
    with multihost.raise_on_all_processes(ValueError):
      exit_stack.callback(files.lock("workdir", folder))
      files.check_writable("workdir", os.path.join(folder, "checkpoints"))
    # From here on a signal ends the run with a checkpoint.
    stop_request = exit_stack.enter_context(preemption.catch_signals())
    train_iter = exit_stack.enter_context(setup.open_train_batches())
    checkpointer = exit_stack.enter_context(
      _create_checkpointer(config, folder)
    )
    # Left first: others need not wait for this worker's last checkpoint.
    commits = exit_stack.enter_context(
      commits_lib.open_commits(setup, workdir, stop_request, train_iter)
    )
    yield Run(
      root=workdir,
      workdir=folder,
      stop_request=stop_request,
      train_iter=train_iter,
      checkpointer=checkpointer,
      call_hooks=call_hooks,
      commits=commits,
    )


def _create_checkpointer(config: Any, folder: str) -> checkpoint.Checkpointer:
  """Returns the checkpointer of a workdir."""
  best_metric = config.best_metric
  return checkpoint.Checkpointer(
    os.path.join(folder, "checkpoints"),
    max_to_keep=config.max_to_keep,
    keep_every=config.keep_every_steps or None,
    best_metric=None if best_metric == "none" else best_metric,
    best_mode=config_lib.resolve_mode(best_metric, config.best_mode),
    keep_best=config.keep_best,
    # Through JSON, which turns the tuples into lists.
    config=json.loads(config.to_json()),
  )


def publish(
  setup: setup_lib.Setup,
  run: Run,
  step: int,
  state: TrainState,
  row: metrics_lib.Row,
) -> None:
  """Saves the final center in the workdir of worker 0, which is gone.

  If that is locked, `fs.load` finds the final center in the store.

  Args:
    setup: The setup of the config.
    run: The run of another worker.
    step: The last step.
    state: The state with the final center.
    row: The last row of metrics, with the evaluation.
  """
  config, root = setup.config, run.root
  try:
    unlock = files.lock("workdir", root)
  except ValueError as e:
    _log.warning("the final center is in the store only: %s", e)
    return
  with contextlib.ExitStack() as stack:
    stack.callback(unlock)
    saver = stack.enter_context(_create_checkpointer(config, root))
    latest = saver.latest_step()
    if latest is not None and latest >= step:
      return
    _log.warning(
      "worker 0 is gone: worker %d saves the final center in %s",
      setup.rank.worker_id,
      root,
    )
    resume.write(config, root, setup.num_train_examples, setup.shapes)
    evaluation = {k: x for k, x in row.items() if k.startswith("eval_")}
    saver.save(step, state, data=run.train_iter, metrics=evaluation)
    # Rows of this step may be those of a worker 0 that could not save it.
    file = metrics_lib.MetricsFile(metrics_lib.metrics_path(root), step - 1)
    with contextlib.closing(file):
      file.write(step, row, flush=True)
  report.draw(config, root)
  report.log_result(root, logging.WARNING)


def restore_or_create(
  setup: setup_lib.Setup, run: Run
) -> tuple[TrainState, int]:
  """Returns the state to train from, and the step that it was saved at.

  Args:
    setup: The setup of the config.
    run: The run, whose training batches continue from the same step.

  Raises:
    ValueError: The checkpoint has another model or another data order.
  """
  latest_step = run.checkpointer.latest_step()
  same_run.check_step("the latest checkpoint", latest_step)
  if latest_step is None:
    return fine_tuning.initialize(setup.config, setup.create_state()), 0
  config = setup.config
  changes = resume.check_data(config, run.workdir, setup.num_train_examples)
  # Into shapes and shardings: a state of arrays would need its memory twice.
  state = run.checkpointer.restore(setup.abstract_state, data=run.train_iter)
  # Not always the latest step: a damaged one is passed over.
  first_step = run.checkpointer.restored_step or 0
  resume.check_changes(config, run.workdir, changes, first_step)
  if first_step < config.num_train_steps:
    _log.info("resuming from step %d in %s", first_step, run.workdir)
  return state, first_step
