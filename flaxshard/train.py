"""The training loop: set up, restore, train, evaluate, save, say what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import logging
import os
import signal
import sys
import time
from typing import Any

from clu import parameter_overview
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard import checkpoint
from flaxshard import config as config_lib
from flaxshard import data
from flaxshard import interrupts
from flaxshard import models
from flaxshard import optimizer
from flaxshard import steps
from flaxshard import timer as timer_lib
from flaxshard import trees
from flaxshard import workdir as workdir_lib
from flaxshard import wrappers
from flaxshard import writers
from flaxshard.create import create_train_state
from flaxshard.policy import Policy
from flaxshard.train_state import TrainState
from flaxshard.wrappers import base

_log = logging.getLogger(__name__)

P = jax.sharding.PartitionSpec


def train_and_evaluate(config: Any, workdir: str) -> TrainState:
  """Trains the model of a config, or goes on where its workdir stands.

  Args:
    config: An `ml_collections.ConfigDict`; `flaxshard.config` has its fields.
    workdir: Where everything goes: `checkpoints/`, `metrics.jsonl`, TensorBoard
      events, `training.png` and `config.json`.

  Returns:
    The final state.

  Raises:
    ValueError, TypeError: The config is not usable, `workdir` cannot be
      written, or it holds a checkpoint of another model or another data order.
    ImportError: A package that the config asks for is not installed.
    FloatingPointError: The loss became infinite or NaN, no wrapper had the step
      skipped, and `config.on_nonfinite` is "stop".
    SystemExit: On Ctrl-C or SIGTERM, after a checkpoint.
  """
  config = config_lib.check(config)
  workdir = os.path.abspath(os.path.expanduser(workdir))
  checkpoint.check_writable("workdir", workdir)
  writers.require_packages(config.writer)
  mesh = _make_mesh(config)
  splits = data.load(config.data)
  tx, schedule = optimizer.create(config)
  state = _create_state(config, splits, tx, mesh)
  process = dict(
    batch_size=config.batch_size,
    process_index=jax.process_index(),
    process_count=jax.process_count(),
  )
  train_iter = data.train_iterator(splits, seed=config.seed, **process)
  arguments = _abstract_arguments(config, state, splits, mesh)
  _check_model(config, arguments)

  with contextlib.ExitStack() as stack:
    interrupted = stack.enter_context(interrupts.caught())
    checkpointer = stack.enter_context(
      checkpoint.Checkpointer(
        os.path.join(workdir, "checkpoints"), max_to_keep=config.max_to_keep
      )
    )
    first_step = checkpointer.latest_step() or 0
    if first_step:
      workdir_lib.check_continues(config, workdir)
      state = checkpointer.restore(state, data=train_iter)
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
    if not first_step:
      overview = parameter_overview.get_parameter_overview(
        state.params, include_stats=False
      )
      _log.info("parameters:\n%s", overview)

    metrics_file = writers.MetricsFile(
      workdir_lib.metrics_path(workdir), first_step
    )
    stack.callback(metrics_file.close)
    write_events, close_events = writers.event_writer(
      config.writer, workdir, first_step
    )
    stack.callback(close_events)
    before_step = stack.enter_context(_profiler(config.profile_steps, workdir))

    to_device = _batch_to_device(splits, mesh)
    progress = _replicate(steps.init_progress(state), mesh)
    rng = _replicate(jax.random.key(config.seed), mesh)
    train_step = _compile_train_step(arguments)
    show = stack.enter_context(_progress_bar(first_step, config))
    eval_step = jax.jit(steps.eval_step)

    def evaluate() -> dict[str, float]:
      metrics = _replicate(steps.Metrics.empty(), mesh)
      for batch in data.eval_batches(splits, **process):
        metrics = eval_step(state, metrics, to_device(batch))
      return {f"eval_{k}": float(v) for k, v in metrics.compute().items()}

    train_iter.start_prefetch()
    timer = timer_lib.Timer(first_step)
    for step in range(first_step + 1, config.num_train_steps + 1):
      before_step(step, state)
      state, progress = train_step(
        state,
        progress,
        to_device(next(train_iter)),
        rng,
        _replicate(np.int32(step), mesh),
      )

      signum = interrupted()
      final = step == config.num_train_steps
      last = final or signum is not None
      log = step % config.log_every_steps == 0 or last
      evaluates = step % config.eval_every_steps == 0 or final
      saves = step % config.checkpoint_every_steps == 0 or last
      if not (log or evaluates or saves):
        continue

      seen = jax.device_get(progress)  # waits for the step
      steps_per_second = timer.lap(step) if log else None
      with timer.paused():
        _check_finite(config, state, seen)
        row: dict[str, float | int | None] = {}
        if log:
          row = _train_row(state, seen, schedule)
          row["steps_per_second"] = steps_per_second
          progress = _replicate(steps.init_progress(state), mesh)
        if evaluates:
          row |= evaluate()
        if row:
          metrics_file.write(step, row)
          write_events(step, row)
          show(step, row)
        if saves:
          checkpointer.save(step, state, data=train_iter)
      if signum is not None and not final:
        checkpointer.wait()
        _exit_interrupted(signum, step, workdir)

    checkpointer.wait()
  workdir_lib.finish(workdir)
  return state


def _make_mesh(config: Any) -> jax.sharding.Mesh:
  """One mesh axis, `replica`: the batch is split over it."""
  devices = jax.devices()
  count = config.mesh.replica
  if count > len(devices):
    raise ValueError(
      f"config.mesh.replica={count}: there are {len(devices)} devices."
    )
  devices = devices[: count if count > 0 else None]
  if config.batch_size % len(devices):
    raise ValueError(
      f"config.batch_size={config.batch_size} cannot be divided by "
      f"{len(devices)} devices; allowed: a multiple of that, or another "
      "config.mesh.replica."
    )
  return jax.sharding.Mesh(np.array(devices), ("replica",))


def _create_state(
  config: Any, splits: data.Splits, tx: Any, mesh: jax.sharding.Mesh
) -> TrainState:
  policy = Policy(config.precision)
  model = models.create(
    config.model,
    num_classes=splits.num_classes,
    policy=policy,
    seed=config.seed,
  )
  with _blame(f"config.model ({config.model.name!r}) cannot be initialized"):
    state = create_train_state(
      model,
      jax.random.key(config.seed),
      np.asarray(splits.eval[0]["inputs"])[None],
      tx,
      wrappers=wrappers.from_config(config.wrappers),
    )
  if policy.compute_dtype == jnp.float16:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
      if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
          f"config.precision={config.precision!r} needs floating-point "
          f"parameters; {trees.path_string(path)} is {leaf.dtype}."
        )
  return _replicate(state, mesh)


def _abstract_arguments(
  config: Any, state: TrainState, splits: data.Splits, mesh: jax.sharding.Mesh
) -> tuple[Any, ...]:
  """Shapes, dtypes and shardings of what the train step is called with."""

  def abstract(tree: Any, shape: tuple[int, ...], spec: P) -> Any:
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        (*shape, *np.shape(x)), trees.dtype_of(x), sharding=sharding
      ),
      tree,
    )

  progress = jax.eval_shape(steps.init_progress, state)
  rng = jax.eval_shape(lambda: jax.random.key(0))
  example = jax.tree.map(np.asarray, dict(splits.eval[0]))
  return (
    *abstract((state, progress), (), P()),
    abstract(example, (config.batch_size,), P("replica")),
    *abstract((rng, np.int32(0)), (), P()),
  )


def _check_model(config: Any, arguments: tuple[Any, ...]) -> None:
  """Traces the train step, before anything is written or compiled."""
  with _blame(
    f"config.model ({config.model.name!r}) cannot be trained on config.data "
    f"({config.data.name!r})"
  ):
    jax.eval_shape(steps.train_step, *arguments)


@contextlib.contextmanager
def _blame(what: str) -> Iterator[None]:
  """Says which field an error comes from that somebody's code raises."""
  try:
    yield
  except (TypeError, ValueError, ArithmeticError, LookupError) as e:
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(f"{what}: {e}") from e


def _compile_train_step(
  arguments: tuple[Any, ...],
) -> Callable[..., tuple[TrainState, steps.Progress]]:
  """Compiles ahead, so that no step that is timed does."""
  start = time.monotonic()
  jitted = jax.jit(steps.train_step, donate_argnums=(0, 1))
  compiled = jitted.lower(*arguments).compile()
  _log.info("compiled the train step in %.1f s", time.monotonic() - start)
  return compiled


def _replicate(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  return jax.device_put(tree, jax.sharding.NamedSharding(mesh, P()))


def _batch_to_device(
  splits: data.Splits, mesh: jax.sharding.Mesh
) -> Callable[[Mapping[str, np.ndarray]], dict[str, jax.Array]]:
  sharding = jax.sharding.NamedSharding(mesh, P("replica"))

  def to_device(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    # On the device a label out of range would be a NaN, or another class.
    data.check_labels("config.data", batch["labels"], splits.num_classes)
    return {
      key: jax.make_array_from_process_local_data(sharding, value)
      for key, value in batch.items()
    }

  return to_device


def _train_row(
  state: TrainState, progress: steps.Progress, schedule: Any
) -> dict[str, float | int | None]:
  logged = base.metrics(state.wrappers, state.wrapper_states)
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
  writers.require("the progress bar", "tqdm")
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


@contextlib.contextmanager
def _profiler(
  profile_steps: tuple[int, ...], workdir: str
) -> Iterator[Callable[[int, TrainState], None]]:
  """Yields what is called before each step, to trace those asked for."""
  first, last = profile_steps or (0, 0)
  where = os.path.join(workdir, "profile")
  running = False

  def before_step(step: int, state: TrainState) -> None:
    nonlocal running
    if running != (first <= step <= last):
      jax.block_until_ready(state)
      if running:
        stop()
      else:
        jax.profiler.start_trace(where)
        running = True

  def stop() -> None:
    nonlocal running
    jax.profiler.stop_trace()
    running = False
    _log.info("profiled from step %d: %s", first, where)

  try:
    yield before_step
  finally:
    if running:
      stop()


def _exit_interrupted(signum: int, step: int, workdir: str) -> None:
  name = signal.Signals(signum).name
  _log.warning(
    "%s: saved step %d in %s; the same command goes on from there",
    name,
    step,
    workdir,
  )
  raise SystemExit(128 + signum)
