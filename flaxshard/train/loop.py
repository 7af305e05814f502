"""The training loop: set up, restore, then train, evaluate and save."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import logging
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.processes import failures
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import steps
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import devices
from flaxshard.train import endings
from flaxshard.train import hooks as hooks_lib
from flaxshard.train import report
from flaxshard.train import same_run
from flaxshard.train import setup as setup_lib
from flaxshard.wrappers import stack

_log = logging.getLogger(__name__)


def train_and_evaluate(
  config: Any,
  workdir: str,
  task: Any = None,
  *,
  hooks: Sequence[hooks_lib.Hook] = (),
  worker_id: int | None = None,
  num_workers: int | None = None,
  start_timeout: float = 300.0,
) -> TrainState:
  """Trains the task of a config, or continues the run of a workdir.

  Args:
    config: An `ml_collections.ConfigDict` or a dict; see docs/config.md.
    workdir: The folder for `checkpoints/`, `metrics.jsonl`, TensorBoard events,
      `training.png` and `config.json`, on a file system or in a bucket,
      `gs://bucket/run`. If it has a checkpoint, training continues from there,
      with the same result as without an interruption. All processes must see
      the same folder. Process 0 writes in it; the others write their parts of
      checkpoints only.
    task: A task object, in place of the one that `config.task` names; see
      `flaxshard.tasks.Task`. Its class is written to `config.json`.
    hooks: Functions that are called after those of `config.hooks`; see
      `flaxshard.train.hooks`.
    worker_id: With `AGN(transport="store")`, index of the worker that this
      process is; None: as found in the environment, in the variables of JAX,
      torchrun, Slurm, Open MPI or Kubernetes. Worker 0 writes to `workdir`,
      worker k to `workdir/workers/k`. The center is in `workdir/center`.
    num_workers: Number of workers, or None as for `worker_id`.
      `config.batch_size`, `config.mesh.replica` and
      `config.mesh.virtual_devices` are those of all workers.
    start_timeout: Seconds that the workers wait for each other at the start.

  Rows of metrics are printed, unless logging is configured: then they are lines
  of the logger `"flaxshard"` at INFO. A terminal and a notebook also show a
  progress bar. `logging.getLogger("flaxshard").setLevel("WARNING")` prints
  warnings only. Of several processes, process 0 logs all of this, and the
  others log warnings and errors.

  Returns:
    The final state, or that of the last step after Stop in a notebook.

  Raises:
    ValueError, TypeError: The config is invalid, `workdir` cannot be written,
      another run is using it, its checkpoint has another model or another data
      order, or processes or workers disagree on the config, the code, the
      data, the devices or the workdir.
    ImportError: A package that the config needs is not installed.
    TimeoutError: At the start, fewer workers have come than a commit needs.
    FloatingPointError: `config.on_nonfinite` is "stop", and the loss of an
      applied step, an evaluation, or parameters to be saved became infinite or
      NaN, or wrappers skipped 20 steps in a row with a loss scale at its floor.
    SaveError: A checkpoint could not be written. It is raised at the next step.
    HookError: A hook raised an exception. Checkpoints stay.
    SystemExit: After Ctrl-C, SIGTERM or JAX's notice of preemption, once a
      checkpoint is saved. The code is 128 plus the number of the signal. In
      IPython, Ctrl-C or Stop returns the saved state instead.
  """
  with console.show_log(), failures.share():
    config = config_lib.check(config, task)
    workdir = files.absolute(workdir)
    rank = devices.find_rank(config, worker_id, num_workers, start_timeout)
    if multihost.is_process_known():
      same_run.check_processes(config)
    # From here on JAX has started: this can set the number of virtual devices.
    strategy = devices.create_strategy(
      devices.config_of_worker(config, rank.num_workers)
    )
    # After jax.distributed.initialize without flaxshard.initialize.
    failures.watch()
    console.quiet_other_processes(rank.worker_id)
    state, signum = _run(config, workdir, rank, strategy, task, hooks)
  # The user of a notebook keeps the session.
  if signum is None or (signum == signal.SIGINT and console.ipython_shell()):
    return state
  # The exit code that a shell reports for a process ended by the signal.
  raise SystemExit(128 + signum)


def _run(
  config: Any,
  root: str,
  rank: devices.Rank,
  strategy: Strategy,
  task: Any,
  hooks: Sequence[hooks_lib.Hook],
) -> tuple[TrainState, int | None]:
  """Returns the last state, and the signal that stopped the run, if any."""
  # -- Set up.

  workdir = devices.folder_of_worker(root, rank.worker_id)
  same_run.check_workdir(workdir)
  report.require_packages(config.writer)
  call_hooks = hooks_lib.create(config, hooks, workdir, rank.worker_id)
  # Traces the train step, so that an invalid config is found before anything
  # is written or compiled.
  setup = setup_lib.Setup(config, strategy, task, rank)
  lowered = setup.trace().lower()
  steps.check_metrics(setup)
  same_run.check_processes(config, setup, lowered)

  # The inner block tells the other processes of an error before the run is
  # closed: that may wait for them.
  with contextlib.ExitStack() as resources, failures.share():
    with multihost.raise_on_all_processes(ValueError):
      resources.callback(files.lock("workdir", workdir))
    # From here on a signal ends the run with a checkpoint.
    stop_request = resources.enter_context(endings.StopRequest())
    # A task may make a batch from the newest state.
    batches = setup.open_train_batches(lambda: state)
    resources.callback(batches.close)
    checkpointer = resources.enter_context(
      same_run.open_checkpointer(config, workdir)
    )
    commits = None
    if devices.has_workers(config):
      # Imported here: other runs do not need it.
      from flaxshard.train import commits as commits_lib

      # Left first: others need not wait for this worker's last checkpoint.
      commits = commits_lib.Commits(setup, root, stop_request, batches)
      resources.enter_context(commits.worker)

    # -- Restore.

    state, first_step = same_run.restore_or_create(
      setup, workdir, checkpointer, batches
    )
    evaluations: list[dict[str, Any]] = []
    if config.early_stopping.metric != "none":
      evaluations = report.read_rows(workdir, first_step)
    stopped = endings.stopped_early(config.early_stopping, evaluations)
    if stopped or first_step >= config.num_train_steps:
      _log.warning(
        "nothing to train: step %d of config.num_train_steps=%d is done in %s",
        first_step,
        config.num_train_steps,
        workdir,
      )
      report.draw(config, workdir)
      report.log_result(workdir, stopped)
      return state, None

    # -- Start.

    report.log_state(state, is_new=first_step == 0)
    # Now, so that the timer does not count it. JAX caches the executable: the
    # first call of the step finds it.
    start_time = time.perf_counter()
    lowered.compile()
    seconds = time.perf_counter() - start_time
    _log.info("compiled the train step in %.1f s", seconds)
    step = first_step
    if not first_step:
      # A task's own evaluation shows its metrics only when it is called.
      steps.check_metrics(setup, state)
    if commits is not None:
      try:
        state, step = commits.start(state, first_step)
      except InterruptedError:
        # Stopped while it waited for the other workers: nothing to save.
        return state, stop_request.signum
    # Only now: workers with another config are refused.
    same_run.write_files(setup, workdir)
    write_row = resources.enter_context(
      report.open_report(config, workdir, first_step)
    )
    profile_before_step = resources.enter_context(
      report.profile_steps(config.profile_steps, workdir)
    )
    watch = endings.Watch(config)
    rng = setup.train_rng()
    progress = setup.init_progress(step)
    row_step, seconds, start_time = step, 0.0, time.perf_counter()
    save_time = time.monotonic()
    is_last = False

    # -- Train: for each batch a step, and now and then a row of metrics, an
    # evaluation, a checkpoint.

    while not is_last:
      step += 1
      profile_before_step(step, state)
      batch = next(batches)
      state, progress = setup.train_step(state, progress, batch, rng)
      if strategy.waits:
        # On virtual devices, XLA can deadlock with several steps in flight.
        jax.block_until_ready(progress)
      if commits is not None:
        state, skipped = commits.commit(state, step)
        if skipped:
          step += skipped
          row_step += skipped  # they are no steps of the next row
          progress = progress._replace(step=setup.init_progress(step).step)
        if step == config.num_train_steps:
          # The last center is evaluated and saved. Waiting takes no steps.
          end_time = time.perf_counter()
          state = commits.worker.finish(state)
          start_time += time.perf_counter() - end_time
          if not commits.worker.is_finished:
            # It is not to be saved as the last one.
            _log.warning(
              "stopped at the last step, before the other workers; the same "
              "command or call continues from the last checkpoint"
            )
            return state, stop_request.signum

      signum = stop_request.agree(step)
      # An exchange at every step would cost time.
      checkpointer.check(local=True)
      # The last step of a run is logged and saved, whatever its number.
      ends = step == config.num_train_steps
      is_last = ends or signum is not None
      log = is_last or step % config.log_every_steps == 0
      evaluate = ends or step % config.eval_every_steps == 0
      save = is_last or step % config.checkpoint_every_steps == 0
      if log and not save and config.checkpoint_every_minutes:
        minutes = (time.monotonic() - save_time) / 60
        is_due = minutes >= config.checkpoint_every_minutes
        # Clocks differ, and all processes must save: that of process 0 counts.
        save = multihost.exchange(is_due)[0]
      if not (log or evaluate or save):
        continue

      jax.block_until_ready(progress)
      # The speed is that of the steps alone.
      seconds += time.perf_counter() - start_time
      seen = setup.read_progress(progress)
      watch.check_steps(step, state, seen)
      evaluation: dict[str, float] = {}
      if evaluate:
        evaluation = steps.evaluate(setup, state, step)
        evaluations.append({"step": step, **evaluation})
        stopped = endings.stopped_early(config.early_stopping, evaluations)
        if stopped:
          ends = is_last = log = save = True
        watch.warn_of_pending(step, state, ends)
      row: dict[str, float | int | None] = {}
      if log:
        row |= _train_row(setup, state, seen)
        if commits is not None:
          row |= commits.worker.metrics()
        row["steps_per_second"] = (step - row_step) / seconds
        row_step, seconds = step, 0.0
        progress = setup.init_progress(step)
      row |= evaluation
      if row:
        # A run that resumes from this step has its row.
        write_row(step, row, flush=save)
      watch.check_evaluation(step, evaluation)
      if save and (is_last or not watch.is_stalled):
        if commits is not None and not commits.worker.is_closed:
          # With the newest center: a commit under way is in no state.
          state = commits.worker.settle(state)
        watch.check_params(step, state)
        with stop_request.saving():
          # The evaluation also without `config.best_metric`: the last
          # checkpoint with a finite one is not deleted for one without.
          checkpointer.save(step, state, data=batches, metrics=evaluation)
        save_time = time.monotonic()
      if row:
        # After the save: what a hook raises does not lose this step.
        call_hooks(step, state, row)
      start_time = time.perf_counter()

    # -- End.

    with stop_request.saving():
      checkpointer.wait()
    if commits is not None and ends:
      if not commits.worker.is_closed:
        # Stopped early, and saved as it was evaluated; the others may go on
        # from another center.
        commits.worker.finish(state)
      if commits.worker.is_finished:
        commits.publish(step, state, row)
  if ends or signum is None:
    report.log_result(workdir, stopped)
    return state, None
  _log.warning(
    "%s: saved step %d in %s; the same command or call continues from there",
    signal.Signals(signum).name,
    step,
    workdir,
  )
  return state, signum


def _train_row(
  setup: setup_lib.Setup, state: TrainState, progress: steps.Progress
) -> dict[str, float]:
  # If no step was applied, there is no loss to average: 0 / 0 is NaN.
  with np.errstate(invalid="ignore"):
    computed = progress.metrics.compute()
  values = steps.check_numbers(f"{setup.task.name}.metrics", computed)
  row: dict[str, Any] = {f"train_{name}": x for name, x in values.items()}
  # The rate of the last applied update, which had the step before it.
  count = jnp.int32(max(jax.device_get(state.step) - 1, 0))
  rate = row["learning_rate"] = setup.schedule(count)
  for pattern, factor in setup.config.learning_rates:
    row[f"learning_rate/{pattern}"] = rate * factor
  # Not `state.metrics()`, which a collection of that name would hide.
  row |= stack.metrics(state.wrappers, state.wrapper_states)
  return {key: np.asarray(value).item() for key, value in row.items()}
