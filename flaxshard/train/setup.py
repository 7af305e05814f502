"""Builds what a run needs from its config: devices, data, state and steps.

Nothing is written and no step is compiled here, so that an invalid config is
reported within seconds. A plan uses it too, for devices that need not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import numpy as np

from flaxshard import data
from flaxshard.core import checks
from flaxshard.core import optimizer
from flaxshard.core import registry
from flaxshard.data import distribute
from flaxshard.data import sharding
from flaxshard.data import sources
from flaxshard.partitioning import logical_devices
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import PerReplica
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import load
from flaxshard.tasks.stream import Stream
from flaxshard.train import creation as creation_lib
from flaxshard.train import steps
from flaxshard.train.devices import Rank

_ALONE = Rank()

P = jax.sharding.PartitionSpec

# Positions in `Setup.arguments`.
STATE, PROGRESS, BATCH, RNG = range(4)


class Setup:
  """The devices, the task, the data, the state and the steps of a config.

  To build it loads the data and traces the creation of the state. Nothing else
  is traced or allocated.

  Args:
    config: A checked config.
    strategy: Its strategy; see `devices.create_strategy`.
    task: A task object, in place of the one that `config.task` names.
    rank: The worker that this process is.
    shapes_only: Whether to find only the shapes of the data; see `load.load`.
    known: The shapes of the data, if they are known: nothing is read.

  Attributes:
    batch_size: Examples in a batch, of this worker alone if there are several.
    schedule: The learning rate, as a function of the applied updates.
    abstract_state: The state with a `jax.ShapeDtypeStruct` for every array.
    create_state: Returns a new state, and warns of a precision without a scale.

  Raises:
    ValueError, TypeError: The data, the model, the optimizer, the rules and the
      wrappers do not fit each other. The message names the field.
    ImportError: A package that the config needs is not installed.
  """

  def __init__(
    self,
    config: Any,
    strategy: Strategy,
    task: Any = None,
    rank: Rank = _ALONE,
    *,
    shapes_only: bool = False,
    known: data.Shapes | None = None,
  ):
    self.config = config
    self.strategy = strategy
    self.rank = rank
    loaded = load.load(config, task, shapes_only=shapes_only, known=known)
    self.task, self.shapes = loaded.task, loaded.shapes
    self.splits = loaded.splits
    if self.splits is not None:
      sources.check_batch_size(
        "config.batch_size", config.batch_size, self.splits
      )
    self.batch_size = config.batch_size // rank.num_workers
    tx, self.schedule = optimizer.create(config)
    self.abstract_state, self.create_state = creation_lib.plan_state(
      config, strategy, loaded, tx
    )

  @property
  def num_train_examples(self) -> int | None:
    """The number of training examples; None if it is not known."""
    if self.splits is None or sources.is_stream(self.splits.train):
      return None
    return len(self.splits.train)  # type: ignore[arg-type]

  # The steps.

  @functools.cached_property
  def arguments(self) -> tuple[Any, ...]:
    """The arguments of the train step, with a shape for every array.

    Raises:
      ValueError: `config.mesh.split` does not fit the data.
    """
    rows = len(self._rows())
    batch = {
      key: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype)
      for key, x in self.shapes.example.items()
    }
    progress = jax.eval_shape(lambda: steps.init_progress(self.task))
    rng = jax.eval_shape(lambda: jax.random.key(0))
    return (
      self.abstract_state,
      self._place(progress, self.config.mesh.per_replica),
      self.strategy.shard_batch(batch, self._batch_specs),
      self._place(rng, False),
    )

  @functools.cached_property
  def _batch_specs(self) -> dict[str, P]:
    """The PartitionSpec of each array of a batch, by key."""
    example = self.shapes.example
    specs = {key: P(mesh_lib.REPLICA) for key in example}
    # Each replica splits its own part of the batch dimension.
    size = self.batch_size // self.strategy.num_replicas_in_sync
    for key, pieces in self.config.mesh.split.items():
      field = f"config.mesh.split.{key}={pieces!r}"
      if key not in example:
        raise ValueError(
          f"{field}: a batch has {', '.join(sorted(example))}."
          f"{checks.did_you_mean(key, example)}"
        )
      with registry.errors_name(field):
        spec = logical_devices.partition_spec(
          self.strategy.mesh, (size, *example[key].shape), pieces
        )
      batch_axes = (mesh_lib.REPLICA, *specs_lib.axes_of(spec[0]))
      specs[key] = P(batch_axes, *spec[1:])
    return specs

  def _place(self, tree: Any, per_replica: bool) -> Any:
    """Returns shapes that are whole on every device, or one per replica."""
    spec = P(mesh_lib.REPLICA) if per_replica else P()
    sharding = jax.sharding.NamedSharding(self.strategy.mesh, spec)
    rows = (self.strategy.num_replicas_in_sync,) if per_replica else ()

    def place(x: jax.ShapeDtypeStruct) -> Any:
      placed = jax.ShapeDtypeStruct(
        (*rows, *x.shape), x.dtype, sharding=sharding
      )
      return PerReplica(placed) if per_replica else placed

    return jax.tree.map(place, tree)

  @functools.cached_property
  def train_step(self) -> Any:
    """The jitted `train_step(state, progress, batch, rng)`.

    It donates the first two, and returns the next ones.
    """
    first_replica = self.rank.worker_id * self.strategy.num_replicas_in_sync

    # The name stands in profiles and programs.
    def train_step(
      state: TrainState, progress: steps.Progress, batch: Any, rng: Any
    ) -> tuple[TrainState, steps.Progress]:
      # Each worker has the random streams of its own replicas.
      with replica_context.marked(first_replica=first_replica):
        return steps.train_step(self.task, state, progress, batch, rng)

    donated = STATE, PROGRESS
    if self.config.mesh.per_replica:
      return self.strategy.jit(train_step, donate_argnums=donated)
    # Without shardings, XLA may choose others for the new state, and the second
    # step would compile again.
    shardings = jax.tree.map(lambda x: x.sharding, self.arguments[:2])
    return jax.jit(train_step, donate_argnums=donated, out_shardings=shardings)

  @functools.cached_property
  def eval_step(self) -> Any:
    """The jitted `eval_step(state, metrics, batch, rng, index)`.

    It returns the metrics with those of the batch merged into them.
    """
    count = 0
    # A task's own evaluation need not use the metrics.
    if self.has_eval_data and self.task.evaluate is None:
      count = len(self.splits.eval)  # type: ignore[union-attr, arg-type]
    is_padded = count % self.batch_size > 0
    return jax.jit(
      functools.partial(steps.eval_step, self.task, is_padded=is_padded)
    )

  @functools.cached_property
  def lowered_train_step(self) -> jax.stages.Lowered:
    """The train step, traced and ready to be compiled."""
    return self.trace().lower()

  def trace(self) -> jax.stages.Traced:
    """Traces the train step and the evaluation; returns the traced train step.

    Raises:
      ValueError, TypeError: The model cannot be trained on the data.
    """
    state, progress, batch, rng = self.arguments
    with creation_lib.errors_name_fields(self.config, self.task):
      traced: jax.stages.Traced
      traced = self.train_step.trace(state, progress, batch, rng)
      # Evaluation is compiled much later: trace it now to find its errors.
      metrics = jax.eval_shape(self.task.metrics.empty)
      mask = jax.ShapeDtypeStruct((self.batch_size,), bool)
      batch = {**batch, "mask": mask}
      jax.eval_shape(self.eval_step, state, metrics, batch, rng, np.int32(0))
    return traced

  # Arguments of the train step, on the devices.

  def init_progress(self, step: int) -> steps.Progress:
    """Returns the progress before the steps that follow a step."""
    values = jax.device_get(steps.init_progress(self.task, step))
    if self.config.mesh.per_replica:
      return self.strategy.distribute_values_from_function(lambda _: values)
    return self.replicate(values)

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
    return self.replicate(key)

  def replicate(self, tree: Any) -> Any:
    """Returns a tree of arrays, whole on every device.

    Args:
      tree: Arrays that are the same in all processes. They are not compared, so
        that no process waits for another one.
    """
    replicated = jax.sharding.NamedSharding(self.strategy.mesh, P())
    return jax.tree.map(
      lambda x: mesh_lib.put(x, replicated, compare=False), tree
    )

  # The data.

  def open_train_batches(self) -> Any:
    """Returns an iterator over the training batches, a context manager."""
    if self.task.train_batches is not None:
      return Stream(
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
        batches, mask=None, spec=self._batch_specs
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
      spec=self._batch_specs,
    )

  def _rows(self) -> Sequence[int]:
    """Returns the rows of a batch that this process reads."""
    return sharding.pipeline_rows(self.strategy.mesh, self.batch_size)
