"""A convolutional network for small images."""

from __future__ import annotations

from flax import linen as nn
import jax

from flaxshard.core import checks
from flaxshard.core.policy import Policy
from flaxshard.models import images


class CNN(nn.Module):
  """Convolutions with max pooling, a hidden dense layer, and logits.

  Attributes:
    num_classes: Number of logits.
    policy: Precision policy.
    features: Number of channels of each 3x3 convolution; 2x2 max pooling
      follows each convolution.
    dense: Width of the hidden dense layer.
    dropout: Dropout rate before the logits, in [0, 1). Dropout is active in
      training only and uses the random stream `"dropout"`.

  Example:
    >>> import jax.numpy as jnp
    >>> model = CNN(num_classes=10)
    >>> x = jnp.zeros((2, 8, 8, 1))
    >>> model.apply(model.init(jax.random.key(0), x), x).shape
    (2, 10)
  """

  num_classes: int
  policy: Policy = Policy()
  features: tuple[int, ...] = (32, 64)
  dense: int = 128
  dropout: float = 0.0

  @nn.compact
  def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
    """Computes logits.

    Args:
      inputs: Float images, [batch, height, width, channels].
      train: Whether dropout is active.

    Returns:
      Logits, float32 [batch, num_classes].

    Raises:
      TypeError: `dropout` is no number.
      ValueError: `dropout` is out of range, the inputs do not have four
        dimensions, or are too small for the pooling.
    """
    # Flax's Dropout accepts any number, and turns 1.5 into wrong values.
    checks.number("dropout", self.dropout, minimum=0, below=1)
    images.check(inputs)
    # A pooling of less than one window returns an empty image, or an error.
    smallest = 2 ** len(self.features)
    if min(inputs.shape[1:3]) < smallest:
      raise ValueError(
        f"inputs must be at least {smallest}x{smallest} pixels for "
        f"{len(self.features)} poolings (features={self.features}), "
        f"got shape {inputs.shape}."
      )
    dtypes = self.policy.dtypes
    x = inputs
    for i, features in enumerate(self.features):
      x = nn.Conv(features, (3, 3), name=f"conv{i}", **dtypes)(x)
      x = images.max_pool(nn.relu(x), 2, stride=2)
    x = x.reshape(x.shape[0], -1)
    x = nn.relu(nn.Dense(self.dense, name="dense", **dtypes)(x))
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    logits = nn.Dense(self.num_classes, name="head", **dtypes)(x)
    return logits.astype(self.policy.output_dtype)
