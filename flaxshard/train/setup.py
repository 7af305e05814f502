"""Builds what a run needs from its config: devices, data, state and steps.

Nothing is written and no step is compiled here, so that an invalid config is
reported within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard import data
from flaxshard import models
from flaxshard import wrappers as wrappers_lib
from flaxshard.core import checks
from flaxshard.core import optimizer
from flaxshard.core import trees
from flaxshard.core.policy import Policy
from flaxshard.data import distribute
from flaxshard.data import sharding
from flaxshard.partitioning import rules as rules_lib
from flaxshard.partitioning import specs as specs_lib
from flaxshard.state import create as create_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.strategy.strategy import Strategy
from flaxshard.train import devices
from flaxshard.train import steps

_log = logging.getLogger(__name__)

P = jax.sharding.PartitionSpec
TrainStep = Callable[..., tuple[TrainState, steps.Progress, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Setup:
  """Everything that a run needs, built from its config.

  Attributes:
    config: The checked config.
    strategy: The devices.
    splits: The data.
    batch_specs: How each array of a batch is split.
    schedule: The learning rate, as a function of the applied updates.
    abstract_state: The state with a `jax.ShapeDtypeStruct` for every array.
    create_state: Returns a new state.
    zero_progress: The progress before any step, as NumPy arrays.
    train_step: `train_step(state, progress, batch, rng, step)` returns the next
      state, progress and number of the step. The given state and progress are
      donated.
    lowered_train_step: The same step, traced and ready to be compiled.
    eval_step: `eval_step(state, metrics, batch)` returns the merged metrics.
    read_progress: Waits for the progress of a step and returns that of all
      replicas combined, as NumPy arrays.
  """

  config: Any
  strategy: Strategy
  splits: data.Splits
  batch_specs: Mapping[str, P]
  schedule: optax.Schedule
  abstract_state: TrainState
  create_state: Callable[[], TrainState]
  zero_progress: steps.Progress
  train_step: TrainStep
  lowered_train_step: jax.stages.Lowered
  eval_step: Callable[..., steps.EvalMetrics]
  read_progress: Callable[[Any], steps.Progress]

  def train_batches(self) -> distribute.DistributedDataset:
    """Returns the endless training batches, on the devices."""
    return self.strategy.distribute_dataset(
      data.train_iterator(self.splits, seed=self.config.seed, **self._rows()),
      # Training batches are never padded: the data repeats.
      mask=None,
      spec=self.batch_specs,
    )

  def evaluate(self, state: TrainState) -> dict[str, float]:
    """Returns the means of the metrics over the evaluation data."""
    metrics = self.replicate(steps.EvalMetrics.empty())
    batches = self.strategy.distribute_dataset(
      data.eval_batches(self.splits, **self._rows()), spec=self.batch_specs
    )
    # A checkpoint saves replica 0 as well, if groups of replicas differ.
    state = replica_groups.copy_first_replica(state)
    with iter(batches) as iterator:
      for batch in iterator:
        metrics = self.eval_step(state, metrics, batch)
    # Read first: on the devices, each division would be a program of its own.
    means = {k: float(v) for k, v in jax.device_get(metrics).compute().items()}
    # All of them: logits do not come to exactly 1 by chance.
    if means.pop("probabilities") == 1 and self.splits.num_classes > 1:
      checks.warn(
        f"config.model ({self.config.model.name!r}) returns probabilities: all "
        "its outputs are positive and sum to 1. The loss takes the softmax by "
        "itself: return logits, without a softmax, or it hardly trains.",
      )
    return {f"eval_{k}": v for k, v in means.items()}

  def init_progress(self) -> steps.Progress:
    """Returns the progress before any step, on the devices."""
    return _give_replicas(
      self.strategy, self.zero_progress, self.config.mesh.per_replica
    )

  def init_step(self, step: int) -> Any:
    """Returns the number of the first step, on the devices."""
    return _give_replicas(
      self.strategy, np.int32(step), self.config.mesh.per_replica
    )

  def replicate(self, tree: Any) -> Any:
    """Returns a tree of arrays, whole on every device."""
    return devices.replicate(self.strategy, tree)

  def _rows(self) -> dict[str, Any]:
    """Returns the size of a batch, and the rows that this process reads."""
    size = self.config.batch_size
    return {
      "batch_size": size,
      "rows": sharding.pipeline_rows(self.strategy.mesh, size),
    }


def create_setup(config: Any, strategy: Strategy) -> Setup:
  """Builds everything that a run needs.

  Args:
    config: A checked config.
    strategy: Its strategy; see `devices.create_strategy`.

  Raises:
    ValueError, TypeError: The data, the model, the optimizer, the rules and the
      wrappers do not fit each other. The message names the field.
    ImportError: A package that the config needs is not installed.
  """
  splits = data.load(config.data)
  example = {k: np.asarray(x) for k, x in splits.eval[0].items()}
  specs = devices.batch_specs(
    config.mesh.split, config.batch_size, strategy, example
  )
  tx, schedule = optimizer.create(config)
  _warn_of_long_warmup(config, schedule)
  policy = Policy(config.precision)
  model_field = f"config.model ({config.model.name!r})"

  def plan_creation() -> create_lib.CreationPlan:
    model = models.create(
      config.model,
      num_classes=splits.num_classes,
      policy=policy,
      seed=config.seed,
    )
    with _errors_name_field(f"{model_field} cannot be initialized"):
      return create_lib.plan_creation(
        model,
        jax.random.key(config.seed),
        example["inputs"][None],
        tx,
        wrappers=wrappers_lib.from_config(config.wrappers),
        mesh=strategy.mesh,
        rules=rules_lib.from_config(config.mesh.rules),
      )

  state = plan_creation().abstract_state()

  def create_state() -> TrainState:
    # A new plan: that of an NNX module holds the arrays of the module, which
    # would stay in memory during a restore and the whole run.
    leaves = jax.tree.leaves(plan_creation().create_state())
    # The static fields of the traced state, or the step would compile again.
    return jax.tree.unflatten(jax.tree.structure(state), leaves)

  if policy.compute_dtype == jnp.float16:
    _check_floating_point(config.precision, state.params)

  per_replica = config.mesh.per_replica
  zero_progress = jax.device_get(steps.init_progress(state))
  # `Strategy.run` accumulates one progress per replica.
  progress = _give_replicas(strategy, zero_progress, per_replica)
  batch = _abstract_batch(strategy, specs, config.batch_size, example)
  first_step = _give_replicas(strategy, np.int32(1), per_replica)
  jitted = _jit_train_step(strategy, state, progress, first_step, per_replica)
  with _errors_name_field(
    f"{model_field} cannot be trained on config.data ({config.data.name!r})"
  ):
    lowered = jitted.lower(
      state,
      progress,
      batch,
      devices.replicate(strategy, jax.random.key(0)),
      first_step,
    )
    # Evaluation is compiled much later: trace it now to find its errors.
    batch["mask"] = np.ones(config.batch_size, bool)
    jax.eval_shape(steps.eval_step, state, steps.EvalMetrics.empty(), batch)
  return Setup(
    config=config,
    strategy=strategy,
    splits=splits,
    batch_specs=specs,
    schedule=schedule,
    abstract_state=state,
    create_state=create_state,
    zero_progress=zero_progress,
    # `Strategy.jit` waits for the results by itself.
    train_step=jitted
    if per_replica
    else devices.block_if_virtual_cpu(strategy, jitted),
    lowered_train_step=lowered,
    eval_step=devices.block_if_virtual_cpu(strategy, jax.jit(steps.eval_step)),
    read_progress=_make_progress_reader(strategy, per_replica),
  )


def _warn_of_long_warmup(config: Any, schedule: optax.Schedule) -> None:
  """Warns if the learning rate never reaches its peak.

  Not an error: a few steps of a long run are a common test of its config.
  """
  warmup_steps = config.schedule.get("warmup_steps", 0)
  # A custom schedule may mean something else by it.
  if isinstance(warmup_steps, int) and warmup_steps > config.num_train_steps:
    _log.warning(
      "config.schedule.warmup_steps=%d is longer than the run of "
      "config.num_train_steps=%d: the learning rate ends at %.3g, and does not "
      "reach config.learning_rate=%.3g",
      warmup_steps,
      config.num_train_steps,
      schedule(config.num_train_steps - 1),
      config.learning_rate,
    )


def _abstract_batch(
  strategy: Strategy,
  specs: Mapping[str, P],
  batch_size: int,
  example: Mapping[str, np.ndarray],
) -> dict[str, Any]:
  return {
    key: jax.ShapeDtypeStruct(
      (batch_size, *x.shape),
      # Without jax_enable_x64, JAX turns float64 and int64 into 32 bits.
      jax.dtypes.canonicalize_dtype(trees.dtype_of(x)),
      sharding=jax.sharding.NamedSharding(strategy.mesh, specs[key]),
    )
    for key, x in example.items()
  }


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


def _jit_train_step(
  strategy: Strategy,
  state: TrainState,
  progress: steps.Progress,
  step: Any,
  per_replica: bool,
) -> Any:
  """Returns the jitted train step, which donates the state and the progress."""
  if per_replica:
    _check_split_over_replicas(state)
    return strategy.jit(steps.counted_train_step, donate_argnums=(0, 1))
  return jax.jit(
    steps.counted_train_step,
    donate_argnums=(0, 1),
    # Without them, XLA may choose other shardings for the new state, and the
    # second step would compile again.
    out_shardings=jax.tree.map(lambda x: x.sharding, (state, progress, step)),
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


def _check_floating_point(precision: str, params: Any) -> None:
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      raise ValueError(
        f"config.precision={precision!r} needs floating-point parameters; "
        f"{trees.path_string(path)} is {leaf.dtype}."
      )


@contextlib.contextmanager
def _errors_name_field(context: str) -> Iterator[None]:
  """Prepends `context` to errors that the user's model or rules raise."""
  try:
    yield
  except specs_lib.RuleError as e:
    # The message of a RuleError begins with "rules", a field of config.mesh.
    raise ValueError(f"config.mesh.{e}") from e
  except (TypeError, ValueError, ArithmeticError, LookupError) as e:
    kind = TypeError if isinstance(e, TypeError) else ValueError
    raise kind(f"{context}: {e}") from e
