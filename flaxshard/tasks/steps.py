"""The train step of a task, and its evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple, TYPE_CHECKING

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.replicas import values as values_lib
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import apply
from flaxshard.tasks.task import AdaptedTask
from flaxshard.tasks.task import Batch

if TYPE_CHECKING:
  from flaxshard.train.setup import Setup


class Progress(NamedTuple):
  """Results of the steps since the last row of metrics.

  Attributes:
    step: int32 scalar, number of batches consumed. It is counted on the
      devices, where no step waits for it.
    metrics: Metrics of the applied steps. A skipped step has no finite loss.
    bad_step: int32 scalar, the first applied step with a non-finite loss, or 0.
  """

  step: jax.Array
  metrics: clu_metrics.Collection
  bad_step: jax.Array


def init_progress(task: AdaptedTask, step: int = 0) -> Progress:
  """Returns the progress before the steps that follow a step.

  Args:
    task: The task.
    step: Number of batches consumed.
  """
  return Progress(
    step=jnp.int32(step),
    metrics=task.metrics.empty(),
    bad_step=jnp.zeros((), jnp.int32),
  )


def train_step(
  task: AdaptedTask,
  state: TrainState,
  progress: Progress,
  batch: Batch,
  rng: jax.Array,
) -> tuple[TrainState, Progress]:
  """Takes one step on a batch.

  Args:
    task: The task.
    state: The train state.
    progress: The progress so far.
    batch: Arrays `[batch, ...]` by name.
    rng: The PRNG key of the run. The step and the replica are folded into it.

  Returns:
    The next state and progress.
  """
  step = progress.step + 1

  def loss_fn(params: Any) -> tuple[jax.Array, Any]:
    rngs = apply.Rngs(jax.random.fold_in(apply.fold_in_replica(rng), step))
    return task(state, params, batch, rngs, True)

  (loss, aux), grads = state.value_and_grad(loss_fn, has_aux=True)
  new_state = state.apply_gradients(grads=grads, **aux.collections)

  applied = new_state.step != state.step
  before = state.wrapper_states.get("accumulate")
  if before is not None:
    # A batch whose gradients are only accumulated is used, too.
    after = new_state.wrapper_states["accumulate"]
    applied |= after.num_batches != before.num_batches
  # A skipped step has no finite loss.
  of_batch = task.metrics.single_from_model_output(**aux.metrics)
  metrics = jax.tree.map(
    lambda new, old: jnp.where(applied, new, old),
    progress.metrics.merge(of_batch),
    progress.metrics,
  )
  # Only the first bad step: later ones have parameters broken by it.
  is_bad = applied & ~jnp.isfinite(loss) & (progress.bad_step == 0)
  bad_step = jnp.where(is_bad, step, progress.bad_step)
  return new_state, Progress(step, metrics, bad_step)


def combine_replicas(progress: Progress) -> Progress:
  """Combines the progress of all replicas.

  Args:
    progress: `PerReplica` of arrays.

  Returns:
    The summed metrics, and the first bad step of any replica.
  """
  # Takes the arrays `[replicas, ...]` out of the `PerReplica`s.
  rows: Progress = jax.tree.map(
    lambda x: jnp.asarray(x.value), progress, is_leaf=values_lib.is_per_replica
  )
  is_bad = rows.bad_step > 0  # 0 means no bad step
  largest = np.iinfo(np.int32).max
  first = jnp.min(rows.bad_step, initial=largest, where=is_bad)
  return Progress(
    step=rows.step[0],
    metrics=rows.metrics.reduce(),
    bad_step=jnp.where(is_bad.any(), first, 0),
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Evaluation:
  """Argument of `Task.evaluate`: an evaluation of a state.

  Attributes:
    setup: What the training loop has set up from the config.
    state: The train state. Of replicas that differ, it is the first one.
    step: The step that was just taken.
    rng: A PRNG key, the same at every evaluation of a run.
  """

  setup: Setup
  state: TrainState
  step: int
  rng: jax.Array

  @property
  def apply_fn(self) -> apply.Apply:
    """Applies the model in evaluation mode; see `Apply`."""
    return apply.apply_in(self.state, train=False, rngs=apply.Rngs(self.rng))

  def batches(self) -> Iterator[Batch]:
    """Iterates over the evaluation batches, on the devices.

    `batch["mask"]`, bool `[batch]`, is False for padding.

    Raises:
      ValueError: There is no evaluation data.
    """
    return self.setup.eval_batches()

  def means(
    self, metrics: type[clu_metrics.Collection] | None = None
  ) -> dict[str, float]:
    """Returns the metrics of the loss over all evaluation batches.

    Args:
      metrics: Another collection of metrics than that of the task.

    Raises:
      ValueError: There is no evaluation data, or a metric is no number.
    """
    setup = self.setup
    cls = setup.task.metrics if metrics is None else metrics
    total = setup.replicate(cls.empty())
    for i, batch in enumerate(self.batches()):
      total = setup.eval_step(self.state, total, batch, self.rng, np.int32(i))
      if setup.strategy.waits:
        jax.block_until_ready(total)
    # Read first: on the devices, each division would be a program of its own.
    values = jax.device_get(total).compute()
    return check_numbers(f"{setup.task.name}.metrics", values)

  def collect(self, function: Callable[..., Any]) -> Any:
    """Returns what a function returns for all evaluation examples.

    Args:
      function: `function(apply_fn, params, batch)` returns a tree of arrays
        `[batch, ...]`. It is compiled once, if every evaluation passes the same
        function: one of a module, or a method of the task, such as `predict`.

    Returns:
      The tree, with NumPy arrays `[examples, ...]` of the examples of all
      processes, in their order and without padding.

    Raises:
      ValueError: There is no evaluation data.
    """
    apply_fn, params = self.apply_fn, self.state.params
    # Whole in every process, which may hold some of the rows only.
    replicated = jax.sharding.NamedSharding(self.setup.strategy.mesh, jax.P())
    jitted = _jit_with_mask(function, replicated)
    parts = []
    for batch in self.batches():
      rows, mask = jax.device_get(jitted(apply_fn, params, batch))
      parts.append(jax.tree.map(lambda x, mask=mask: x[mask], rows))
    return jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


# A bound method is a new object at each access, so that jax.jit alone would
# compile it at every evaluation. Few, because a function may hold arrays.
@functools.lru_cache(maxsize=4)
def _jit_with_mask(
  function: Callable[..., Any], sharding: jax.sharding.Sharding
) -> Callable[..., Any]:
  """Returns a jitted function that also returns the mask of its batch."""

  def call(apply_fn: Any, params: Any, batch: Any) -> Any:
    outputs = jax.tree.map(jnp.asarray, function(apply_fn, params, batch))
    return outputs, batch["mask"]

  return jax.jit(call, out_shardings=sharding)


def eval_step(
  task: AdaptedTask,
  state: TrainState,
  metrics: Any,
  batch: Batch,
  rng: jax.Array,
  index: Any,
  *,
  is_padded: bool = False,
) -> Any:
  """Merges the metrics of one evaluation batch into `metrics`.

  Args:
    task: The task.
    state: The train state.
    metrics: The metrics so far, of the task or of another collection.
    batch: As in `train_step`, with a bool `mask` `[batch]` that is False for
      padding.
    rng: The PRNG key of evaluations.
    index: The number of the batch, which is folded into the key.
    is_padded: Whether the last batch has padding; then means over a batch are
      warned of.

  Returns:
    The merged metrics.
  """
  rngs = apply.Rngs(jax.random.fold_in(rng, index))
  _, aux = task(state, state.params, batch, rngs, False)
  scalars = [name for name, x in aux.metrics.items() if not jnp.shape(x)]
  if is_padded and scalars:
    checks.warn(
      f"{task.name}.loss: Aux.metrics has scalars: {', '.join(scalars)}. The "
      "evaluation examples are no multiple of config.batch_size="
      f"{batch['mask'].size}, and the padding of the last batch counts in "
      "them. Return arrays [batch]: the metrics take their mean."
    )
  # The task may have a mask of its own, say of tokens.
  values = {"mask": batch["mask"], **aux.metrics}
  return metrics.merge(type(metrics).single_from_model_output(**values))


def evaluate(
  setup: Setup, state: TrainState, step: int = 0
) -> dict[str, float]:
  """Returns the metrics of the task's evaluation, as `eval_<name>`.

  Args:
    setup: The setup of the config.
    state: The train state.
    step: The step just taken.

  Raises:
    ValueError, TypeError: The task does not return numbers by name, or not the
      metric `config.best_metric`.
  """
  config, task = setup.config, setup.task
  rng = jax.random.fold_in(jax.random.key(config.seed), 2**31 - 1)
  evaluation = Evaluation(
    setup=setup,
    # A checkpoint saves replica 0 as well, if groups of replicas differ.
    state=replica_groups.of_first_replica(
      state.replace(params=state.eval_params)
    ),
    step=step,
    rng=setup.replicate(rng),
  )
  if task.evaluate is None:
    values = evaluation.means() if setup.num_eval_examples else {}
  else:
    values = check_numbers(f"{task.name}.evaluate", task.evaluate(evaluation))
    # Other code may compute another value in each process.
    values = multihost.exchange(values)[0]
  metrics = {f"eval_{name}": value for name, value in values.items()}
  _check_names(config, metrics)
  return metrics


def check_metrics(setup: Setup, state: TrainState | None = None) -> None:
  """Raises if the evaluation will not have the metrics that a config names.

  Args:
    setup: The setup of the config.
    state: The state to evaluate if a task with an `evaluate` of its own may not
      have a metric; None: that is not known yet.

  Raises:
    ValueError: There is no such metric.
  """
  config, task = setup.config, setup.task
  names = []
  if setup.num_eval_examples:
    fields = vars(task.metrics).get("__annotations__", {})
    names = [f"eval_{name}" for name in fields]
  # A collection may compute other numbers than those of its fields.
  computes_fields = task.metrics.compute is clu_metrics.Collection.compute
  if task.evaluate is None and (computes_fields or not names):
    _check_names(config, names)
  elif state is not None and not (
    {config.best_metric, config.early_stopping.metric} <= {"none", *names}
  ):
    evaluate(setup, state)


def _check_names(config: Any, names: Iterable[str]) -> None:
  """Raises if a field names a metric that the evaluation does not have."""
  for field, metric in (
    ("config.best_metric", config.best_metric),
    ("config.early_stopping.metric", config.early_stopping.metric),
  ):
    if metric not in ("none", *names):
      raise ValueError(
        f"{field}={metric!r} is not a metric of the evaluation, which has "
        f"{', '.join(names) or 'no data and no metric'}."
        f"{checks.did_you_mean(metric, names)}"
      )


def check_numbers(where: str, values: Any) -> dict[str, float]:
  """Returns metrics as Python numbers.

  Args:
    where: The method that has returned them, for errors.
    values: Numbers or scalar arrays by name.

  Raises:
    ValueError: They are no dict, or a value is no number.
  """
  if not isinstance(values, Mapping):
    raise ValueError(
      f"{where} must be numbers by name, got {checks.describe(values)}."
    )
  numbers = {}
  for name, value in values.items():
    try:
      numbers[name] = float(np.asarray(value).item())
    except (TypeError, ValueError) as e:
      raise ValueError(
        f"{where}: {name} must be a number, got {checks.describe(value)}."
      ) from e
  return numbers
