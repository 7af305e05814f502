"""Models of images: a small convolutional network, and ResNet-50.

ResNet-50 is version 1.5. Sources: He et al., "Deep Residual Learning for Image
Recognition", 2016 (arXiv:1512.03385). Version 1.5 has the stride of a block in
its 3x3 convolution instead of the first 1x1 convolution. The initial values
follow Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677).
"""

from __future__ import annotations

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from flaxshard.core import checks
from flaxshard.core.policy import Policy

_he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


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
    >>> import flaxshard as fs, jax, jax.numpy as jnp
    >>> model = fs.models.CNN(num_classes=10)
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
    _check(inputs)
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
      x = max_pool(nn.relu(x), 2, stride=2)
    x = x.reshape(x.shape[0], -1)
    x = nn.relu(nn.Dense(self.dense, name="dense", **dtypes)(x))
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    logits = nn.Dense(self.num_classes, name="head", **dtypes)(x)
    return logits.astype(self.policy.output_dtype)


class Bottleneck(nn.Module):
  """A residual block: 1x1, 3x3 and 1x1 convolutions around a shortcut.

  Attributes:
    features: Number of channels of the first two convolutions; the output has
      four times as many.
    stride: Stride of the 3x3 convolution and of the shortcut.
    conv: Creates a convolution.
    norm: Creates a normalization layer.
  """

  features: int
  stride: int
  conv: Any
  norm: Any

  @nn.compact
  def __call__(self, inputs: jax.Array) -> jax.Array:
    """Maps [batch, h, w, c] to [batch, h / stride, w / stride, 4 features]."""
    x = self.conv(self.features, (1, 1))(inputs)
    x = nn.relu(self.norm()(x))
    x = self.conv(self.features, (3, 3), self.stride, padding=1)(x)
    x = nn.relu(self.norm()(x))
    x = self.conv(4 * self.features, (1, 1))(x)
    # Scale 0: the block starts as its shortcut (Goyal et al., section 5.1).
    x = self.norm(scale_init=nn.initializers.zeros)(x)
    # A projection only where the shape changes: shortcut "B" of the paper.
    shortcut = inputs
    if shortcut.shape != x.shape:
      shortcut = self.conv(
        4 * self.features, (1, 1), self.stride, name="shortcut_conv"
      )(shortcut)
      shortcut = self.norm(name="shortcut_norm")(shortcut)
    return nn.relu(x + shortcut)


class ResNet(nn.Module):
  """ResNet with bottleneck blocks; the defaults are ResNet-50.

  Batch statistics are float32 in every policy, in the collection
  `"batch_stats"`. Under `jit` they are statistics of the global batch, for any
  sharding of the batch.

  Attributes:
    num_classes: Number of logits.
    policy: Precision policy.
    stage_sizes: Number of blocks in each stage. Every stage but the first
      halves height and width and doubles the channels.
    width: Number of channels after the stem.

  Example:
    >>> import flaxshard as fs, jax, jax.numpy as jnp
    >>> model = fs.models.ResNet(num_classes=10, stage_sizes=(1, 1), width=8)
    >>> x = jnp.zeros((2, 32, 32, 3))
    >>> variables = jax.jit(model.init)(jax.random.key(0), x)
    >>> apply = jax.jit(lambda variables, x: model.apply(
    ...     variables, x, train=True, mutable=["batch_stats"]))
    >>> logits, updated = apply(variables, x)
    >>> logits.shape, sorted(updated)
    ((2, 10), ['batch_stats'])
  """

  num_classes: int
  policy: Policy = Policy()
  stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
  width: int = 64

  @nn.compact
  def __call__(self, inputs: jax.Array, train: bool = False) -> jax.Array:
    """Computes logits.

    Args:
      inputs: Float images, [batch, height, width, 3].
      train: Whether to normalize by the statistics of the batch and to update
        the running statistics; needs `mutable=["batch_stats"]`.

    Returns:
      Logits, float32 [batch, num_classes].

    Raises:
      ValueError: The inputs do not have four dimensions.
    """
    _check(inputs)
    dtypes = self.policy.dtypes
    # Explicit padding: with a stride, "SAME" pads even sizes on one side only.
    conv: Any = functools.partial(
      nn.Conv,
      use_bias=False,  # BatchNorm subtracts any bias again
      padding=0,
      kernel_init=_he_normal,
      **dtypes,
    )
    norm = functools.partial(
      nn.BatchNorm,
      use_running_average=not train,
      momentum=0.9,
      epsilon=1e-5,
      dtype=self.policy.compute_dtype,
      param_dtype=jnp.float32,
    )
    x = conv(self.width, (7, 7), 2, padding=3, name="stem_conv")(inputs)
    x = nn.relu(norm(name="stem_norm")(x))
    x = max_pool(x, 3, stride=2, padding=1)
    for stage, blocks in enumerate(self.stage_sizes):
      for block in range(blocks):
        x = Bottleneck(
          features=self.width * 2**stage,
          stride=2 if stage > 0 and block == 0 else 1,
          conv=conv,
          norm=norm,
          name=f"stage{stage}_block{block}",
        )(x)
    x = jnp.mean(x, axis=(1, 2))
    logits = nn.Dense(
      self.num_classes,
      kernel_init=nn.initializers.normal(0.01),
      name="head",
      **dtypes,
    )(x)
    return logits.astype(self.policy.output_dtype)


def _check(inputs: jax.Array) -> None:
  """Raises a ValueError if inputs are no batch of images."""
  # Flax's Conv treats an input of three dimensions as one unbatched image.
  if inputs.ndim != 4:
    raise ValueError(
      "inputs must have shape [batch, height, width, channels], "
      f"got {inputs.shape}."
    )


def max_pool(
  x: jax.Array, window: int, *, stride: int, padding: int = 0
) -> jax.Array:
  """Returns the maxima of square windows, as `flax.linen.max_pool`.

  XLA gathers the whole batch on every device for the gradient of Flax's
  max_pool (select-and-scatter) in float16. Here the maxima are elementwise. As
  in Flax, the first of equal values has the gradient.

  Args:
    x: Images, [batch, height, width, channels].
    window: Height and width of the windows.
    stride: Distance between windows.
    padding: Pixels added on each side, which are no maximum.

  Example:
    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), 2, stride=2).ravel()
    Array([ 5.,  7., 13., 15.], dtype=float32)
  """
  sides = (padding, padding)
  x = jnp.pad(x, ((0, 0), sides, sides, (0, 0)), constant_values=-jnp.inf)
  batch, height, width, channels = x.shape
  # From the first pixel of the first window to that of the last one.
  rows = (height - window) // stride * stride + 1
  columns = (width - window) // stride * stride + 1
  return functools.reduce(
    _first_maximum,
    (
      jax.lax.slice(
        x,
        (0, i, j, 0),
        (batch, i + rows, j + columns, channels),
        (1, stride, stride, 1),
      )
      for i in range(window)
      for j in range(window)
    ),
  )


def _first_maximum(x: jax.Array, y: jax.Array) -> jax.Array:
  # jnp.maximum divides the gradient among equal values. NaN is kept.
  return jnp.where((y > x) | jnp.isnan(y), y, x)
