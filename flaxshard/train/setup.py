"""Builds what a run needs from its config: devices, data, state and steps.

Nothing is written and no step is compiled here, so that an invalid config is
reported within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from flaxshard import data
from flaxshard.core import checks
from flaxshard.data import distribute
from flaxshard.data import sharding
from flaxshard.data import sources
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import load
from flaxshard.train import devices
from flaxshard.train import evaluation as evaluation_lib
from flaxshard.train import program as program_lib
from flaxshard.train import rollouts
from flaxshard.train import steps
from flaxshard.train.ranks import Rank

_ALONE = Rank()

P = jax.sharding.PartitionSpec


@dataclasses.dataclass(frozen=True)
class Setup(program_lib.Program):
  """Everything that a run needs, built from its config.

  Attributes:
    rank: The worker that this process is.
    splits: The data; None if the task makes its own batches.
    shapes: The shapes of an example of the data.
    zero_progress: The progress before any step, as NumPy arrays.
    lowered_train_step: The train step, traced and ready to be compiled.
    eval_step: `eval_step(state, metrics, batch, rng, index)` returns the merged
      metrics.
    read_progress: Waits for the progress of a step and returns that of all
      replicas combined, as NumPy arrays.
  """

  rank: Rank
  splits: data.Splits | None
  shapes: data.Shapes
  zero_progress: steps.Progress
  lowered_train_step: jax.stages.Lowered
  eval_step: Callable[..., Any]
  read_progress: Callable[[Any], steps.Progress]

  def next_batch(self, iterator: Any, state: TrainState) -> Any:
    """Returns the next training batch, on the devices.

    Args:
      iterator: That of `open_train_batches`.
      state: The newest train state.
    """
    if self.task.train_batches is None:
      return next(iterator)
    return iterator.next_batch(state)

  def open_train_batches(self) -> Any:
    """Returns an iterator over the training batches, a context manager."""
    if self.task.train_batches is None:
      return iter(self.train_batches())
    return rollouts.RolloutIterator(
      self.task,
      self.config.seed,
      self.arguments[program_lib.BATCH],
      worker_id=self.rank.worker_id,
    )

  def train_batches(self) -> distribute.DistributedDataset:
    """Returns the endless training batches, on the devices."""
    splits = self.splits
    assert splits is not None
    return self.strategy.distribute_dataset(
      data.train_iterator(
        splits,
        seed=self.config.seed,
        collate=self.task.collate,
        # Rows of the batch of all workers.
        batch_size=self.config.batch_size,
        rows=self.rank.rows(self._rows(), self.batch_size),
      ),
      # Training batches are never padded: the data repeats.
      mask=None,
      spec=self.batch_specs,
    )

  def evaluate(self, state: TrainState, step: int = 0) -> dict[str, float]:
    """Returns the metrics of the task's evaluation, as `eval_<name>`.

    Args:
      state: The train state.
      step: The step just taken.
    """
    rng = jax.random.fold_in(jax.random.key(self.config.seed), 2**31 - 1)
    evaluation = evaluation_lib.Evaluation(
      # A checkpoint saves replica 0 as well, if groups of replicas differ.
      state=replica_groups.of_first_replica(
        state.replace(params=state.eval_params)
      ),
      step=step,
      rng=self.replicate(rng),
      task=self.task,
      read_batches=self._eval_batches,
      eval_step=self.eval_step,
      replicate=self.replicate,
    )
    return evaluation_lib.evaluate(
      evaluation, self._has_eval_data, self.config.best_metric
    )

  @property
  def num_train_examples(self) -> int | None:
    """The number of training examples; None if it is not known."""
    splits = self.splits
    if splits is None or sources.is_stream(splits.train):
      return None
    return len(splits.train)  # type: ignore[arg-type]

  @property
  def _has_eval_data(self) -> bool:
    return self.splits is not None and self.splits.eval is not None

  def _eval_batches(self) -> distribute.DistributedDataset:
    if self.splits is None or self.splits.eval is None:
      raise ValueError(
        f"{self.task.name}.evaluate: there is no evaluation data."
      )
    return self.strategy.distribute_dataset(
      # Each worker evaluates its center with all examples.
      data.eval_batches(
        self.splits,
        collate=self.task.collate,
        batch_size=self.batch_size,
        rows=self._rows(),
      ),
      spec=self.batch_specs,
    )

  def init_progress(self) -> steps.Progress:
    """Returns the progress before any step, on the devices."""
    return _give_replicas(
      self.strategy, self.zero_progress, self.config.mesh.per_replica
    )

  def train_rng(self) -> Any:
    """Returns the PRNG key of the train steps, on the devices."""
    key = jax.random.key(self.config.seed)
    if self.rank.worker_id and not self.config.mesh.per_replica:
      # Otherwise the steps fold the numbers of their replicas into it.
      key = jax.random.fold_in(key, self.rank.worker_id)
    return self.replicate(key)

  def init_step(self, step: int) -> Any:
    """Returns the number of the first step, on the devices."""
    return _give_replicas(
      self.strategy, np.int32(step), self.config.mesh.per_replica
    )

  def replicate(self, tree: Any) -> Any:
    """Returns a tree of arrays, whole on every device."""
    return devices.replicate(self.strategy, tree)

  def _rows(self) -> Sequence[int]:
    """Returns the rows of a batch that this process reads."""
    return sharding.pipeline_rows(self.strategy.mesh, self.batch_size)


def create_setup(
  config: Any, strategy: Strategy, task: Any = None, rank: Rank = _ALONE
) -> Setup:
  """Builds everything that a run needs.

  Args:
    config: A checked config.
    strategy: Its strategy; see `devices.create_strategy`.
    task: A task object, in place of the one that `config.task` names.
    rank: The worker that this process is.

  Raises:
    ValueError, TypeError: The data, the model, the optimizer, the rules and the
      wrappers do not fit each other. The message names the field.
    ImportError: A package that the config needs is not installed.
  """
  loaded = load.load(config, task)
  task = loaded.task
  if loaded.splits is not None:
    sources.check_batch_size(
      "config.batch_size", config.batch_size, loaded.splits
    )
  program = program_lib.create_program(config, strategy, loaded, rank)
  for field, metric in (
    ("config.best_metric", config.best_metric),
    ("config.early_stopping.metric", config.early_stopping.metric),
  ):
    evaluation_lib.check_metric(field, metric, task, loaded.splits)
  lowered = program.trace().lower()
  _warn_of_scalar_metrics(program, loaded.splits)
  per_replica = config.mesh.per_replica
  fields = vars(program)
  if not per_replica:
    # `Strategy.jit` waits for the results by itself.
    step = devices.block_if_virtual_cpu(strategy, program.train_step)
    fields = {**fields, "train_step": step}
  return Setup(
    **fields,
    rank=rank,
    splits=loaded.splits,
    shapes=data.Shapes(loaded.example, loaded.num_classes),
    zero_progress=jax.device_get(
      steps.init_progress(task, program.abstract_state)
    ),
    lowered_train_step=lowered,
    eval_step=devices.block_if_virtual_cpu(
      strategy, jax.jit(functools.partial(steps.eval_step, task))
    ),
    read_progress=_make_progress_reader(strategy, per_replica),
  )


def _warn_of_scalar_metrics(
  program: program_lib.Program, splits: data.Splits | None
) -> None:
  """Warns of means over a batch that count the padding of the last one."""
  if splits is None or splits.eval is None or program.task.evaluate is not None:
    return
  size = program.batch_size
  if not len(splits.eval) % size:
    return
  names = program.scalar_metrics()
  if names:
    checks.warn(
      f"{program.task.name}.loss: Aux.metrics has scalars: {', '.join(names)}. "
      f"The {len(splits.eval)} evaluation examples are no multiple of "
      f"config.batch_size={size}, and the padding of the last batch counts in "
      "them. Return arrays [batch]: the metrics take their mean."
    )


def _give_replicas(strategy: Strategy, tree: Any, per_replica: bool) -> Any:
  """Places arrays that all replicas start from."""
  if per_replica:
    return strategy.distribute_values_from_function(lambda context: tree)
  return devices.replicate(strategy, tree)


def _make_progress_reader(
  strategy: Strategy, per_replica: bool
) -> Callable[[Any], steps.Progress]:
  if not per_replica:
    # Each process has the whole progress already.
    return jax.device_get
  replicated = jax.sharding.NamedSharding(strategy.mesh, P())
  # One program, and not one for each array.
  combine = jax.jit(steps.combine_replicas, out_shardings=replicated)
  return lambda progress: jax.device_get(combine(progress))
