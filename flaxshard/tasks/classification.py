"""The tasks of predicting a class for each label, and the next token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.core import checks
from flaxshard.data import sources
from flaxshard.tasks import task as task_lib
from flaxshard.tasks.apply import Apply
from flaxshard.tasks.steps import Evaluation

_mean = clu_metrics.Average.from_output

# Means over labels, without those where `mask` is False.
_MEANS = {"loss": _mean("loss"), "accuracy": _mean("correct")}
Metrics = clu_metrics.Collection.create(**_MEANS)
# And how many of the model's outputs are probabilities.
EvalMetrics = clu_metrics.Collection.create(
  **_MEANS, probabilities=_mean("sums_to_one")
)


class Classification:
  """Softmax cross-entropy of the model's logits and integer labels.

  Examples have `inputs` and integer `labels`, of any shape. The model takes the
  inputs and returns logits of the shape of the labels and one more dimension,
  the classes. Metrics are the means of `loss` and `accuracy` over all labels.

  With `weights`, of the shape of the labels, the loss of a train step is a
  weighted mean. The weight of padding is 0: metrics leave it out, and its
  labels may be any numbers.

  Args:
    num_classes: Labels are in `[0, num_classes)`. A config gives it the number
      of classes of the data.

  Raises:
    ValueError: `num_classes` is not positive.
  """

  metrics = Metrics

  def __init__(self, num_classes: int | None = None):
    self._num_classes = checks.integer("num_classes", num_classes, minimum=1)

  def loss(
    self,
    apply_fn: Apply,
    params: Any,
    batch: task_lib.Batch,
    rngs: Mapping[str, jax.Array],
    train: bool,
  ) -> tuple[jax.Array, task_lib.Aux]:
    """Returns the mean cross-entropy."""
    logits, collections = apply_fn(params, batch["inputs"], rngs=rngs)
    values = _compare(logits, batch["labels"])
    if not train:
      # Wide enough for probabilities in bfloat16.
      outputs = logits.astype(jnp.float32)
      is_one = jnp.abs(outputs.sum(-1) - 1) < 0.01
      is_probability = is_one & (outputs.min(-1) >= 0)
      values["sums_to_one"] = is_probability.astype(jnp.float32)
    losses = values["loss"]
    if "weights" not in batch:
      return losses.mean(), task_lib.Aux(values, collections)
    weights = batch["weights"].astype(jnp.float32)
    # A batch of padding alone has the loss 0.
    total = jnp.maximum(weights.sum(), 1e-8)
    values["mask"] = weights != 0
    if not train:
      rows = batch["mask"].reshape(-1, *[1] * (weights.ndim - 1))
      values["mask"] &= rows
    return (losses * weights).sum() / total, task_lib.Aux(values, collections)

  def evaluate(self, evaluation: Evaluation) -> dict[str, float]:
    """Returns the means; warns if the model returns probabilities."""
    if not evaluation.setup.num_eval_examples:
      return {}
    means = evaluation.means(EvalMetrics)
    # All of them: logits do not come to exactly 1 by chance.
    if means.pop("probabilities") == 1 and self._num_classes > 1:
      checks.warn(
        "config.model returns probabilities: all its outputs are positive and "
        "sum to 1. The loss takes the softmax by itself: return logits, "
        "without a softmax, or it hardly trains."
      )
    return means

  def collate(self, examples: Sequence[sources.Example]) -> sources.Example:
    """Stacks examples, and checks their labels."""
    batch = sources.stack(examples)
    if "labels" not in batch:
      raise ValueError("config.data: examples must have 'labels'.")
    labels = np.asarray(batch["labels"])
    if "weights" in batch:
      is_real = np.asarray(batch["weights"]) != 0
      labels = batch["labels"] = np.where(is_real, labels, 0)
    if not np.issubdtype(labels.dtype, np.integer):
      raise ValueError(
        f"config.data: labels must be integers, got {labels.dtype}."
      )
    # On the device, a label out of range gives a NaN or is taken for another
    # class.
    if labels.min() < 0 or labels.max() >= self._num_classes:
      raise ValueError(
        f"config.data: labels must lie in [0, {self._num_classes}), got "
        f"{labels.min()} to {labels.max()}."
      )
    return batch


class LanguageModeling:
  """Softmax cross-entropy of the logits of the next token.

  `Classification` whose `inputs` are the tokens that the model takes, and whose
  `labels` are the next tokens, both `[length]`. `loss` is in nats per token.

  Args:
    num_classes: The size of the vocabulary. A config gives it the number of
      classes of the data.

  Raises:
    ValueError: `num_classes` is not positive.
  """

  metrics = Metrics

  # Without `evaluate`: no language model returns probabilities by mistake.
  __init__ = Classification.__init__
  loss = Classification.loss
  collate = Classification.collate


def _compare(logits: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
  """Returns the values of `Metrics` for each label, in float32."""
  shape = getattr(logits, "shape", None)
  if not shape or shape[:-1] != labels.shape:
    raise ValueError(
      "the model must return logits with the shape of the labels and one more "
      "dimension, the classes or the vocabulary; got "
      f"{checks.describe(logits)} for labels {labels.shape}."
    )
  return {
    # In float32 with every precision policy.
    "loss": optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), labels
    ),
    "correct": (logits.argmax(-1) == labels).astype(jnp.float32),
  }
