"""The task of predicting each next token of a text."""

# No `from __future__ import annotations`: clu's Collection needs the types of
# its fields, not strings.
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flaxshard.core import checks
from flaxshard.data import examples as examples_lib
from flaxshard.data import sources
from flaxshard.tasks import classification
from flaxshard.tasks import task as task_lib


class LanguageModeling:
  """Softmax cross-entropy of the logits of the next token.

  Examples have `inputs`, tokens that the model takes, and the next tokens as
  integer `labels`, both `[length]`. With `weights`, `[length]`, the loss of a
  train step is a weighted mean over tokens; the weight of padding is 0. Metrics
  are the means of `loss` (nats per token) and `accuracy` over all tokens whose
  weight is not 0.

  Args:
    num_classes: The size of the vocabulary. A config gives it the number of
      classes of the data.

  Raises:
    ValueError: `num_classes` is not positive.
  """

  metrics = classification.Metrics

  def __init__(self, num_classes: int | None = None):
    self._num_classes = checks.integer("num_classes", num_classes, minimum=1)

  def loss(
    self,
    apply_fn: task_lib.Apply,
    params: Any,
    batch: task_lib.Batch,
    rngs: Mapping[str, jax.Array],
    train: bool,
  ) -> tuple[jax.Array, task_lib.Aux]:
    """Returns the mean cross-entropy of the tokens."""
    logits, collections = apply_fn(params, batch["inputs"], rngs=rngs)
    values = classification.compare(logits, batch["labels"])
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

  def collate(self, examples: Sequence[sources.Example]) -> sources.Example:
    """Stacks examples, and checks their labels."""
    batch = examples_lib.stack(examples)
    labels = batch.get("labels")
    if labels is not None and "weights" in batch:
      # Labels of padding may be any number, and are replaced by 0.
      is_token = np.asarray(batch["weights"]) != 0
      labels = batch["labels"] = np.where(is_token, labels, 0)
    classification.check_labels("config.data", labels, self._num_classes)
    return batch
