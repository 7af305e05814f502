"""ResNet-50, version 1.5.

Sources: He et al., "Deep Residual Learning for Image Recognition", 2016
(arXiv:1512.03385). Version 1.5 has the stride of a block in its 3x3
convolution instead of the first 1x1 convolution. The initial values follow
Goyal et al., "Accurate, Large Minibatch SGD", 2017 (arXiv:1706.02677).
"""

from __future__ import annotations

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from flaxshard.core.policy import Policy
from flaxshard.models import images

_he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


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
    >>> model = ResNet(num_classes=10, stage_sizes=(1, 1), width=8)
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
    images.check(inputs)
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
    x = images.max_pool(x, 3, stride=2, padding=1)
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
