"""A variational autoencoder of binary images of digits.

The task of `configs/vae.py`. Its metrics are the negative evidence lower bound
and its two parts, in nats per image; an evaluation adds a tighter bound.
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
import optax

import flaxshard as fs


class VAE(nn.Module):
  """Encodes an image as a normal distribution, and decodes a sample of it.

  Attributes:
    latents: Number of latent variables.
    hidden: Width of the hidden layer of the encoder and of the decoder.
    dtype: Dtype of the computation.
  """

  latents: int = 8
  hidden: int = 256
  dtype: Any = jnp.float32

  def setup(self) -> None:
    """Defines the encoder and the decoder."""
    self.encoder = nn.Sequential(
      [
        nn.Dense(self.hidden, dtype=self.dtype),
        nn.relu,
        nn.Dense(2 * self.latents, dtype=self.dtype),
      ]
    )
    self.decoder = nn.Sequential(
      [
        nn.Dense(self.hidden, dtype=self.dtype),
        nn.relu,
        nn.Dense(64, dtype=self.dtype),
      ]
    )

  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the logits of the pixels, and the mean and log variance of z."""
    moments = self.encoder(x.reshape(x.shape[0], -1)).astype(jnp.float32)
    mean, log_var = jnp.split(moments, 2, axis=-1)
    noise = jax.random.normal(self.make_rng("latent"), mean.shape)
    return self.decode(mean + noise * jnp.exp(log_var / 2)), mean, log_var

  def decode(self, z: jax.Array) -> jax.Array:
    """Returns the logits of the pixels, float32 `[batch, 8, 8, 1]`."""
    return self.decoder(z).astype(jnp.float32).reshape(-1, 8, 8, 1)


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  """Means over images, in nats: `loss` is `reconstruction` plus `kl`."""

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]
  reconstruction: clu_metrics.Average.from_output("reconstruction")  # type: ignore[valid-type]
  kl: clu_metrics.Average.from_output("kl")  # type: ignore[valid-type]


class Task:
  """Maximizes the evidence lower bound of binary images.

  Args:
    num_samples: Samples of z for each image in the tighter bound of an
      evaluation.

  References:
    Kingma and Welling, "Auto-Encoding Variational Bayes", 2014. The tighter
    bound: Burda et al., "Importance Weighted Autoencoders", 2016.
  """

  metrics = Metrics

  def __init__(self, num_samples: int = 64):
    self._num_samples = num_samples

  def load_data(self) -> fs.data.Splits:
    """Returns scikit-learn's digits; a pixel is 1 if it is at least half."""
    splits = fs.data.digits()

    def binarize(source: Any) -> fs.data.Arrays:
      return fs.data.Arrays(image=(source.inputs >= 0.5).astype(np.float32))

    return fs.data.Splits(
      train=binarize(splits.train), eval=binarize(splits.eval)
    )

  def create_model(self, config: dict[str, Any], dtype: Any) -> VAE:
    """Returns the model; `config` is `config.model`."""
    return VAE(**config, dtype=dtype)

  def init_inputs(self, batch: Any) -> tuple[jax.Array]:
    """Returns the arguments of the model's call."""
    return (batch["image"],)

  def loss(
    self, apply_fn: Any, params: Any, batch: Any, rngs: Any, train: bool
  ) -> tuple[jax.Array, fs.tasks.Aux]:
    """Returns the mean negative evidence lower bound."""
    image = batch["image"]
    (logits, mean, log_var), _ = apply_fn(
      params, image, rngs={"latent": rngs["latent"]}
    )
    reconstruction = _negative_log_likelihood(logits, image)
    kl = (jnp.exp(log_var) + mean**2 - 1 - log_var).sum(-1) / 2
    losses = reconstruction + kl
    return losses.mean(), fs.tasks.Aux(
      metrics={"loss": losses, "reconstruction": reconstruction, "kl": kl}
    )

  def evaluate(self, evaluation: Any) -> dict[str, float]:
    """Adds `nll`, the importance weighted bound on the nats of an image."""
    nll = evaluation.collect(self._tighter_bound).mean()
    return {**evaluation.means(), "nll": nll}

  def _tighter_bound(self, apply_fn: Any, params: Any, batch: Any) -> jax.Array:
    """Returns a bound on the nats of each image."""
    image = batch["image"]
    (_, mean, log_var), _ = apply_fn(params, image)

    def log_weight(key: jax.Array) -> jax.Array:
      noise = jax.random.normal(key, mean.shape)
      z = mean + noise * jnp.exp(log_var / 2)
      logits, _ = apply_fn(params, z, method="decode")
      # The factors of 2 pi of the two normal densities cancel.
      log_ratio = (noise**2 + log_var - z**2).sum(-1) / 2
      return log_ratio - _negative_log_likelihood(logits, image)

    # The same samples of noise for every batch.
    keys = jax.random.split(jax.random.key(0), self._num_samples)
    log_weights = jax.lax.map(log_weight, keys)
    return jnp.log(len(keys)) - jax.nn.logsumexp(log_weights, axis=0)


def _negative_log_likelihood(logits: jax.Array, image: jax.Array) -> jax.Array:
  """Returns the nats of each binary image, `[batch]`."""
  losses = optax.sigmoid_binary_cross_entropy(logits, image)
  return losses.sum(axis=(1, 2, 3))
