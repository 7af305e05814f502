"""The protocol of a task: the model, the loss, the metrics and the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from clu import metrics as clu_metrics
import flax
import jax

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
