"""Evaluates a train state on the evaluation data of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import functools
import json
from typing import Any, TYPE_CHECKING

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from flaxshard.core import checks
from flaxshard.core import multihost
from flaxshard.state import replica_groups
from flaxshard.state.train_state import TrainState
from flaxshard.tasks import apply
from flaxshard.tasks.task import Batch

if TYPE_CHECKING:
  from flaxshard.train.setup import Setup


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
    # Closes the thread that reads ahead.
    with self.setup.open_eval_batches() as iterator:
      yield from iterator

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
    replicated = jax.sharding.NamedSharding(self.setup.strategy.mesh, P())
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
    values = evaluation.means() if setup.has_eval_data else {}
  else:
    values = check_numbers(f"{task.name}.evaluate", task.evaluate(evaluation))
    # Other code may compute another value in each process.
    values = json.loads(multihost.exchange(json.dumps(values))[0])
  metrics = {f"eval_{name}": value for name, value in values.items()}
  _check_names(config, metrics)
  return metrics


def check_metrics(setup: Setup) -> None:
  """Raises if the evaluation will not have the metrics that a config names.

  Those of a task with an `evaluate` of its own are not known yet.

  Args:
    setup: The setup of the config.

  Raises:
    ValueError: There is no such metric.
  """
  task = setup.task
  names = [f"eval_{name}" for name in task.metric_names]
  if not setup.has_eval_data:
    names = []
  # A collection may compute other numbers than those of its fields.
  computes_fields = task.metrics.compute is clu_metrics.Collection.compute
  if task.evaluate is None and (computes_fields or not names):
    _check_names(setup.config, names)


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
    ValueError: A value is no number.
  """
  numbers = {}
  for name, value in values.items():
    try:
      numbers[name] = float(np.asarray(value).item())
    except (TypeError, ValueError) as e:
      raise ValueError(
        f"{where}: {name} must be a number, got {checks.describe(value)}."
      ) from e
  return numbers
