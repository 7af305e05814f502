"""Contrastive learning of digits without their labels, after SimCLR.

The task of `configs/simclr.py`. Two augmented views of an image are to have
similar embeddings, and those of different images are not. An evaluation
classifies the frozen features by their nearest labelled neighbours.
"""

# No `from __future__ import annotations`: clu's Collection needs the types of
# its fields, not strings.
import functools
from typing import Any

from clu import metrics as clu_metrics
import flax
from flax import linen as nn
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs


class Encoder(nn.Module):
  """Convolutions with batch normalization, then a projection head.

  Attributes:
    features: Number of channels of each convolution.
    num_features: Size of the features that are kept.
    projection: Size of the embeddings that the loss compares.
    dtype: Dtype of the computation.
  """

  features: tuple[int, ...] = (32, 64)
  num_features: int = 16
  projection: int = 32
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self, x: jax.Array, *, train: bool
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the features and their projection, both `[batch, ...]`."""
    for channels in self.features:
      x = nn.Conv(channels, (3, 3), use_bias=False, dtype=self.dtype)(x)
      x = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x)
      x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
    x = x.reshape(x.shape[0], -1)
    features = nn.Dense(self.num_features, dtype=self.dtype)(x)
    x = nn.relu(nn.Dense(64, dtype=self.dtype)(features))
    x = nn.Dense(self.projection, dtype=self.dtype)(x)
    return features.astype(jnp.float32), x.astype(jnp.float32)


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  """Means over images.

  `match` is the rate at which the other view of an image is nearer to it than
  any view of another image of the batch.
  """

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]
  match: clu_metrics.Average.from_output("match")  # type: ignore[valid-type]


class Task:
  """Contrasts two views of each image with the other images of the batch.

  With `config.mesh.per_replica` these are the images of the same replica.

  Args:
    temperature: Divides the cosine similarities.
    neighbors: Number of labelled neighbours that vote in an evaluation.

  References:
    Chen, Kornblith, Norouzi and Hinton, "A Simple Framework for Contrastive
    Learning of Visual Representations", 2020.
  """

  metrics = Metrics

  def __init__(self, temperature: float = 0.2, neighbors: int = 5):
    self._temperature = temperature
    self._neighbors = neighbors

  def load_data(self) -> fs.data.Splits:
    """Returns scikit-learn's digits; the loss ignores the labels."""
    return self._splits

  @functools.cached_property
  def _splits(self) -> fs.data.Splits:
    return fs.data.digits()

  def create_model(self, config: dict[str, Any], dtype: Any) -> Encoder:
    """Returns the model; `config` is `config.model`."""
    return Encoder(**config, dtype=dtype)

  def loss(
    self, apply_fn: Any, params: Any, batch: Any, rngs: Any, train: bool
  ) -> tuple[jax.Array, fs.tasks.Aux]:
    """Returns the mean NT-Xent loss of the two views of each image."""
    first_key, second_key = jax.random.split(rngs["augment"])
    first = augment(first_key, batch["inputs"])
    second = augment(second_key, batch["inputs"])
    # One batch norm after the other: the second view continues the averages.
    (_, first), collections = apply_fn(params, first)
    (_, second), collections = apply_fn(
      params, second, collections=collections or None
    )
    losses, match = self._contrast(first, second)
    return losses.mean(), fs.tasks.Aux(
      metrics={"loss": losses, "match": match}, collections=collections
    )

  def _contrast(
    self, first: jax.Array, second: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    first, second = _normalize(first), _normalize(second)
    n = len(first)
    # Masks the similarity of a view with itself.
    itself = jnp.where(jnp.eye(n, dtype=bool), -jnp.inf, 0.0)
    labels = jnp.arange(n)

    def one_side(view: jax.Array, other: jax.Array) -> Any:
      across = view @ other.T / self._temperature
      within = view @ view.T / self._temperature + itself
      logits = jnp.concatenate([across, within], axis=1)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      return losses, logits.argmax(1) == labels

    sides = one_side(first, second), one_side(second, first)
    # Of the two views of each image.
    losses, matches = jax.tree.map(lambda x, y: (x + y) / 2, *sides)
    return losses, matches

  def evaluate(self, evaluation: Any) -> dict[str, float]:
    """Adds `knn_accuracy`, of a vote of the nearest training images."""
    features, labels = evaluation.collect(_embed)
    train: Any = self._splits.train
    known, known_labels = multihost_utils.process_allgather(
      _embed(evaluation.apply_fn, evaluation.state.params, train.arrays),
      tiled=True,
    )
    nearest = np.argsort(-features @ known.T, axis=1)[:, : self._neighbors]
    votes = np.eye(10)[known_labels[nearest]].sum(axis=1)
    accuracy = (votes.argmax(axis=1) == labels).mean()
    return {**evaluation.means(), "knn_accuracy": accuracy}


@jax.jit
def _embed(
  apply_fn: Any, params: Any, batch: Any
) -> tuple[jax.Array, jax.Array]:
  """Returns the features of images, of length 1, and their labels."""
  (features, _), _ = apply_fn(params, batch["inputs"])
  return _normalize(features), batch["labels"]


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
  """Rotates, scales and shifts each image at random, and changes its contrast.

  Args:
    key: A PRNG key.
    images: Float images, `[batch, height, width, 1]`.
  """

  def augment_one(key: jax.Array, image: jax.Array) -> jax.Array:
    affine_key, shift_key, contrast_key, noise_key = jax.random.split(key, 4)
    change = jax.random.uniform(affine_key, (2, 2), minval=-0.3, maxval=0.3)
    shift = jax.random.uniform(shift_key, (2,), minval=-1.0, maxval=1.0)
    height, width, _ = image.shape
    center = jnp.array([(height - 1) / 2, (width - 1) / 2])
    grid = jnp.stack(jnp.mgrid[:height, :width], axis=-1) - center
    at = grid @ (jnp.eye(2) + change) + center + shift
    moved = jax.scipy.ndimage.map_coordinates(
      image[..., 0], [at[..., 0], at[..., 1]], order=1
    )
    contrast = jax.random.uniform(contrast_key, minval=0.6, maxval=1.4)
    noise = 0.1 * jax.random.normal(noise_key, moved.shape)
    return (moved * contrast + noise)[..., None]

  return jax.vmap(augment_one)(jax.random.split(key, len(images)), images)


def _normalize(x: jax.Array) -> jax.Array:
  # Not `jnp.linalg.norm`, whose gradient at 0 is NaN.
  return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)
