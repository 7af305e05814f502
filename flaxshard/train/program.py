"""Builds the state and the train step of a config from the shapes of its data.

A run and a plan both use it. Nothing is read, allocated or compiled here, and
the devices need not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.core import checks
from flaxshard.core import optimizer
from flaxshard.core import trees
from flaxshard.partitioning import mesh as mesh_lib
from flaxshard.replicas import context as replica_context
from flaxshard.replicas.values import PerReplica
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.tasks import apply
from flaxshard.tasks import load
from flaxshard.tasks.adapted import AdaptedTask
from flaxshard.train import creation as creation_lib
from flaxshard.train import devices
from flaxshard.train import steps
from flaxshard.train.ranks import Rank

_log = logging.getLogger(__name__)

P = jax.sharding.PartitionSpec

_ALONE = Rank()

# Positions in `Program.arguments`.
STATE, PROGRESS, BATCH, RNG, STEP = range(5)


@dataclasses.dataclass(frozen=True)
class Program:
  """The train step of a config, and its arguments as shapes.

  Attributes:
    config: The checked config.
    task: The task.
    strategy: The devices.
    batch_size: Examples in a batch, of this worker alone if there are several.
    batch_specs: How each array of a batch is split.
    schedule: The learning rate, as a function of the applied updates.
    create_state: Returns a new state.
    train_step: The jitted `train_step(state, progress, batch, rng, step)`. The
      given state and progress are donated.
    arguments: The arguments of `train_step`, with a `jax.ShapeDtypeStruct` for
      every array.
    notes: Warnings about the precision, which `create_state` gives.
  """

  config: Any
  task: AdaptedTask
  strategy: Strategy
  batch_size: int
  batch_specs: Mapping[str, P]
  schedule: optax.Schedule
  create_state: Callable[[], TrainState]
  train_step: Any
  arguments: tuple[Any, ...]
  notes: tuple[str, ...]

  @property
  def abstract_state(self) -> TrainState:
    """The state with a `jax.ShapeDtypeStruct` for every array."""
    state: TrainState = self.arguments[STATE]
    return state

  def trace(self) -> jax.stages.Traced:
    """Traces the train step and the evaluation; returns the traced train step.

    Raises:
      ValueError, TypeError: The model cannot be trained on the data.
    """
    config = self.config
    with creation_lib.errors_name_field(_describe_training(config, self.task)):
      traced: jax.stages.Traced = self.train_step.trace(*self.arguments)
      # Evaluation is compiled much later: trace it now to find its errors.
      eval_step = functools.partial(steps.eval_step, self.task)
      jax.eval_shape(
        eval_step,
        self.abstract_state,
        jax.eval_shape(self.task.metrics.empty),
        self._eval_batch(),
        self.arguments[RNG],
        np.int32(0),
      )
    return traced

  def scalar_metrics(self) -> list[str]:
    """Returns the names of metrics that the loss returns as scalars."""

    def metrics_of(state: TrainState, batch: Any, rng: Any) -> Any:
      rngs = apply.Rngs(rng)
      return self.task(state, state.params, batch, rngs, False)[1].metrics

    values = jax.eval_shape(
      metrics_of, self.abstract_state, self._eval_batch(), self.arguments[RNG]
    )
    return [name for name, value in values.items() if not jnp.shape(value)]

  def _eval_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    mask = jax.ShapeDtypeStruct((self.batch_size,), bool)
    return {**self.arguments[BATCH], "mask": mask}


def create_program(
  config: Any,
  strategy: Strategy,
  loaded: load.LoadedTask,
  rank: Rank = _ALONE,
) -> Program:
  """Builds the state and the train step of a config.

  Args:
    config: A checked config.
    strategy: Its strategy; see `devices.create_strategy`.
    loaded: The task, and the shapes of its data.
    rank: The worker that this process is.

  Raises:
    ValueError, TypeError: The model, the optimizer, the rules and the wrappers
      do not fit each other. The message names the field.
  """
  task, example = loaded.task, loaded.example
  batch_size = rank.share("batch_size", config.batch_size)
  specs = devices.batch_specs(config.mesh.split, batch_size, strategy, example)
  tx, schedule = optimizer.create(config)

  creation = creation_lib.plan_creation(config, strategy, loaded, tx)
  state, notes = creation.abstract_state(), tuple(creation.notes)
  # That of an NNX module holds the arrays of the module, which would stay in
  # memory during a restore and the whole run.
  del creation

  def create_state() -> TrainState:
    for note in notes:
      checks.warn(note)
    creation = creation_lib.plan_creation(config, strategy, loaded, tx)
    leaves = jax.tree.leaves(creation.create_state())
    # The static fields of the traced state, or the step would compile again.
    return jax.tree.unflatten(jax.tree.structure(state), leaves)

  per_replica = config.mesh.per_replica
  arguments = (
    state,
    _place(
      strategy,
      jax.eval_shape(functools.partial(steps.init_progress, task), state),
      per_replica,
    ),
    _abstract_batch(strategy, specs, batch_size, example),
    _place(strategy, jax.eval_shape(lambda: jax.random.key(0)), False),
    _place(strategy, jax.ShapeDtypeStruct((), jnp.int32), per_replica),
  )
  return Program(
    config=config,
    task=task,
    strategy=strategy,
    batch_size=batch_size,
    batch_specs=specs,
    schedule=schedule,
    create_state=create_state,
    train_step=_jit_train_step(task, strategy, arguments, per_replica, rank),
    arguments=arguments,
    notes=notes,
  )


def _describe_training(config: Any, task: AdaptedTask) -> str:
  model = creation_lib.describe_model(config, task)
  if not config.data:
    return f"{model} cannot be trained on the data of {task.name}"
  return f"{model} cannot be trained on config.data ({config.data.name!r})"


def _abstract_batch(
  strategy: Strategy,
  specs: Mapping[str, P],
  batch_size: int,
  example: Mapping[str, Any],
) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    key: jax.ShapeDtypeStruct(
      (batch_size, *np.shape(x)),
      # Without jax_enable_x64, JAX turns float64 and int64 into 32 bits.
      jax.dtypes.canonicalize_dtype(trees.dtype_of(x)),
      sharding=jax.sharding.NamedSharding(strategy.mesh, specs[key]),
    )
    for key, x in example.items()
  }


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
  task: AdaptedTask,
  strategy: Strategy,
  arguments: tuple[Any, ...],
  per_replica: bool,
  rank: Rank,
) -> Any:
  """Returns the jitted train step, which donates the state and the progress."""
  first_replica = rank.worker_id * strategy.num_replicas_in_sync

  # The name stands in profiles and programs. The number of the next step stays
  # on the devices, where no step waits for it.
  def counted_train_step(
    state: TrainState, progress: Any, batch: Any, rng: Any, step: Any
  ) -> Any:
    # Each worker has the random streams of its own replicas.
    with replica_context.number_from(first_replica):
      taken = steps.train_step(task, state, progress, batch, rng, step)
    return *taken, step + 1

  if per_replica:
    _check_split_over_replicas(arguments[STATE])
    return strategy.jit(counted_train_step, donate_argnums=(STATE, PROGRESS))
  results = (arguments[STATE], arguments[PROGRESS], arguments[STEP])
  return jax.jit(
    counted_train_step,
    donate_argnums=(STATE, PROGRESS),
    # Without them, XLA may choose other shardings for the new state, and the
    # second step would compile again.
    out_shardings=jax.tree.map(lambda x: x.sharding, results),
  )


def _check_split_over_replicas(state: TrainState) -> None:
  """Warns or raises if `Strategy.run` must gather what rules have split."""
  # Rules split parameters; the slots of the optimizer follow them.
  if not any(
    map(replica_groups.is_split_over_replicas, jax.tree.leaves(state.params))
  ):
    return
  note = replica_groups.describe_divergence(state)
  if note:
    raise ValueError(
      "config.mesh.rules: nothing can be split over 'replica' here. "
      f"config.wrappers: {note}"
    )
  _log.warning(
    "config.mesh.per_replica: each replica sees the whole state. What "
    "config.mesh.rules split over 'replica' is gathered for every step."
  )
