"""Loads the state, the task and the config of a run from its workdir."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import json
import os
from typing import Any

import jax
import ml_collections
import numpy as np

from flaxshard import tasks
from flaxshard.checkpoint import best_step
from flaxshard.checkpoint import locate
from flaxshard.checkpoint import step as step_lib
from flaxshard.core import checks
from flaxshard.core import files
from flaxshard.core import multihost
from flaxshard.core import optimizer
from flaxshard.core import registry
from flaxshard.partitioning import specs as specs_lib
from flaxshard.state import create as create_lib
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import apply as apply_lib
from flaxshard.tasks import load as tasks_load
from flaxshard.tasks.adapted import AdaptedTask
from flaxshard.tasks.task import Apply
from flaxshard.train import config as config_lib
from flaxshard.train import creation as creation_lib
from flaxshard.train import devices
from flaxshard.train import resume


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

    Raises:
      TypeError: `batch` is not a dict.
      ValueError: A name is unknown, or an array has no batch dimension.
    """
    if not isinstance(batch, Mapping):
      names = ", ".join(f"{name!r}: ..." for name in self.example)
      raise TypeError(
        f"batch must be a dict of arrays with some of {{{names}}}, got "
        f"{checks.describe(batch)}."
      )
    for name, x in batch.items():
      if name not in self.example:
        raise ValueError(
          f"batch[{name!r}]: examples of the data have "
          f"{', '.join(self.example)}.{checks.did_you_mean(name, self.example)}"
        )
      shape = self.example[name].shape
      if np.ndim(x) != len(shape) + 1:
        raise ValueError(
          f"batch[{name!r}] must have the shape "
          f"({', '.join(map(str, ('batch', *shape)))}), got {np.shape(x)}."
        )
    return self._predict(self.state, dict(batch))

  @functools.cached_property
  def _predict(self) -> Any:
    jitted = jax.jit(functools.partial(predict, self.task))
    return devices.block_if_virtual_cpu(self.strategy, jitted)


def predict(task: AdaptedTask, state: TrainState, batch: Any) -> Any:
  """Returns a task's prediction for a batch, in evaluation mode.

  Args:
    task: The task.
    state: The state.
    batch: Arrays `[batch, ...]` by name.
  """
  return task.predict(apply_in_evaluation(state), state.eval_params, batch)


def apply_in_evaluation(state: TrainState) -> Apply:
  """Returns the function that applies the model in evaluation mode.

  Args:
    state: The state, for the model and its collections.
  """
  # The same random streams at each call, as in evaluations.
  rngs = apply_lib.Rngs(jax.random.key(0))
  return apply_lib.apply_in(state, train=False, rngs=rngs)


def load(
  workdir: str | os.PathLike[str],
  step: int | str | None = None,
  *,
  strategy: Strategy | None = None,
  rules: Any = None,
  task: Any = None,
) -> Loaded:
  """Loads the state, the task and the config of a run from its workdir.

  The data of the run need not be there, except for workdirs of versions that
  did not store the shapes of the data. The run may still be in progress.

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
  workdir = files.absolute(checks.path("workdir", workdir))
  if strategy is not None and not isinstance(strategy, Strategy):
    raise TypeError(
      f"strategy must be a Strategy or None, got {checks.describe(strategy)}."
    )
  if task is not None:
    task = tasks.adapt(task)
  config = _read_config(workdir)
  with _name_config_file(workdir):
    loaded = _load_task(config, workdir, task)
  if strategy is None:
    strategy, fits = devices.strategy_for_state(config)
    if rules is None and not fits:
      rules = ()
  program_config = _with_rules(config, rules)
  with _name_config_file(workdir):
    creation = _plan_creation(program_config, strategy, loaded, rules)
  directory = locate.directory_of_steps(workdir)
  number, state = step_lib.restore_from_directory(
    directory, creation.abstract_state(), _choose_step(config, workdir, step)
  )
  return Loaded(
    state=state,
    config=config,
    task=loaded.task,
    step=number,
    strategy=strategy,
    example=loaded.example,
    workdir=workdir,
  )


def _read_config(workdir: str) -> ml_collections.ConfigDict:
  """Returns the checked config of a run.

  Raises:
    ValueError: The folder is missing or is not a workdir, or its `config.json`
      is broken or is not that of this version.
  """
  path = os.path.join(workdir, "config.json")
  if not files.exists(path):
    hint = locate.describe_missing(workdir)
    if files.is_dir(workdir):
      hint = "it has no config.json."
      parent = os.path.dirname(workdir)
      if files.exists(os.path.join(parent, "config.json")):
        hint += f" Did you mean {parent!r}?"
      else:
        hint += (
          " flaxshard.checkpoint.restore(path, state) reads the checkpoints of "
          "other programs."
        )
    raise ValueError(f"workdir={workdir!r} is not the workdir of a run: {hint}")
  values = _read_json(path)
  with _name_config_file(workdir):
    # JSON has lists for the tuples of the config.
    return config_lib.check(registry.to_plain(values))


def _read_json(path: str) -> dict[str, Any]:
  try:
    return dict(json.loads(files.read_bytes(path)))
  except (ValueError, TypeError) as e:
    raise ValueError(f"{path} is broken: {e}") from e


@contextlib.contextmanager
def _name_config_file(workdir: str) -> Iterator[None]:
  """Prepends the path of `config.json` to errors about its fields."""
  try:
    yield
  except (TypeError, ValueError) as e:
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(f"{os.path.join(workdir, 'config.json')}: {e}") from e


def _load_task(config: Any, workdir: str, task: Any) -> tasks_load.LoadedTask:
  """Returns the task of a run and the shapes of its data."""
  shapes = None
  path = resume.data_path(workdir)
  if files.exists(path):
    content = _read_json(path)
    try:
      shapes = resume.shapes_from_json(content)
    except (KeyError, TypeError, AttributeError) as e:
      raise ValueError(f"{path} is broken: {e!r}") from e
  if shapes is None:
    # A workdir of a version that did not store them: from the data.
    return tasks_load.load(config, task, shapes_only=True)
  return tasks_load.load(config, task, known=shapes)


def _plan_creation(
  config: Any, strategy: Strategy, loaded: tasks_load.LoadedTask, rules: Any
) -> create_lib.CreationPlan:
  """Traces the creation of the state, with which shapes are known."""
  tx, _ = optimizer.create(config)
  try:
    return creation_lib.plan_creation(config, strategy, loaded, tx)
  except ValueError as e:
    if rules is not None or not isinstance(e.__cause__, specs_lib.RuleError):
      raise
    raise ValueError(
      f"{e} These are the rules of the run: give rules for this strategy, or "
      "rules=() to put all parameters whole on each device."
    ) from e


def _with_rules(config: Any, rules: Any) -> Any:
  """Returns a config with other `config.mesh.rules`, unless they are None."""
  if rules is None:
    return config
  values = config.to_dict()
  values["mesh"]["rules"] = rules
  return config_lib.check(values)


def _choose_step(config: Any, workdir: str, step: Any) -> int | None:
  """Returns the number of a step; None for the latest one."""
  if step is None:
    return None
  if not isinstance(step, str):
    return checks.integer("step", step, minimum=0)
  checks.one_of("step", step, ("best",))
  metric = config.best_metric
  if metric == "none":
    raise ValueError(
      f"step='best' needs config.best_metric, by which the run in {workdir} "
      "would have kept its best checkpoint; it is 'none'."
    )
  with multihost.raise_on_all_processes(ValueError):
    mode = config_lib.resolve_mode(metric, config.best_mode)
    number = best_step.best_step(workdir, metric, mode)
  if number is None:
    raise ValueError(
      f"step='best': no checkpoint in {workdir} has a finite {metric}."
    )
  return int(multihost.exchange(str(number))[0])
