"""A denoising diffusion model of images of digits, with an NNX module.

The task of `configs/ddpm.py`. The model predicts the velocity, a mixture of the
noise and the image. An evaluation draws images and compares them with the
held-out ones.
"""

# No `from __future__ import annotations`: clu's Collection needs the types of
# its fields, not strings.
import functools
from typing import Any

from clu import metrics as clu_metrics
import flax
from flax import nnx
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

import flaxshard as fs


class Block(nnx.Module):
  """A residual block of two dense layers that is told the noise level.

  Args:
    width: Size of its input and output.
    dropout: Dropout rate between the layers.
    dtype: Dtype of the computation.
    rngs: Streams of random numbers.
  """

  def __init__(self, width: int, dropout: float, dtype: Any, rngs: nnx.Rngs):
    self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
    self.modulate = nnx.Linear(width, 2 * width, dtype=dtype, rngs=rngs)
    self.hidden = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
    self.dropout = nnx.Dropout(dropout, rngs=rngs)
    self.out = nnx.Linear(width, width, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array, level: jax.Array) -> jax.Array:
    """Returns `x` with a residual added."""
    scale, shift = jnp.split(self.modulate(level), 2, axis=-1)
    h = self.norm(x) * (1 + scale) + shift
    return x + self.out(self.dropout(nnx.silu(self.hidden(nnx.silu(h)))))


class Denoiser(nnx.Module):
  """Predicts the velocity of noisy, flattened images.

  Args:
    width: Width of the residual blocks.
    depth: Number of residual blocks.
    dropout: Dropout rate.
    dtype: Dtype of the computation.
    rngs: Streams of random numbers.
  """

  def __init__(
    self,
    width: int = 256,
    depth: int = 3,
    dropout: float = 0.0,
    dtype: Any = jnp.float32,
    *,
    rngs: nnx.Rngs,
  ):
    self.width = width
    self.encode = nnx.Linear(64, width, dtype=dtype, rngs=rngs)
    self.level = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
    self.blocks = nnx.List(
      [Block(width, dropout, dtype, rngs) for _ in range(depth)]
    )
    self.decode = nnx.Linear(width, 64, dtype=dtype, rngs=rngs)

  def __call__(self, image: jax.Array, time: jax.Array) -> jax.Array:
    """Returns the velocity of images; see `Task`.

    Args:
      image: Noisy images, float `[batch, 64]`.
      time: Share of the diffusion that is done, `[batch]` in [0, 1].

    Returns:
      The predicted velocity, float32 `[batch, 64]`.
    """
    frequencies = jnp.exp(jnp.linspace(0.0, 4.0, self.width // 2))
    angles = time[:, None] * frequencies
    waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    level = nnx.silu(self.level(waves))
    x = self.encode(image)
    for block in self.blocks:
      x = block(x, level)
    return self.decode(x).astype(jnp.float32)


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  """Mean over images: the squared error of the velocity of a pixel."""

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]


class Task:
  """Predicts the velocity of images at a random step of the diffusion.

  A noisy image is `sqrt(signal) * image + sqrt(1 - signal) * noise`, and its
  velocity `sqrt(signal) * noise - sqrt(1 - signal) * image`.

  Args:
    num_steps: Steps of the diffusion.
    num_samples: Images that an evaluation draws.

  References:
    Ho, Jain and Abbeel, "Denoising Diffusion Probabilistic Models", 2020. The
    schedule: Nichol and Dhariwal, "Improved Denoising Diffusion Probabilistic
    Models", 2021. The velocity: Salimans and Ho, "Progressive Distillation for
    Fast Sampling of Diffusion Models", 2022.
  """

  metrics = Metrics

  def __init__(self, num_steps: int = 100, num_samples: int = 360):
    # NumPy: a task may be made before JAX starts its devices.
    times = np.arange(num_steps + 1) / num_steps
    signal = np.cos((times + 0.008) / 1.008 * np.pi / 2) ** 2
    beta = np.clip(1 - signal[1:] / signal[:-1], None, 0.999)
    self._beta = beta.astype(np.float32)
    self._signal = np.cumprod(1 - beta).astype(np.float32)
    self._num_steps = num_steps
    self._num_samples = num_samples

  def load_data(self) -> fs.data.Splits:
    """Returns scikit-learn's digits, as 64 pixels in [-1, 1]."""
    splits = fs.data.digits()

    def flatten(source: Any) -> fs.data.Arrays:
      return fs.data.Arrays(image=2 * source.inputs.reshape(-1, 64) - 1)

    return fs.data.Splits(
      train=flatten(splits.train), eval=flatten(splits.eval)
    )

  def create_model(
    self, config: dict[str, Any], dtype: Any, rngs: nnx.Rngs
  ) -> Denoiser:
    """Returns the model; `config` is `config.model`."""
    return Denoiser(**config, dtype=dtype, rngs=rngs)

  def init_inputs(self, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the arguments of the model's call."""
    return batch["image"], jnp.zeros(batch["image"].shape[0])

  def loss(
    self, apply_fn: Any, params: Any, batch: Any, rngs: Any, train: bool
  ) -> tuple[jax.Array, fs.tasks.Aux]:
    """Returns the mean squared error of the predicted velocity."""
    image = batch["image"]
    step = jax.random.randint(rngs["step"], image.shape[:1], 0, self._num_steps)
    noise = jax.random.normal(rngs["noise"], image.shape)
    signal = jnp.asarray(self._signal)[step][:, None]
    noisy = jnp.sqrt(signal) * image + jnp.sqrt(1 - signal) * noise
    velocity = jnp.sqrt(signal) * noise - jnp.sqrt(1 - signal) * image
    predicted, collections = apply_fn(params, noisy, step / self._num_steps)
    losses = jnp.square(predicted - velocity).mean(axis=-1)
    return losses.mean(), fs.tasks.Aux(
      metrics={"loss": losses}, collections=collections
    )

  @functools.partial(jax.jit, static_argnames=("self", "count"))
  def sample(
    self, apply_fn: Any, params: Any, rng: jax.Array, count: int
  ) -> jax.Array:
    """Draws images, float32 `[count, 64]` in [-1, 1]."""
    first_rng, rng = jax.random.split(rng)
    betas, signals = jnp.asarray(self._beta), jnp.asarray(self._signal)

    def denoise(image: jax.Array, step: jax.Array) -> tuple[jax.Array, None]:
      beta, signal = betas[step], signals[step]
      time = jnp.broadcast_to(step / self._num_steps, (count,))
      velocity, _ = apply_fn(params, image, time)
      clean = jnp.sqrt(signal) * image - jnp.sqrt(1 - signal) * velocity
      # The mean of the step before, given the clean image.
      before = signal / (1 - beta)
      mean = jnp.sqrt(before) * beta * clean
      mean += jnp.sqrt(1 - beta) * (1 - before) * image
      noise = jax.random.normal(jax.random.fold_in(rng, step), image.shape)
      # The last step adds no noise.
      spread = jnp.where(step > 0, jnp.sqrt(beta), 0.0)
      return mean / (1 - signal) + spread * noise, None

    image = jax.random.normal(first_rng, (count, 64))
    steps = jnp.arange(self._num_steps)[::-1]
    return jnp.clip(jax.lax.scan(denoise, image, steps)[0], -1.0, 1.0)

  def evaluate(self, evaluation: Any) -> dict[str, float]:
    """Adds `precision` and `recall` of drawn images.

    `precision` is the share of drawn images that are as near to a held-out
    image as its third nearest held-out neighbour; `recall` exchanges the two.

    References:
      Kynkäänniemi et al., "Improved Precision and Recall Metric for Assessing
      Generative Models", 2019.
    """
    real = evaluation.collect(_get_image)
    samples = self.sample(
      evaluation.apply_fn,
      evaluation.state.params,
      evaluation.rng,
      self._num_samples,
    )
    # Of parameters in parts, every process may have a part of the samples.
    drawn = multihost_utils.process_allgather(samples, tiled=True)
    return {
      **evaluation.means(),
      "precision": covered(drawn, real),
      "recall": covered(real, drawn),
    }


def _get_image(apply_fn: Any, params: Any, batch: Any) -> jax.Array:
  image: jax.Array = batch["image"]
  return image


def covered(points: np.ndarray, reference: np.ndarray, k: int = 3) -> float:
  """Returns the share of points within the reach of a reference point.

  The reach of a reference point is the distance to its k-th nearest neighbour
  among the reference points.

  Args:
    points: `[points, dimensions]`.
    reference: `[reference points, dimensions]`.
    k: Number of neighbours.
  """
  # Each reference point is the nearest to itself.
  reach = np.sort(_distances(reference, reference), axis=1)[:, k]
  return float((_distances(points, reference) <= reach).any(axis=1).mean())


def _distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  return np.linalg.norm(a[:, None] - b[None], axis=-1)
