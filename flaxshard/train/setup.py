"""Builds what a run needs from its config: devices, data, state and steps.

Nothing is written and no step is compiled here, so that an invalid config is
reported within seconds. A plan uses it too, for devices that need not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging
from typing import Any

import jax
import numpy as np
import optax

from flaxshard import data
from flaxshard.core import optimizer
from flaxshard.core import trees
from flaxshard.data import distribute
from flaxshard.data import sharding
from flaxshard.data import sources
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import PerReplica
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import load
from flaxshard.tasks.adapted import AdaptedTask
from flaxshard.train import creation as creation_lib
from flaxshard.train import devices
from flaxshard.train import rollouts
from flaxshard.train import steps
from flaxshard.train.ranks import Rank

_log = logging.getLogger(__name__)

_ALONE = Rank()

P = jax.sharding.PartitionSpec

# Positions in `Setup.arguments`.
STATE, PROGRESS, BATCH, RNG = range(4)


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
  """The devices, the task, the data, the state and the steps of a config.

  Attributes:
    config: The checked config.
    strategy: The devices.
    rank: The worker that this process is.
    task: The task.
    splits: The data; None for a plan, and if the task makes its own batches.
    shapes: The shapes of an example of the data.
    batch_size: Examples in a batch, of this worker alone if there are several.
    batch_specs: How each array of a batch is split.
    schedule: The learning rate, as a function of the applied updates.
    create_state: Returns a new state, and warns of a precision without a scale.
    jitted_train_step: `jitted_train_step(state, progress, batch, rng)` under
      `jax.jit`. It donates the state and the progress.
    arguments: The arguments of the train step, with a `jax.ShapeDtypeStruct`
      for every array.
  """

  config: Any
  strategy: Strategy
  rank: Rank
  task: AdaptedTask
  splits: data.Splits | None
  shapes: data.Shapes
  batch_size: int
  batch_specs: Mapping[str, P]
  schedule: optax.Schedule
  create_state: Callable[[], TrainState]
  jitted_train_step: Any
  arguments: tuple[Any, ...]

  @property
  def abstract_state(self) -> TrainState:
    """The state with a `jax.ShapeDtypeStruct` for every array."""
    state: TrainState = self.arguments[STATE]
    return state

  @property
  def num_train_examples(self) -> int | None:
    """The number of training examples; None if it is not known."""
    if self.splits is None or sources.is_stream(self.splits.train):
      return None
    return len(self.splits.train)  # type: ignore[arg-type]

  # The steps.

  @functools.cached_property
  def train_step(self) -> Callable[..., tuple[TrainState, steps.Progress]]:
    """`train_step(state, progress, batch, rng)` returns the first two anew."""
    return devices.block_if_virtual_cpu(self.strategy, self.jitted_train_step)

  @functools.cached_property
  def eval_step(self) -> Callable[..., Any]:
    """`eval_step(state, metrics, batch, rng, index)` merges the metrics."""
    return devices.block_if_virtual_cpu(self.strategy, jax.jit(self._eval_step))

  @functools.cached_property
  def _eval_step(self) -> Callable[..., Any]:
    count = 0
    # A task's own evaluation need not use the metrics.
    if self.has_eval_data and self.task.evaluate is None:
      count = len(self.splits.eval)  # type: ignore[union-attr, arg-type]
    is_padded = count % self.batch_size > 0
    return functools.partial(steps.eval_step, self.task, is_padded=is_padded)

  @functools.cached_property
  def lowered_train_step(self) -> jax.stages.Lowered:
    """The train step, traced and ready to be compiled."""
    return self.trace().lower()

  def trace(self) -> jax.stages.Traced:
    """Traces the train step and the evaluation; returns the traced train step.

    Raises:
      ValueError, TypeError: The model cannot be trained on the data.
    """
    where = f"config.data ({self.config.data.get('name')!r})"
    if not self.config.data:
      where = f"the data of {self.task.name}"
    model = creation_lib.describe_model(self.config, self.task)
    with creation_lib.errors_name_field(
      f"{model} cannot be trained on {where}"
    ):
      traced: jax.stages.Traced = self.jitted_train_step.trace(*self.arguments)
      # Evaluation is compiled much later: trace it now to find its errors.
      metrics = jax.eval_shape(self.task.metrics.empty)
      state, _, batch, rng = self.arguments
      mask = jax.ShapeDtypeStruct((self.batch_size,), bool)
      batch = {**batch, "mask": mask}
      jax.eval_shape(self._eval_step, state, metrics, batch, rng, np.int32(0))
    return traced

  # Arguments of the train step, on the devices.

  def init_progress(self, step: int) -> steps.Progress:
    """Returns the progress before the steps that follow a step."""
    values = self._zero_progress._replace(step=np.int32(step))
    abstract = self.arguments[PROGRESS]
    # Per replica, the arrays have one more dimension.
    placed = [
      mesh_lib.put(np.broadcast_to(x, like.shape), like.sharding, compare=False)
      for x, like in zip(
        jax.tree.leaves(values), jax.tree.leaves(abstract), strict=True
      )
    ]
    progress: steps.Progress
    progress = jax.tree.unflatten(jax.tree.structure(abstract), placed)
    return progress

  @functools.cached_property
  def _zero_progress(self) -> Any:
    return jax.device_get(steps.init_progress(self.task))

  @functools.cached_property
  def read_progress(self) -> Callable[[steps.Progress], steps.Progress]:
    """Waits for a progress; returns that of all replicas as NumPy arrays."""
    if not self.config.mesh.per_replica:
      # Each process has the whole progress already.
      return jax.device_get
    replicated = jax.sharding.NamedSharding(self.strategy.mesh, P())
    # One program, and not one for each array.
    combine = jax.jit(steps.combine_replicas, out_shardings=replicated)
    return lambda progress: jax.device_get(combine(progress))

  def train_rng(self) -> Any:
    """Returns the PRNG key of the train steps."""
    key = jax.random.key(self.config.seed)
    if self.rank.worker_id and not self.config.mesh.per_replica:
      # Otherwise the steps fold the numbers of their replicas into it.
      key = jax.random.fold_in(key, self.rank.worker_id)
    return devices.replicate(self.strategy, key)

  # The data.

  def open_train_batches(self) -> Any:
    """Returns an iterator over the training batches, a context manager."""
    if self.task.train_batches is not None:
      return rollouts.Rollouts(
        self.task,
        self.config.seed,
        self.arguments[BATCH],
        worker_id=self.rank.worker_id,
      )
    assert self.splits is not None
    first_row = self.rank.worker_id * self.batch_size
    batches = data.train_iterator(
      self.splits,
      seed=self.config.seed,
      collate=self.task.collate,
      # Rows of the batch of all workers.
      batch_size=self.config.batch_size,
      rows=[first_row + row for row in self._rows()],
    )
    # Training batches are never padded: the data repeats.
    return iter(
      self.strategy.distribute_dataset(
        batches, mask=None, spec=self.batch_specs
      )
    )

  def next_batch(self, batches: Any, state: TrainState) -> Any:
    """Returns the next training batch, on the devices.

    Args:
      batches: What `open_train_batches` has returned.
      state: The newest train state.
    """
    if self.task.train_batches is not None:
      return batches.next_batch(state)
    return next(batches)

  @property
  def has_eval_data(self) -> bool:
    """Whether there is evaluation data."""
    return self.splits is not None and self.splits.eval is not None

  def eval_batches(self) -> distribute.DistributedDataset:
    """Returns the evaluation batches, on the devices.

    Raises:
      ValueError: There is no evaluation data.
    """
    if not self.has_eval_data:
      raise ValueError(
        f"{self.task.name}.evaluate: there is no evaluation data."
      )
    return self.strategy.distribute_dataset(
      # Each worker evaluates its center with all examples.
      data.eval_batches(
        self.splits,  # type: ignore[arg-type]
        collate=self.task.collate,
        batch_size=self.batch_size,
        rows=self._rows(),
      ),
      spec=self.batch_specs,
    )

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
  if loaded.splits is not None:
    sources.check_batch_size(
      "config.batch_size", config.batch_size, loaded.splits
    )
  setup = plan_setup(config, strategy, loaded, rank)
  # Traced now, so that its errors come before anything is written.
  setup.lowered_train_step  # noqa: B018
  return setup


def plan_setup(
  config: Any,
  strategy: Strategy,
  loaded: load.LoadedTask,
  rank: Rank = _ALONE,
) -> Setup:
  """Builds the state and the train step from the shapes of the data.

  Nothing is read, traced or allocated but the creation of the state.

  Args:
    config: A checked config.
    strategy: Its strategy; see `devices.create_strategy`.
    loaded: The task, and the shapes of its data.
    rank: The worker that this process is.

  Raises:
    ValueError, TypeError: The model, the optimizer, the rules and the wrappers
      do not fit each other. The message names the field.
  """
  task, example = loaded.task, loaded.shapes.example
  batch_size = config.batch_size // rank.num_workers
  specs = devices.batch_specs(config.mesh.split, batch_size, strategy, example)
  tx, schedule = optimizer.create(config)

  state, create = creation_lib.plan_state(config, strategy, loaded, tx)

  def create_state() -> TrainState:
    leaves = jax.tree.leaves(create())
    # The static fields of the traced state, or the step would compile again.
    return jax.tree.unflatten(jax.tree.structure(state), leaves)

  batch = {
    key: jax.ShapeDtypeStruct(
      (batch_size, *np.shape(x)),
      # Without jax_enable_x64, JAX turns float64 and int64 into 32 bits.
      jax.dtypes.canonicalize_dtype(trees.dtype_of(x)),
      sharding=jax.sharding.NamedSharding(strategy.mesh, specs[key]),
    )
    for key, x in example.items()
  }
  arguments = (
    state,
    _place(
      strategy,
      jax.eval_shape(lambda: steps.init_progress(task)),
      config.mesh.per_replica,
    ),
    batch,
    _place(strategy, jax.eval_shape(lambda: jax.random.key(0)), False),
  )
  return Setup(
    config=config,
    strategy=strategy,
    rank=rank,
    task=task,
    splits=loaded.splits,
    shapes=loaded.shapes,
    batch_size=batch_size,
    batch_specs=specs,
    schedule=schedule,
    create_state=create_state,
    jitted_train_step=_jit_train_step(config, strategy, task, arguments, rank),
    arguments=arguments,
  )


def _place(strategy: Strategy, tree: Any, per_replica: bool) -> Any:
  """Returns shapes that are whole on every device, or one for each replica."""
  spec = P(mesh_lib.REPLICA) if per_replica else P()
  sharding = jax.sharding.NamedSharding(strategy.mesh, spec)
  rows = (strategy.num_replicas_in_sync,) if per_replica else ()

  def place_leaf(x: jax.ShapeDtypeStruct) -> Any:
    placed = jax.ShapeDtypeStruct((*rows, *x.shape), x.dtype, sharding=sharding)
    return PerReplica(placed) if per_replica else placed

  return jax.tree.map(place_leaf, tree)


def _jit_train_step(
  config: Any,
  strategy: Strategy,
  task: AdaptedTask,
  arguments: tuple[Any, ...],
  rank: Rank,
) -> Any:
  """Returns the jitted train step, which donates the state and the progress."""
  first_replica = rank.worker_id * strategy.num_replicas_in_sync

  # The name stands in profiles and programs.
  def train_step(
    state: TrainState, progress: steps.Progress, batch: Any, rng: Any
  ) -> tuple[TrainState, steps.Progress]:
    # Each worker has the random streams of its own replicas.
    with replica_context.number_from(first_replica):
      return steps.train_step(task, state, progress, batch, rng)

  if config.mesh.per_replica:
    return strategy.jit(train_step, donate_argnums=(STATE, PROGRESS))
  return jax.jit(
    train_step,
    donate_argnums=(STATE, PROGRESS),
    # Without them, XLA may choose other shardings for the new state, and the
    # second step would compile again.
    out_shardings=jax.tree.map(
      lambda x: x.sharding, (arguments[STATE], arguments[PROGRESS])
    ),
  )
