"""A model for configs, by the name `normed:Normed`."""

import flax.linen as nn


class Normed(nn.Module):
  """A model with batch statistics and dropout."""

  num_classes: int
  policy: object

  @nn.compact
  def __call__(self, x, train=False):
    x = nn.Dense(16)(x.reshape(x.shape[0], -1))
    x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
    x = nn.Dropout(0.5, deterministic=not train)(x)
    return nn.Dense(self.num_classes)(x)
