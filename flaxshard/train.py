"""The training loop: set up, restore, train, evaluate, save, say what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import json
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
from flaxshard import wrappers
from flaxshard import writers
from flaxshard.policy import Policy
from flaxshard.train_state import create_train_state
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
  checkpoint.check_writable("workdir", workdir)
  workdir = os.path.abspath(workdir)
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

  with contextlib.ExitStack() as stack:
    interrupted = stack.enter_context(interrupts.caught())
    checkpointer = stack.enter_context(
      checkpoint.Checkpointer(
        os.path.join(workdir, "checkpoints"), max_to_keep=config.max_to_keep
      )
    )
    first_step = checkpointer.latest_step() or 0
    if first_step:
      _check_continues(config, workdir)
      state = checkpointer.restore(state, data=train_iter)
      _log.info("resuming from step %d in %s", first_step, workdir)
    if first_step >= config.num_train_steps:
      _log.info(
        "step %d is done already: nothing to train up to config."
        "num_train_steps=%d",
        first_step,
        config.num_train_steps,
      )
      _finish(workdir)
      return state
    _write_config(config, workdir)
    if not first_step:
      overview = parameter_overview.get_parameter_overview(
        state.params, include_stats=False
      )
      _log.info("parameters:\n%s", overview)

    metrics_file = writers.MetricsFile(_metrics_path(workdir), first_step)
    stack.callback(metrics_file.close)
    write_events, close_events = writers.event_writer(config.writer, workdir)
    stack.callback(close_events)
    show = stack.enter_context(_progress_bar(first_step, config))
    before_step = stack.enter_context(_profiler(config.profile_steps, workdir))

    to_device = _batch_to_device(mesh)
    progress = _replicate(steps.init_progress(state), mesh)
    rng = _replicate(jax.random.key(config.seed), mesh)
    train_step = _compile_train_step(
      state, progress, splits, rng, config.batch_size, mesh
    )
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
      last = step == config.num_train_steps or signum is not None
      log = step % config.log_every_steps == 0 or last
      evaluates = step % config.eval_every_steps == 0 or (last and not signum)
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
      if signum is not None:
        checkpointer.wait()
        _exit_interrupted(signum, step, workdir)

    checkpointer.wait()
  _finish(workdir)
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


def _compile_train_step(
  state: TrainState,
  progress: steps.Progress,
  splits: data.Splits,
  rng: jax.Array,
  batch_size: int,
  mesh: jax.sharding.Mesh,
) -> Callable[..., tuple[TrainState, steps.Progress]]:
  """Compiles ahead, so that no step that is timed does."""
  start = time.monotonic()
  sharding = jax.sharding.NamedSharding(mesh, P("replica"))
  batch = {
    key: jax.ShapeDtypeStruct(
      (batch_size, *np.shape(value)), np.asarray(value).dtype, sharding=sharding
    )
    for key, value in splits.eval[0].items()
  }
  compiled = (
    jax.jit(steps.train_step, donate_argnums=(0, 1))
    .lower(state, progress, batch, rng, _replicate(np.int32(0), mesh))
    .compile()
  )
  _log.info("compiled the train step in %.1f s", time.monotonic() - start)
  return compiled


def _replicate(tree: Any, mesh: jax.sharding.Mesh) -> Any:
  return jax.device_put(tree, jax.sharding.NamedSharding(mesh, P()))


def _batch_to_device(
  mesh: jax.sharding.Mesh,
) -> Callable[[Mapping[str, np.ndarray]], dict[str, jax.Array]]:
  sharding = jax.sharding.NamedSharding(mesh, P("replica"))
  return lambda batch: {
    key: jax.make_array_from_process_local_data(sharding, value)
    for key, value in batch.items()
  }


def _train_row(
  state: TrainState, progress: steps.Progress, schedule: Any
) -> dict[str, float | int | None]:
  logged = base.metrics(state.wrappers, state.wrapper_states)
  row = {f"train_{k}": v for k, v in progress.metrics.compute().items()}
  row |= {"learning_rate": schedule(state.step), **logged}
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
    f"{message}\nconfig.on_nonfinite='continue' would go on; the last "
    "checkpoint is from before that step."
  )


def _check_continues(config: Any, workdir: str) -> None:
  """Refuses to go on with a checkpoint that counts other batches."""
  path = os.path.join(workdir, "config.json")
  if not os.path.exists(path):
    return
  with open(path) as f:
    before = json.load(f)
  now = json.loads(config.to_json())
  for field in ("data", "batch_size", "seed"):
    if before.get(field) != now[field]:
      raise ValueError(
        f"config.{field}={now[field]!r}, but {workdir} was trained with "
        f"{before.get(field)!r}, so its data cannot be continued; go on with "
        "that, or take another workdir."
      )
  changed = [k for k in now if before.get(k) != now[k]]
  if changed:
    _log.info("changed since the last run: config.%s", ", ".join(changed))


def _write_config(config: Any, workdir: str) -> None:
  if jax.process_index() == 0:
    with open(os.path.join(workdir, "config.json"), "w") as f:
      json.dump(json.loads(config.to_json()), f, indent=2, sort_keys=True)


def _metrics_path(workdir: str) -> str:
  if jax.process_index():
    return os.path.join(workdir, f"metrics.{jax.process_index()}.jsonl")
  return os.path.join(workdir, "metrics.jsonl")


@contextlib.contextmanager
def _progress_bar(
  first_step: int, config: Any
) -> Iterator[Callable[[int, Mapping[str, Any]], None]]:
  """Yields what shows a row: a log line, and a bar with ETA on a terminal."""

  def show(step: int, row: Mapping[str, Any]) -> None:
    _log.info("step %d: %s", step, _format(row))

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


def _format(row: Mapping[str, Any]) -> str:
  return " ".join(
    f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}"
    for k, v in row.items()
    if v is not None
  )


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


def _finish(workdir: str) -> None:
  """Draws the plot and says how it went and where everything lies."""
  if jax.process_index():
    return
  rows = writers.read_rows(_metrics_path(workdir))
  writers.plot(rows, os.path.join(workdir, "training.png"))
  final: dict[str, Any] = {}
  for row in rows:
    final |= row
  _log.info(
    "done: %s\nin %s: checkpoints/, metrics.jsonl, training.png, config.json",
    _format(final),
    workdir,
  )
