"""Regression of the progression of diabetes, with its uncertainty.

The task of `configs/regression.py`. The model predicts the mean and the
variance of a normal distribution.
"""

# No `from __future__ import annotations`: clu's Collection needs the types of
# its fields, not strings.
from typing import Any

from clu import metrics as clu_metrics
import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import flaxshard as fs


class MLP(nn.Module):
  """Predicts the mean and the log variance of a number.

  Attributes:
    hidden: Width of each hidden layer.
    dropout: Dropout rate of the hidden layers.
    dtype: Dtype of the computation.
  """

  hidden: tuple[int, ...] = (64, 64)
  dropout: float = 0.2
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, deterministic: bool
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the log variance, both float32 `[batch]`."""
    linear = nn.Dense(1, dtype=self.dtype)(x)
    for hidden in self.hidden:
      x = nn.relu(nn.Dense(hidden, dtype=self.dtype)(x))
      x = nn.Dropout(self.dropout)(x, deterministic=deterministic)
    out = nn.Dense(2, dtype=self.dtype, kernel_init=nn.initializers.zeros)(x)
    out = out.astype(jnp.float32)
    return linear[:, 0].astype(jnp.float32) + out[:, 0], out[:, 1]


@flax.struct.dataclass
class R2(clu_metrics.Metric):
  """The share of the variance of the targets that predictions explain."""

  count: jax.Array
  total: jax.Array
  total_of_squares: jax.Array
  squared_errors: jax.Array

  @classmethod
  def empty(cls) -> "R2":
    """Returns the metric of no example."""
    return cls(*jnp.zeros(4))

  @classmethod
  def from_model_output(
    cls,
    target: jax.Array,
    error: jax.Array,
    mask: jax.Array | None = None,
    **_: Any,
  ) -> "R2":
    """Returns the metric of a batch; `mask` is False for padding."""
    keep = jnp.ones_like(error) if mask is None else mask.astype(error.dtype)
    return cls(
      keep.sum(),
      (keep * target).sum(),
      (keep * target**2).sum(),
      (keep * error**2).sum(),
    )

  def merge(self, other: "R2") -> "R2":
    """Returns the metric of the examples of both."""
    return jax.tree.map(jnp.add, self, other)

  def compute(self) -> jax.Array:
    """Returns 1 for perfect predictions, 0 for those of the mean."""
    mean = self.total / self.count
    variance = self.total_of_squares / self.count - mean**2
    return 1 - self.squared_errors / self.count / variance


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  """Means over patients, and what predictions explain.

  `loss` is the negative log likelihood of the standardized target, in nats.
  """

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]
  r2: R2


class Task:
  """Predicts how far diabetes has progressed a year after ten measurements."""

  metrics = Metrics

  def load_data(self) -> fs.data.Splits:
    """Returns scikit-learn's diabetes data; every fourth patient is held out.

    The measurements and the target have mean 0 and variance 1 in training.

    References:
      Efron, Hastie, Johnstone and Tibshirani, "Least Angle Regression", 2004.
    """
    from sklearn import datasets

    inputs, target = datasets.load_diabetes(return_X_y=True, scaled=False)
    is_eval = np.arange(len(target)) % 4 == 0
    columns = np.column_stack([inputs, target])
    known = columns[~is_eval]
    columns = (columns - known.mean(axis=0)) / known.std(axis=0)

    def to_source(rows: np.ndarray) -> fs.data.Arrays:
      rows = rows.astype(np.float32)
      return fs.data.Arrays(measurements=rows[:, :-1], target=rows[:, -1])

    return fs.data.Splits(
      train=to_source(columns[~is_eval]), eval=to_source(columns[is_eval])
    )

  def create_model(self, config: dict[str, Any], dtype: Any) -> MLP:
    """Returns the model; `config` is `config.model`."""
    return MLP(**config, dtype=dtype)

  def init_inputs(self, batch: Any) -> tuple[jax.Array]:
    """Returns the arguments of the model's call."""
    return (batch["measurements"],)

  def loss(
    self, apply_fn: Any, params: Any, batch: Any, rngs: Any, train: bool
  ) -> tuple[jax.Array, fs.tasks.Aux]:
    """Returns the mean negative log likelihood."""
    (mean, log_var), _ = apply_fn(params, batch["measurements"])
    error = batch["target"] - mean
    # Keeps exp(-log_var) small, which weights the squared error.
    log_var = jnp.clip(log_var, -5.0, 5.0)
    losses = (jnp.log(2 * jnp.pi) + log_var + error**2 * jnp.exp(-log_var)) / 2
    return losses.mean(), fs.tasks.Aux(
      metrics={"loss": losses, "target": batch["target"], "error": error}
    )
