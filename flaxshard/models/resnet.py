"""ResNet-50, version 1.5: the stride is in the 3x3 convolution."""

from __future__ import annotations

import functools
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from flaxshard.core.policy import Policy
from flaxshard.models.fields import check_counts

_he_normal = nn.initializers.variance_scaling(2.0, "fan_out", "normal")


class Bottleneck(nn.Module):
  """A residual block: 1x1, 3x3 and 1x1 convolutions around a shortcut.

  Attributes:
    features: Channels of the inner convolutions; four times as many come out.
    stride: Of the 3x3 convolution and of the shortcut.
    conv: Makes a convolution.
    norm: Makes a normalization layer.
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
    # With a zero scale a block starts as its shortcut, which helps early steps.
    x = self.norm(scale_init=nn.initializers.zeros)(x)
    shortcut = inputs
    if shortcut.shape != x.shape:
      shortcut = self.conv(
        4 * self.features, (1, 1), self.stride, name="shortcut_conv"
      )(shortcut)
      shortcut = self.norm(name="shortcut_norm")(shortcut)
    return nn.relu(x + shortcut)


class ResNet(nn.Module):
  """ResNet with bottleneck blocks; the defaults are ResNet-50.

  Batch statistics are float32 in every policy and live in the collection
  `"batch_stats"`. Under `jit` they are those of the global batch, however it is
  sharded.

  Attributes:
    num_classes: Number of logits.
    policy: Precision policy.
    stage_sizes: Blocks in each stage; a stage halves the image (the first one
      does not) and doubles the channels.
    width: Channels after the stem.

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
      train: Whether to normalize by the statistics of the batch and update the
        running ones (`mutable=["batch_stats"]`).

    Returns:
      Logits, float32 [batch, num_classes].

    Raises:
      ValueError: The inputs do not have four dimensions.
    """
    check_counts(stage_sizes=self.stage_sizes, width=self.width)
    if inputs.ndim != 4:
      raise ValueError(
        "inputs must have shape [batch, height, width, channels], "
        f"got {inputs.shape}."
      )
    # Padding is a number: "SAME" would depend on whether the size is even.
    conv = functools.partial(
      nn.Conv,
      use_bias=False,
      padding=0,
      kernel_init=_he_normal,
      dtype=self.policy.compute_dtype,
      param_dtype=self.policy.param_dtype,
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
    x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
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
      dtype=self.policy.compute_dtype,
      param_dtype=self.policy.param_dtype,
      name="head",
    )(x)
    return logits.astype(self.policy.output_dtype)
