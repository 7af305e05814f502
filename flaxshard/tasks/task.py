"""The protocol of a task: the model, the loss, the metrics and the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from clu import metrics as clu_metrics
import flax
import jax

from flaxshard.state.train_state import TrainState
from flaxshard.tasks.apply import Apply

Batch = Mapping[str, jax.Array]


@flax.struct.dataclass
class Aux:
  """Metrics and collections that a loss returns beside its value.

  Attributes:
    metrics: Arrays by name: the keyword arguments of the task's
      `metrics.single_from_model_output`. An array `[batch, ...]` is averaged
      without the padding of evaluation batches.
    collections: New values of collections of the state, as `apply_fn` returned
      them. They are not used in evaluation.
  """

  metrics: Mapping[str, Any]
  collections: Mapping[str, Any] = flax.struct.field(default_factory=dict)


class Evaluation(Protocol):
  """Argument of `Task.evaluate`: an evaluation of a state.

  Attributes:
    state: The train state. Of replicas that differ, it is the first one.
    step: The step that was just taken.
    rng: A PRNG key, the same at every evaluation of a run.
    apply_fn: Applies the model in evaluation mode; see `Apply`.
  """

  state: TrainState
  step: int
  rng: jax.Array
  apply_fn: Apply

  def batches(self) -> Iterator[Batch]:
    """Iterates over the evaluation batches, on the devices.

    `batch["mask"]`, bool `[batch]`, is False for padding.
    """
    ...

  def means(
    self, metrics: type[clu_metrics.Collection] | None = None
  ) -> dict[str, float]:
    """Returns the metrics of the loss over all evaluation batches.

    Args:
      metrics: Another collection of metrics than that of the task.
    """
    ...

  def collect(self, function: Callable[..., Any]) -> Any:
    """Returns what a function returns for all evaluation examples.

    Args:
      function: `function(apply_fn, params, batch)` returns a tree of arrays
        `[batch, ...]`. It is compiled once, if every evaluation passes the same
        function: one of a module, or a method of the task, such as `predict`.

    Returns:
      The tree, with NumPy arrays `[examples, ...]` of the examples of all
      processes, in their order and without padding.
    """
    ...


class Stream(Protocol):
  """Argument of `Task.train_batches`: the state, the step and a PRNG key.

  Attributes:
    batch_size: Examples in a batch, over all replicas and processes.
    step: The number of steps taken; not 0 in a run that is resumed.
    rng: The PRNG key of the next batch. It depends on the seed and the step.
  """

  batch_size: int
  step: int
  rng: jax.Array

  def state(self) -> TrainState:
    """Returns the newest train state; of replicas that differ, the first one.

    Read it anew for each batch: the next train step deletes its arrays. Of
    several processes, all must call it.
    """
    ...


class Task(Protocol):
  """Protocol of a training task: an object with these attributes and methods.

  A task does not inherit from this class. It may also have the methods

  - `create_model(self, ...)`: Returns a Linen module, an NNX module, or a
    function of `nnx.Rngs` that makes one. It takes any of `config` (the dict
    `config.model`), `example`, `num_classes`, `policy`, `dtype`, `seed` and
    `rngs`. Without it the model is that of `config.model`.
  - `init_inputs(self, batch)`: Returns the arguments of the model's call for
    its initialization: a tuple, or `(args, kwargs)`. The default is
    `(batch["inputs"],)`.
  - `predict(self, apply_fn, params, batch)`: Returns the outputs of the model
    for an export. The default is `apply_fn(params, *init_inputs(batch))[0]`.
  - `evaluate(self, evaluation)`: Returns numbers by name; see `Evaluation`. The
    default is `evaluation.means()`.
  - `load_data(self)`: Returns `flaxshard.data.Splits`. The default loads
    `config.data`.
  - `example(self)`: Returns shapes of the arrays of an example without the
    batch dimension. A plan uses it in place of the data. It is necessary if
    there is no data, but `train_batches`.
  - `collate(self, examples)`: Makes a batch of a sequence of examples. The
    default stacks the arrays of each key.
  - `train_batches(self, stream)`: Iterates over training batches that are made
    as the run goes, such as rollouts of the newest state; see `Stream`.

  Attributes:
    metrics: The metrics of training and evaluation.
  """

  metrics: type[clu_metrics.Collection]

  def loss(
    self,
    apply_fn: Apply,
    params: Any,
    batch: Batch,
    rngs: Mapping[str, jax.Array],
    train: bool,
  ) -> tuple[jax.Array, Aux]:
    """Computes the loss of a batch.

    Args:
      apply_fn: Applies the model; see `Apply`.
      params: The parameters to differentiate.
      batch: Arrays `[batch, ...]` by name. In evaluation it has "mask", which
        is False for padding.
      rngs: A PRNG key for every stream name that is asked for.
      train: Whether this is a train step, not an evaluation.

    Returns:
      The loss, a floating-point scalar, and an `Aux`.
    """
    ...
