"""The training loop: set up, restore, train, evaluate, save, say what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import time
from typing import Any

from clu import parameter_overview
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from flaxshard import checkpoint
from flaxshard import models
from flaxshard import wrappers
from flaxshard.core import lock
from flaxshard.core import multihost
from flaxshard.core import optimizer
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.data import batching
from flaxshard.data import sources
from flaxshard.partitioning import rules as rules_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.state import describe
from flaxshard.state import replica_groups
from flaxshard.state.create import create_train_state
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.train import config as config_lib
from flaxshard.train import metrics as metrics_lib
from flaxshard.train import preemption
from flaxshard.train import profiler
from flaxshard.train import setup
from flaxshard.train import steps
from flaxshard.train import timer as timer_lib
from flaxshard.train import workdir as workdir_lib
from flaxshard.wrappers import stack as wrapper_stack

_log = logging.getLogger(__name__)

P = jax.sharding.PartitionSpec


def train_and_evaluate(config: Any, workdir: str) -> TrainState:
  """Trains the model of a config, or goes on where its workdir stands.

  Args:
    config: An `ml_collections.ConfigDict`; see `flaxshard.train.config`.
    workdir: Where everything goes: `checkpoints/`, `metrics.jsonl`, TensorBoard
      events, `training.png` and `config.json`.

  Returns:
    The final state.

  Raises:
    ValueError, TypeError: The config is not usable, `workdir` cannot be
      written, another run writes in it, or it holds a checkpoint of another
      model or another data order.
    ImportError: A package that the config asks for is not installed.
    FloatingPointError: The loss became infinite or NaN, no wrapper had the step
      skipped, and `config.on_nonfinite` is "stop".
    SaveError: A checkpoint could not be written; it is raised in the step after
      it is known, of several processes at the next row or save.
    SystemExit: On Ctrl-C, SIGTERM or JAX's notice of preemption, after a
      checkpoint.
  """
  config = config_lib.check(config)
  strategy = setup.create_strategy(config)
  workdir = os.path.expanduser(workdir)
  with multihost.raise_on_all_processes(ValueError):
    checkpoint.check_writable("workdir", workdir)
  workdir = os.path.abspath(workdir)
  metrics_lib.require_packages(config.writer)
  splits = sources.load(config.data)
  specs = setup.batch_specs(config, strategy, splits.eval[0])
  tx, schedule = optimizer.create(config)
  state = _create_state(config, splits, tx, strategy)
  process = dict(batch_size=config.batch_size, **setup.input_pipeline(strategy))
  train_step, lowered = _lower_train_step(
    config, state, splits, strategy, specs
  )

  with contextlib.ExitStack() as stack:
    with multihost.raise_on_all_processes(ValueError):
      unlock = lock.acquire("workdir", workdir)
    stack.callback(unlock)
    interrupted = stack.enter_context(preemption.catch_signals())
    train_iter = stack.enter_context(
      iter(
        strategy.distribute_dataset(
          batching.train_iterator(splits, seed=config.seed, **process),
          mask=None,
          spec=specs,
        )
      )
    )
    checkpointer = stack.enter_context(_checkpointer(config, workdir))
    if checkpointer.latest_step() is not None:
      workdir_lib.check_continues(config, workdir)
      state = checkpointer.restore(state, data=train_iter)
    # Not the latest, where that is damaged.
    first_step = checkpointer.restored_step or 0
    if first_step:
      _log.info("resuming from step %d in %s", first_step, workdir)
    if first_step >= config.num_train_steps:
      _log.info(
        "step %d is done already: nothing to train up to config."
        "num_train_steps=%d",
        first_step,
        config.num_train_steps,
      )
      workdir_lib.finish(workdir)
      return state
    workdir_lib.write_config(config, workdir)
    note = replica_groups.note(state)
    if note:
      _log.warning("%s", note)
    if not first_step:
      overview = parameter_overview.get_parameter_overview(
        state.params, include_stats=False
      )
      _log.info("parameters:\n%s", overview)
      if strategy.mesh.size > 1:
        _log.info("what lies where:\n%s", describe.describe(state))

    metrics_file = metrics_lib.MetricsFile(
      workdir_lib.metrics_path(workdir), first_step
    )
    stack.enter_context(metrics_lib.close_on_exit(metrics_file.close))
    write_events, close_events = metrics_lib.event_writer(
      config.writer, workdir, first_step
    )
    stack.enter_context(metrics_lib.close_on_exit(close_events))
    before_step = stack.enter_context(
      profiler.profile_steps(config.profile_steps, workdir)
    )

    mirrored = functools.partial(setup.replicate, strategy)
    progress = setup.init_progress(config, strategy, state)
    rng = mirrored(jax.random.key(config.seed))
    _compile(lowered)
    eval_step = setup.block_if_virtual_cpu(strategy, jax.jit(steps.eval_step))
    show = stack.enter_context(_progress_bar(first_step, config))

    def evaluate() -> dict[str, float]:
      metrics = mirrored(steps.Metrics.empty())
      batches = strategy.distribute_dataset(
        batching.eval_batches(splits, **process), spec=specs
      )
      evaluated = replica_groups.of_first_replica(state)
      with iter(batches) as eval_iter:
        for batch in eval_iter:
          metrics = eval_step(evaluated, metrics, batch)
      return {f"eval_{k}": float(v) for k, v in metrics.compute().items()}

    timer = timer_lib.Timer(first_step)
    save_time = time.monotonic()
    for step in range(first_step + 1, config.num_train_steps + 1):
      before_step(step, state)
      state, progress = train_step(
        state, progress, next(train_iter), rng, mirrored(np.int32(step))
      )

      signum = preemption.agreed(step, interrupted())
      final = step == config.num_train_steps
      last = final or signum is not None
      log = step % config.log_every_steps == 0 or last
      evaluates = step % config.eval_every_steps == 0 or final
      saves = step % config.checkpoint_every_steps == 0 or last
      if log and not saves:
        saves = _is_due(config.checkpoint_every_minutes, save_time)
      waits = log or evaluates or saves
      if waits or jax.process_count() == 1:
        checkpointer.check()
      if not waits:
        continue

      # Waits for the step. Other processes may have some of the replicas.
      seen = steps.over_replicas(jax.device_get(mirrored(progress)))
      steps_per_second = timer.lap(step) if log else None
      with timer.paused():
        _check_finite(config, state, seen)
        row: dict[str, float | int | None] = {}
        if log:
          row = _train_row(state, seen, schedule)
          row["steps_per_second"] = steps_per_second
          progress = setup.init_progress(config, strategy, state)
        if evaluates:
          row |= evaluate()
        if row:
          with multihost.raise_on_all_processes(OSError):
            metrics_file.write(step, row)
            write_events(step, row)
          show(step, row)
        if saves:
          measured = None if config.best_metric == "none" else row
          checkpointer.save(step, state, data=train_iter, metrics=measured)
          save_time = time.monotonic()
      if signum is not None and not final:
        checkpointer.wait()
        _exit_interrupted(signum, step, workdir)

    checkpointer.wait()
  workdir_lib.finish(workdir)
  return state


def _create_state(
  config: Any, splits: sources.Splits, tx: Any, strategy: Strategy
) -> TrainState:
  policy = Policy(config.precision)
  model = models.create(
    config.model,
    num_classes=splits.num_classes,
    policy=policy,
    seed=config.seed,
  )
  with _errors_name_field(
    f"config.model ({config.model.name!r}) cannot be initialized"
  ):
    state = create_train_state(
      model,
      jax.random.key(config.seed),
      np.asarray(splits.eval[0]["inputs"])[None],
      tx,
      wrappers=wrappers.from_config(config.wrappers),
      strategy=strategy,
      rules=rules_lib.from_config(config.mesh.rules),
    )
  if policy.compute_dtype == jnp.float16:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
      if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
          f"config.precision={config.precision!r} needs floating-point "
          f"parameters; {trees.path_string(path)} is {leaf.dtype}."
        )
  return state


def _lower_train_step(
  config: Any,
  state: TrainState,
  splits: sources.Splits,
  strategy: Strategy,
  specs: Mapping[str, P],
) -> tuple[Callable[..., tuple[TrainState, steps.Progress]], Any]:
  """Traces both steps, before anything is written or compiled."""

  def zeros(x: Any, spec: P) -> jax.Array:
    return jnp.zeros(
      (config.batch_size, *np.shape(x)),
      jax.dtypes.canonicalize_dtype(trees.dtype_of(x)),
      device=jax.sharding.NamedSharding(strategy.mesh, spec),
    )

  batch = {
    key: zeros(np.asarray(x), specs[key]) for key, x in splits.eval[0].items()
  }
  progress = setup.init_progress(config, strategy, state)
  rng, step = setup.replicate(strategy, (jax.random.key(0), np.int32(0)))
  train_step = setup.jit_train_step(config, strategy, (state, progress))
  with _errors_name_field(
    f"config.model ({config.model.name!r}) cannot be trained on config.data "
    f"({config.data.name!r})"
  ):
    mask = np.ones(config.batch_size, bool)
    metrics = steps.Metrics.empty()
    jax.eval_shape(steps.eval_step, state, metrics, {**batch, "mask": mask})
    return train_step, train_step.lower(state, progress, batch, rng, step)


def _checkpointer(config: Any, workdir: str) -> checkpoint.Checkpointer:
  best = config.best_metric
  return checkpoint.Checkpointer(
    os.path.join(workdir, "checkpoints"),
    max_to_keep=config.max_to_keep,
    keep_every=config.keep_every_steps or None,
    best_metric=None if best == "none" else best,
    best_mode=config_lib.BEST_MODES.get(best, "max"),
    keep_best=config.keep_best,
    config=json.loads(config.to_json()),
  )


def _is_due(minutes: float, since: float) -> bool:
  """Returns whether so much time has passed, on the clock of process 0."""
  if not minutes:
    return False
  due = time.monotonic() - since >= 60 * minutes
  if jax.process_count() > 1:
    due = bool(multihost_utils.broadcast_one_to_all(np.array(due)))
  return due


@contextlib.contextmanager
def _errors_name_field(what: str) -> Iterator[None]:
  """Says which field an error comes from that somebody's code raises."""
  try:
    yield
  except specs_lib.RuleError as e:
    # Its message starts with "rules", which the config has in `mesh`.
    raise ValueError(f"config.mesh.{e}") from e
  except (TypeError, ValueError, ArithmeticError, LookupError) as e:
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(f"{what}: {e}") from e


def _compile(lowered: Any) -> None:
  """Compiles ahead, so that no step that is timed does."""
  start = time.monotonic()
  lowered.compile()  # the first call finds it
  _log.info("compiled the train step in %.1f s", time.monotonic() - start)


def _train_row(
  state: TrainState, progress: steps.Progress, schedule: Any
) -> dict[str, float | int | None]:
  logged = wrapper_stack.metrics(state.wrappers, state.wrapper_states)
  with np.errstate(invalid="ignore"):  # no step applied: no loss to average
    row = {f"train_{k}": v for k, v in progress.metrics.compute().items()}
  # Of the last update that was applied.
  rate = schedule(jnp.maximum(state.step - 1, 0))
  row |= {"learning_rate": rate, **logged}
  return {key: np.asarray(value).item() for key, value in row.items()}


def _check_finite(
  config: Any, state: TrainState, progress: steps.Progress
) -> None:
  """Stops at a non-finite loss, before the state can be saved."""
  if not progress.bad_step:
    return
  paths = steps.bad_paths(state, progress)
  message = (
    f"step {int(progress.bad_step)}: the loss is not finite; "
    f"{len(paths)} of {len(progress.bad_leaves)} parameters are not finite "
    f"after it{': ' if paths else '.'}{', '.join(paths)}"
  )
  if config.on_nonfinite == "continue":
    _log.warning("%s", message)
    return
  raise FloatingPointError(
    f"{message}\nconfig.on_nonfinite='continue' would go on; no checkpoint was "
    "saved since that step."
  )


@contextlib.contextmanager
def _progress_bar(
  first_step: int, config: Any
) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
  """Yields what shows a row: a log line, and a bar with ETA on a terminal."""

  def show(step: int, row: Mapping[str, Any]) -> None:
    _log.info("step %d: %s", step, workdir_lib.format_row(row))

  if not sys.stderr.isatty():
    yield show
    return
  metrics_lib.require("the progress bar", "tqdm")
  from tqdm import tqdm
  from tqdm.contrib import logging as tqdm_logging

  total = config.num_train_steps
  with (
    tqdm(total=total, initial=first_step, unit="step") as bar,
    # Log lines go above the bar.
    tqdm_logging.logging_redirect_tqdm([logging.getLogger("flaxshard")]),
  ):

    def show_both(step: int, row: Mapping[str, Any]) -> None:
      show(step, row)
      bar.update(step - bar.n)

    yield show_both


def _exit_interrupted(signum: int, step: int, workdir: str) -> None:
  name = signal.Signals(signum).name
  _log.warning(
    "%s: saved step %d in %s; the same command goes on from there",
    name,
    step,
    workdir,
  )
  raise SystemExit(128 + signum)
