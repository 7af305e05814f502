"""Recommends items to users: a factorization with two large embedding tables.

The task of `configs/recsys.py`. Users choose items from a known distribution,
so that an evaluation can be compared with the best that is possible.
"""

# No `from __future__ import annotations`: clu's Collection needs the types of
# its fields, not strings.
import dataclasses
import functools
from typing import Any

from clu import metrics as clu_metrics
import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import flaxshard as fs


class Factorization(nn.Module):
  """A vector for each user and each item; their product is the affinity.

  Attributes:
    num_users: Number of users.
    num_items: Number of items.
    features: Size of the vectors.
    dtype: Dtype of the computation.
  """

  num_users: int
  num_items: int
  features: int = 64
  dtype: Any = jnp.float32

  def setup(self) -> None:
    """Defines the two tables."""
    embed = functools.partial(
      nn.Embed,
      features=self.features,
      dtype=self.dtype,
      embedding_init=nn.initializers.normal(0.2),
    )
    self.users, self.items = embed(self.num_users), embed(self.num_items)

  def __call__(
    self, user: jax.Array, items: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compares users with their items and with those of all others.

    Args:
      user: `[batch]`.
      items: `[batch, n]`.

    Returns:
      The products with all items `[batch, batch, n]`, those with the user's
      items `[batch, n]`, and the squared lengths of the vectors `[batch]`.
    """
    users, vectors = self.users(user), self.items(items)
    logits = jnp.einsum("bd,cnd->bcn", users, vectors)
    chosen = jnp.einsum("bd,bnd->bn", users, vectors)
    squares = jnp.square(users).sum(-1) + jnp.square(vectors).sum((-1, -2))
    outputs = logits, chosen, squares
    return jax.tree.map(lambda x: x.astype(jnp.float32), outputs)

  def affinities(self, user: jax.Array) -> jax.Array:
    """Returns the products of users with all items, `[batch, items]`."""
    return self.items.attend(self.users(user)).astype(jnp.float32)


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  """Means over users. `loss` is in nats per choice, with its penalty."""

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]


class Task:
  """Predicts the items that users choose.

  The loss of a user is the cross entropy of the items that they chose among all
  items of the batch. These occur in the batch as often as users choose them, so
  the product of two vectors becomes `log p(item | user) - log p(item)`. An
  evaluation adds `log p(item)` from counts, and ranks all items.

  Args:
    num_users: Number of users.
    num_items: Number of items.
    num_genres: Number of genres. The items of a genre have the same affinity.
    num_choices: Choices of a user in the training data.
    num_eval_users: Number of users whose next choice is held out.
    penalty: Factor of the squared lengths of the vectors in the loss.
    seed: Seed of the data.

  References:
    Losses with the items of a batch: Yi et al., "Sampling-Bias-Corrected Neural
    Modeling for Large Corpus Item Recommendations", 2019.
  """

  metrics = Metrics

  def __init__(
    self,
    num_users: int = 200_000,
    num_items: int = 50_000,
    num_genres: int = 500,
    num_choices: int = 20,
    num_eval_users: int = 2_500,
    penalty: float = 0.006,
    seed: int = 0,
  ):
    self._world = World(num_users, num_items, num_genres, seed)
    self._num_choices = num_choices
    self._num_eval_users = num_eval_users
    self._penalty = penalty

  def load_data(self) -> fs.data.Splits:
    """Returns the choices of each user; the last one is held out.

    Users who had chosen the held-out item before are not in the evaluation.
    """
    choices = self._choices
    user = np.arange(len(choices), dtype=np.int32)
    is_new = (choices[:, :-1] != choices[:, -1:]).all(axis=1)
    rows = np.flatnonzero(is_new[: self._num_eval_users])
    return fs.data.Splits(
      train=fs.data.Arrays(user=user, choices=choices),
      eval=fs.data.Arrays(user=user[rows], choices=choices[rows]),
    )

  @functools.cached_property
  def _choices(self) -> np.ndarray:
    return self._world.choices(self._num_choices + 1)

  @functools.cached_property
  def _log_popularity(self) -> np.ndarray:
    """The logarithm of how often an item was chosen in training."""
    chosen = self._choices[:, :-1].ravel()
    counts = np.bincount(chosen, minlength=self._world.num_items)
    # Less than one choice, for items that nobody has chosen.
    return np.log(np.maximum(counts, 0.5)).astype(np.float32)

  def create_model(self, config: dict[str, Any], dtype: Any) -> Factorization:
    """Returns the model; `config` is `config.model`."""
    world = self._world
    return Factorization(
      world.num_users, world.num_items, **config, dtype=dtype
    )

  def init_inputs(self, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the arguments of the model's call."""
    return batch["user"], batch["choices"][:, :-1]

  def loss(
    self, apply_fn: Any, params: Any, batch: Any, rngs: Any, train: bool
  ) -> tuple[jax.Array, fs.tasks.Aux]:
    """Returns the mean cross entropy of choices, and a penalty of lengths."""
    (logits, chosen, squares), _ = apply_fn(params, *self.init_inputs(batch))
    losses = jax.nn.logsumexp(logits, axis=(1, 2)) - chosen.mean(axis=1)
    losses += self._penalty * squares
    return losses.mean(), fs.tasks.Aux(metrics={"loss": losses})

  def evaluate(self, evaluation: Any) -> dict[str, float]:
    """Adds the recall: how often a held-out item is among the first k."""
    return {**evaluation.means(), **recall(evaluation.collect(self._ranks))}

  def predict(self, apply_fn: Any, params: Any, batch: Any) -> jax.Array:
    """Returns a score of each item for each user, `[batch, items]`.

    It is `log p(item | user)`, up to a constant.
    """
    scores, _ = apply_fn(params, batch["user"], method="affinities")
    return scores + self._log_popularity

  def _ranks(self, apply_fn: Any, params: Any, batch: Any) -> jax.Array:
    """Returns the rank of each held-out item."""
    return ranks_of(self.predict(apply_fn, params, batch), batch)

  def baselines(self) -> dict[str, dict[str, float]]:
    """Returns the recall of two other rankings, by their names.

    `"popularity"` ranks them by how often they were chosen, and `"oracle"` by
    the probabilities that the data were drawn from.
    """
    batch: Any = self.load_data().eval
    popular = np.tile(self._log_popularity, (len(batch), 1))
    oracle = self._world.log_probabilities(batch.user)
    scores = {"popularity": popular, "oracle": oracle}
    return {k: recall(ranks_of(x, batch.arrays)) for k, x in scores.items()}


@jax.jit
def ranks_of(scores: Any, batch: Any) -> jax.Array:
  """Returns how many new items have a better score than the held-out one."""
  rows = jnp.arange(len(scores))[:, None]
  items, held_out = batch["choices"][:, :-1], batch["choices"][:, -1:]
  held_out = scores[rows, held_out]
  scores = scores.at[rows, items].set(-jnp.inf)
  return (scores > held_out).sum(axis=1)


def recall(ranks: Any) -> dict[str, float]:
  """Returns the share of ranks, counted from 0, below 10 and below 100."""
  return {f"recall_at_{k}": float(np.mean(ranks < k)) for k in (10, 100)}


@dataclasses.dataclass(frozen=True)
class World:
  """Users and items with latent vectors.

  Items have a popularity that falls as a power law, and a genre. A user chooses
  a genre with a probability proportional to `popularity * exp(user @ genre)`,
  and an item of it by popularity.

  Attributes:
    num_users: Number of users.
    num_items: Number of items.
    num_genres: Number of genres.
    seed: Seed of everything.
    num_latents: Size of the latent vectors.
    affinity: Standard deviation of `user @ genre`.
  """

  num_users: int
  num_items: int
  num_genres: int
  seed: int
  num_latents: int = 8
  affinity: float = 3.0

  @functools.cached_property
  def _items(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each item's genre and share of its genre, and each genre's popularity."""
    rng = np.random.default_rng([self.seed, 0])
    popularity = 1 / (rng.permutation(self.num_items) + 10)
    genre = rng.permutation(np.arange(self.num_items) % self.num_genres)
    of_genre = np.bincount(genre, popularity)
    return genre, popularity / of_genre[genre], of_genre

  @functools.cached_property
  def _latents(self) -> tuple[np.ndarray, np.ndarray]:
    """The latent vectors of users and of genres."""
    rng = np.random.default_rng([self.seed, 1])
    size = self.num_latents
    users = rng.standard_normal((self.num_users, size), np.float32)
    genres = rng.standard_normal((self.num_genres, size), np.float32)
    return users, genres * np.float32(self.affinity / np.sqrt(size))

  def _genre_probabilities(self, user: Any) -> np.ndarray:
    """Returns `p(genre | user)`, `[users, genres]`."""
    users, genres = self._latents
    weights = np.exp(users[user] @ genres.T) * self._items[2]
    return weights / weights.sum(axis=1, keepdims=True)

  def choices(self, number: int) -> np.ndarray:
    """Returns a number of choices of each user, int32 `[users, number]`."""
    genre, share, _ = self._items
    by_genre = np.argsort(genre, kind="stable")
    within = np.cumsum(share[by_genre])  # ends at 1 for genre 0, 2 for genre 1
    rng = np.random.default_rng([self.seed, 2])
    parts = []
    for start in range(0, self.num_users, 8192):  # bounds the memory
      users = slice(start, start + 8192)
      total = np.cumsum(self._genre_probabilities(users), axis=1)
      draws = rng.random((len(total), number))
      chosen = _draw(total, draws)
      draws = chosen + rng.random(chosen.shape)
      position = np.searchsorted(within, draws, side="right")
      # Rounding: the last sum may be less than the number of genres.
      parts.append(by_genre[np.minimum(position, len(within) - 1)])
    return np.concatenate(parts).astype(np.int32)

  def log_probabilities(self, user: np.ndarray) -> np.ndarray:
    """Returns `log p(item | user)`, float32 `[users, items]`."""
    genre, share, _ = self._items
    of_genre = np.log(self._genre_probabilities(user)).astype(np.float32)
    return of_genre[:, genre] + np.log(share).astype(np.float32)


def _draw(cumulative: np.ndarray, draws: np.ndarray) -> np.ndarray:
  """Returns indices drawn from a distribution in each row.

  Args:
    cumulative: Cumulative probabilities, `[rows, n]`.
    draws: Numbers from 0 to 1, `[rows, m]`.
  """
  rows, n = cumulative.shape
  row = np.arange(rows)[:, None]
  # One search for all rows: those of row i lie between i and i + 1.
  flat = (cumulative + row).ravel()
  index = np.searchsorted(flat, (draws + row).ravel(), side="right")
  return np.clip(index.reshape(draws.shape) - n * row, 0, n - 1)
