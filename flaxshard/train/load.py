"""Loads the model of a run from its workdir."""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import logging
import os
from typing import Any

import jax
import ml_collections

from flaxshard.checkpoint import keep
from flaxshard.checkpoint import restoring
from flaxshard.checkpoint import steps
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.partitioning import compile_only
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import apply as apply_lib
from flaxshard.tasks.task import AdaptedTask
from flaxshard.train import config as config_lib
from flaxshard.train import devices
from flaxshard.train import same_run
from flaxshard.train import setup as setup_lib

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Loaded:
  """A trained model, as `fs.load` returns it.

  Attributes:
    state: The train state of the checkpoint.
    config: The config of the run.
    task: The task, with functions `loss`, `predict`, `init_inputs`, ...; the
      object itself is `task.task`.
    step: The step of the checkpoint: number of batches consumed.
    strategy: The devices that hold the state.
    example: Shapes of one example of the data, without the batch dimension.
    workdir: The workdir of the run.
  """

  state: TrainState
  config: ml_collections.ConfigDict
  task: AdaptedTask
  step: int
  strategy: Strategy
  example: Mapping[str, jax.ShapeDtypeStruct]
  workdir: str

  def __repr__(self) -> str:
    """Returns the run, the step and the task in a line."""
    return (
      f"Loaded(workdir={self.workdir!r}, step={self.step}, "
      f"task={self.task.name}, {self.strategy!r})"
    )

  @property
  def params(self) -> Any:
    """The parameters to evaluate: with the wrapper `EMA`, the averages."""
    return self.state.eval_params

  def predict(self, batch: Mapping[str, Any]) -> Any:
    """Returns the task's prediction for a batch, in evaluation mode.

    The first call for a batch of another shape compiles.

    Args:
      batch: Arrays `[batch, ...]` by name: those of the data that the task's
        `predict` reads, for most tasks `inputs` alone. Of several processes,
        all must call it, with the same batch.
    """
    outputs = self._predict(self.state, {**batch})
    return jax.block_until_ready(outputs) if self.strategy.waits else outputs

  @functools.cached_property
  def _predict(self) -> Any:
    return jax.jit(functools.partial(predict, self.task))


def predict(
  task: AdaptedTask | None, state: TrainState, batch: Mapping[str, Any]
) -> Any:
  """Returns a task's prediction for a batch, in evaluation mode.

  Args:
    task: The task; None calls the model with `batch["inputs"]`.
    state: The state.
    batch: Arrays `[batch, ...]` by name.
  """
  # The same random streams at each call, as in evaluations.
  rngs = apply_lib.Rngs(jax.random.key(0))
  apply_fn = apply_lib.apply_in(state, train=False, rngs=rngs)
  if task is None:
    return apply_fn(state.eval_params, batch["inputs"])[0]
  return task.predict(apply_fn, state.eval_params, batch)


def load(
  workdir: str | os.PathLike[str],
  step: int | str | None = None,
  *,
  strategy: Strategy | None = None,
  rules: Any = None,
  task: Any = None,
) -> Loaded:
  """Loads the state, the task and the config of a run from its workdir.

  The data of the run need not be there. The run may still be in progress.

  Args:
    workdir: The workdir, on a file system or in a bucket.
    step: The checkpoint: a step, `"best"` by `config.best_metric`, or None for
      the latest that is not damaged.
    strategy: The devices for the state, which may be others than those of the
      run. By default they are those of `config.mesh`, if there are so many, and
      else the first device.
    rules: How the parameters are split over the mesh of `strategy`; None:
      as `config.mesh.rules` says. See `create_train_state`.
    task: The task object of a run that was given one.

  Returns:
    The state, the config, the task and the step. `loaded.predict(batch)`
    applies the model.

  Raises:
    ValueError, TypeError: `workdir` is not the workdir of a run, one of its
      files is broken, there is no such checkpoint, the model or the task of its
      config cannot be created or have changed since, or `rules` do not fit.

  Example:
    >>> import flaxshard as fs
    >>> loaded = fs.load("/tmp/digits")  # doctest: +SKIP
    >>> logits = loaded.predict({"inputs": images})  # doctest: +SKIP
  """
  workdir = files.absolute(workdir)
  values = same_run.read_json(workdir, same_run.CONFIG_FILE)
  shapes = same_run.read_json(workdir, same_run.DATA_FILE)
  if values is None or shapes is None:
    missing = same_run.CONFIG_FILE if values is None else same_run.DATA_FILE
    raise ValueError(
      f"workdir={workdir!r} is not the workdir of a run: there is no {missing}."
    )
  config = config_lib.check(values)
  setup = plan(config, shapes, task, strategy, rules)
  if step == "best":
    step = _best_step(config, workdir)
  elif step is not None:
    step = checks.integer("step, if not 'best',", step, minimum=0)
  restore = lambda: steps.read(
    workdir,
    step,
    lambda path: restoring.restore_step(path, setup.abstract_state),
  )
  if step is not None or not devices.has_workers(config):
    number, state = restore()
  else:
    path = steps.directory_of_steps(steps.as_path(workdir))
    has_steps = bool(steps.find(path))
    newest = restore() if has_steps else (0, setup.create_state())
    found = _find_final_center(workdir, *newest)
    # Without a step, restoring says what is missing.
    number, state = found or (newest if has_steps else restore())
  return Loaded(
    state=state,
    config=config,
    task=setup.task,
    step=number,
    strategy=setup.strategy,
    example=setup.shapes.example,
    workdir=workdir,
  )


def plan(
  config: Any,
  shapes: Mapping[str, Any],
  task: Any = None,
  strategy: Strategy | None = None,
  rules: Any = None,
) -> setup_lib.Setup:
  """Returns the setup of a run without its data.

  Args:
    config: The checked config of the run.
    shapes: What `data.json` has: the shapes of an example.
    task: As for `load`.
    strategy: As for `load`.
    rules: As for `load`.
  """
  if strategy is None:
    found = compile_only.all_devices()
    try:
      strategy = devices.strategy_of(config, found)
    except ValueError as e:
      _log.info("the state is put on the first device: %s", e)
      strategy = Strategy(devices=found[:1])
      rules = () if rules is None else rules
  if rules is not None:
    values = config.to_dict()
    values["mesh"]["rules"] = rules
    config = config_lib.check(values)
  known = same_run.shapes_from_json(shapes)
  return setup_lib.Setup(config, strategy, task, known=known)


def _find_final_center(
  workdir: str, number: int, state: TrainState
) -> tuple[int, TrainState] | None:
  """Returns the final center of a run that nobody could save in its workdir.

  Args:
    workdir: The workdir.
    number: The newest step in it.
    state: Its state.

  Returns:
    The step and the state; None if the run has not ended, or has saved it.
  """
  # Imported here: other runs do not need it.
  from flaxshard.center import heads
  from flaxshard.center import store
  from flaxshard.center import train_states

  url = store.center_url(workdir)
  versions = train_states.find(state)[1].versions.tolist()
  with contextlib.suppress(store.StoreError):  # the store warns
    objects = store.Objects(url)
    found = heads.read(objects, has_begun=False)
    if found.finished and found.versions != versions:
      _log.warning("step %d is older than the final center in %s", number, url)
      return found.step, train_states.with_center(objects, found, state)
  return None


def _best_step(config: Any, workdir: str) -> int:
  """Returns the step with the best `config.best_metric`."""
  metric = config.best_metric
  if metric == "none":
    raise ValueError(
      f"step='best' needs config.best_metric, by which the run in {workdir} "
      "would have kept its best checkpoint; it is 'none'."
    )
  with multihost.raise_on_all_processes(ValueError):
    mode = config_lib.resolve_mode(metric, config.best_mode)
    ranking = keep.Keep(best_metric=metric, best_mode=mode)
    number = keep.best_step(steps.as_path(workdir), ranking)
    if number is None:
      raise ValueError(
        f"step='best': no checkpoint in {workdir} has a finite {metric}."
      )
  return int(multihost.exchange(number)[0])
