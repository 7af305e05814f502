"""The training loop: set up, restore, then train, evaluate and save."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import logging
import signal
import time
from typing import Any, NamedTuple

from clu import parameter_overview
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.processes import failures
from flaxshard.state import describe
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import load
from flaxshard.train import charts
from flaxshard.train import config as config_lib
from flaxshard.train import console
from flaxshard.train import devices
from flaxshard.train import divergence
from flaxshard.train import early_stopping
from flaxshard.train import evaluation as evaluation_lib
from flaxshard.train import fine_tuning
from flaxshard.train import hooks as hooks_lib
from flaxshard.train import metrics as metrics_lib
from flaxshard.train import preemption
from flaxshard.train import ranks
from flaxshard.train import report
from flaxshard.train import resume
from flaxshard.train import run as run_lib
from flaxshard.train import same_run
from flaxshard.train import setup as setup_lib
from flaxshard.train import steps
from flaxshard.train import timer as timer_lib
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
  with (
    console.show_log(),
    console.show_warnings_once(),
    failures.share(),
  ):
    config = config_lib.check(load.record(config, task))
    workdir = files.absolute(checks.path("workdir", workdir))
    rank = ranks.find(config, worker_id, num_workers, start_timeout)
    if multihost.is_process_known():
      same_run.check_config(config)
    # First, because it can set the number of virtual devices: from here on JAX
    # has started.
    strategy = devices.create_strategy(config, rank)
    if not multihost.is_process_known():
      same_run.check_config(config)
    # After jax.distributed.initialize without flaxshard.initialize.
    failures.watch()
    with console.quiet_other_processes(rank.worker_id):
      state, signum = _train_and_evaluate(
        config, workdir, rank, strategy, task, hooks
      )
  if signum is not None and not preemption.returns_to_notebook(signum):
    # The exit code that a shell reports for a process ended by the signal.
    raise SystemExit(128 + signum)
  return state


def _train_and_evaluate(
  config: Any,
  root: str,
  rank: ranks.Rank,
  strategy: Strategy,
  task: Any,
  hooks: Sequence[hooks_lib.Hook],
) -> tuple[TrainState, int | None]:
  """Returns the last state, and the signal that stopped the run, if any."""
  workdir = rank.workdir(root)
  with multihost.raise_on_all_processes(ValueError):
    files.check_writable("workdir", workdir)
  same_run.check_workdir(workdir)
  charts.require_packages(config.writer)
  call_hooks = hooks_lib.create(
    config.hooks,
    hooks,
    config=config,
    workdir=workdir,
    worker_id=rank.worker_id,
  )
  # Traces the train step, so that an invalid config is found before anything
  # is written or compiled.
  setup = setup_lib.create_setup(config, strategy, task, rank)
  same_run.check_data(setup.splits)
  same_run.check_train_step(setup.lowered_train_step)

  # The inner block tells the other processes of an error before the run is
  # closed: that may wait for them.
  with run_lib.open_run(setup, root, call_hooks) as run, failures.share():
    state, first_step = run_lib.restore_or_create(setup, run)
    same_run.check_step("the restored step", first_step)
    stopping = early_stopping.resume(config.early_stopping, workdir, first_step)
    signum, done = None, None
    if stopping.stopped_step is not None:
      done = (
        f"the run in {workdir} stopped early at step {stopping.stopped_step}: "
        f"{stopping.reason}"
      )
    elif first_step >= config.num_train_steps:
      done = (
        f"step {first_step} of config.num_train_steps={config.num_train_steps} "
        f"is done in {workdir}"
      )
    if done:
      _log.warning("nothing to train: %s", done)
      report.draw(config, workdir)
    else:
      state, signum = _train(setup, run, state, first_step, stopping)
  if signum is None:
    report.log_result(workdir)
  return state, signum


def _train(
  setup: setup_lib.Setup,
  run: run_lib.Run,
  state: TrainState,
  first_step: int,
  stopping: early_stopping.EarlyStopping,
) -> tuple[TrainState, int | None]:
  """Trains from `first_step` to the last step, or until a signal.

  Returns:
    The last state, which is saved, and the signal that stopped the run before
    the last step, or None.
  """
  config = setup.config
  _log_state(state, first_step)
  _compile(setup.lowered_train_step)
  try:
    state, step = run.commits.start(state, first_step)
  except InterruptedError:
    # Stopped while it waited for the other workers: nothing to save.
    return state, run.stop_request.signum
  # Only now: workers with another config are refused.
  resume.write(config, run.workdir, setup.num_train_examples, setup.shapes)
  with (
    report.open_report(config, run.workdir, first_step) as write_row,
    timer_lib.profile_steps(
      config.profile_steps, run.workdir
    ) as profile_before_step,
    console.count_warnings() as warn,
  ):
    progress = setup.init_progress()
    rng = setup.train_rng()
    next_step = setup.init_step(step + 1)
    notes = divergence.WrapperNotes(state, warn)
    divergence_check = divergence.DivergenceCheck(
      config.on_nonfinite, config.num_train_steps, warn
    )
    timer = timer_lib.Timer(step)
    save_time = time.monotonic()
    while step < config.num_train_steps:
      step += 1
      profile_before_step(step, state)
      state, progress, next_step = setup.train_step(
        state,
        progress,
        setup.next_batch(run.train_iter, state),
        rng,
        next_step,
      )
      state, committed_step = run.commits.commit(state, step)
      if committed_step != step:
        step, next_step = committed_step, setup.init_step(committed_step + 1)

      signum = preemption.agree_on_signal(step, run.stop_request)
      ends = step == config.num_train_steps
      if ends:
        # The last center is evaluated and saved.
        try:
          state = run.commits.finish(state)
        except InterruptedError:
          _log.warning(
            "stopped at the last step, before the other workers; the same "
            "command or call continues from the last checkpoint"
          )
          return state, run.stop_request.signum
      due = _find_due(config, step, signum is not None, save_time)
      # An exchange at every step would cost time.
      run.checkpointer.check(local=True)
      if not any(due):
        continue

      jax.block_until_ready(progress)
      steps_per_second = timer.lap(step) if due.log else None
      with timer.paused():
        seen = setup.read_progress(progress)
        divergence_check.check_steps(step, state, seen)
        evaluation = setup.evaluate(state, step) if due.evaluate else {}
        if due.evaluate:
          stopping = stopping.update(step, evaluation)
        if stopping.stopped_step is not None:
          # Like the last step of a run, it is logged and saved.
          ends, due = True, _Due(log=True, evaluate=True, save=True)
        row: dict[str, float | int | None] = {}
        if due.log:
          row |= _train_row(setup, state, seen)
          row |= run.commits.row()
          row["steps_per_second"] = steps_per_second
          notes.log_warnings(step, row)
          progress = setup.init_progress()
        row |= evaluation
        if due.evaluate:
          notes.log_pending(step, state, ends)
        if row:
          # A run that resumes from this step has its row.
          write_row(step, row, flush=due.save)
        divergence_check.check_evaluation(step, evaluation)
        if due.save and (
          ends or signum is not None or not divergence_check.is_stalled
        ):
          # A commit that is under way is in no state.
          state = run.commits.settle(state)
          divergence_check.check_params(step, state)
          with run.stop_request.saving():
            run.checkpointer.save(
              step,
              state,
              data=run.train_iter,
              # Also without `config.best_metric`: the last checkpoint with a
              # finite evaluation is not deleted for one without.
              metrics=evaluation,
            )
          save_time = time.monotonic()
        if row:
          # After the save: what a hook raises does not lose this step.
          run.call_hooks(step, state, row)
      if ends or signum is not None:
        break

    with run.stop_request.saving():
      run.checkpointer.wait()
    if ends and run.commits.must_publish:
      run_lib.publish(setup, run, step, state, row)
    if stopping.stopped_step is not None:
      # Saved as it was evaluated; the others may go on from another center.
      with contextlib.suppress(InterruptedError):
        run.commits.finish(state)
  if stopping.stopped_step is not None:
    _log.info("stopped early at step %d: %s", step, stopping.reason)
  if ends or signum is None:
    return state, None
  _log.warning(
    "%s: saved step %d in %s; the same command or call continues from there",
    signal.Signals(signum).name,
    step,
    run.workdir,
  )
  return state, signum


class _Due(NamedTuple):
  """The actions that are due after a step."""

  log: bool
  evaluate: bool
  save: bool


def _find_due(config: Any, step: int, stop: bool, save_time: float) -> _Due:
  """Returns what to do after a step.

  Args:
    config: A checked config.
    step: The step just taken.
    stop: Whether a signal ends the run after this step.
    save_time: `time.monotonic()` of the last save.
  """
  final = step == config.num_train_steps
  # The last step of a run is logged and saved, whatever its number.
  last = final or stop
  log = last or step % config.log_every_steps == 0
  save = last or step % config.checkpoint_every_steps == 0
  if log and not save and config.checkpoint_every_minutes:
    seconds = time.monotonic() - save_time
    save = seconds >= 60 * config.checkpoint_every_minutes
    if jax.process_count() > 1:
      # Clocks differ: all processes save when process 0 does.
      save = bool(multihost_utils.broadcast_one_to_all(np.array(save)))
  return _Due(log, final or step % config.eval_every_steps == 0, save)


def _log_state(state: TrainState, first_step: int) -> None:
  description = describe.describe(state)
  if description.note:
    _log.warning("%s", description.note)
  if frozen := fine_tuning.describe_frozen(state):
    _log.info("%s", frozen)
  if first_step:
    return
  if description.num_devices > 1:
    _log.info("parameters:\n%s", describe.describe(state.params))
    # The slots of the optimizer are split like their parameters.
    _log.info("the whole state: %s", description.summary)
    return
  overview = parameter_overview.get_parameter_overview(
    state.params, include_stats=False
  )
  _log.info("parameters:\n%s", overview)


def _compile(lowered: jax.stages.Lowered) -> None:
  """Compiles the train step, so that the timer does not count it."""
  start = time.monotonic()
  # JAX caches the executable: the first call of the step finds it.
  lowered.compile()
  _log.info("compiled the train step in %.1f s", time.monotonic() - start)


def _train_row(
  setup: setup_lib.Setup, state: TrainState, progress: steps.Progress
) -> dict[str, float]:
  # If no step was applied, there is no loss to average: 0 / 0 is NaN.
  with np.errstate(invalid="ignore"):
    computed = progress.metrics.compute()
  values = evaluation_lib.check_numbers(f"{setup.task.name}.metrics", computed)
  row: dict[str, Any]
  row = {f"train_{name}": value for name, value in values.items()}
  # The rate of the last applied update, which had the step before it.
  applied = jax.device_get(state.step)
  rate = row["learning_rate"] = setup.schedule(jnp.maximum(applied - 1, 0))
  for pattern, factor in setup.config.learning_rates:
    row[f"learning_rate/{pattern}"] = rate * factor
  # Not `state.metrics()`, which a collection of that name would hide.
  row |= stack.metrics(state.wrappers, state.wrapper_states)
  return metrics_lib.to_numbers(row)
