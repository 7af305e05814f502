"""Proximal policy optimization of a pole on a cart.

The task of `configs/ppo.py`. Training batches come from rollouts of the newest
policy, in an environment written in JAX. An evaluation plays whole episodes.
"""

# No `from __future__ import annotations`: clu's Collection needs the types of
# its fields, not strings.
from collections.abc import Iterator
import functools
from typing import Any

from clu import metrics as clu_metrics
import flax
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs


class ActorCritic(nn.Module):
  """Two networks: the logits of the two actions, and the value of a state.

  Attributes:
    hidden: Width of each hidden layer.
    dtype: Dtype of the computation.
  """

  hidden: tuple[int, ...] = (64, 64)
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits `[batch, 2]` and values `[batch]`, both float32."""
    outputs = []
    for name, size in (("actor", 2), ("critic", 1)):
      h = x
      for i, width in enumerate(self.hidden):
        h = nn.tanh(nn.Dense(width, dtype=self.dtype, name=f"{name}{i}")(h))
      # Small, so that the first policy is nearly uniform.
      small = nn.initializers.orthogonal(0.01)
      h = nn.Dense(size, dtype=self.dtype, kernel_init=small, name=name)(h)
      outputs.append(h.astype(jnp.float32))
    logits, values = outputs
    return logits, values[:, 0]


def reset(key: jax.Array, count: int) -> jax.Array:
  """Returns states of new episodes, `[count, 4]`.

  A state is the position and the speed of the cart, and the angle and the
  angular speed of the pole, in SI units.
  """
  return jax.random.uniform(key, (count, 4), minval=-0.05, maxval=0.05)


def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Pushes the carts for 0.02 s.

  Args:
    state: `[..., 4]`; see `reset`.
    action: 0 pushes to the left, 1 to the right, `[...]`.

  Returns:
    The next states, and whether the episodes end: the pole leans by more than
    12 degrees, or the cart is more than 2.4 m from the center.

  References:
    Barto, Sutton and Anderson, "Neuronlike Adaptive Elements That Can Solve
    Difficult Learning Control Problems", 1983. The constants are those of
    Gymnasium's CartPole-v1.
  """
  gravity, pole_mass, total_mass, half_length = 9.8, 0.1, 1.1, 0.5
  _, speed, angle, spin = jnp.moveaxis(state, -1, 0)
  force = jnp.where(action == 1, 10.0, -10.0)
  sin, cos = jnp.sin(angle), jnp.cos(angle)
  push = (force + pole_mass * half_length * spin**2 * sin) / total_mass
  inertia = half_length * (4 / 3 - pole_mass * cos**2 / total_mass)
  spin_change = (gravity * sin - cos * push) / inertia
  speed_change = push - pole_mass * half_length * spin_change * cos / total_mass
  change = jnp.stack([speed, speed_change, spin, spin_change], axis=-1)
  state = state + 0.02 * change
  fell = jnp.abs(state[..., 2]) > 12 * jnp.pi / 180
  return state, fell | (jnp.abs(state[..., 0]) > 2.4)


@flax.struct.dataclass
class Metrics(clu_metrics.Collection):
  """Means over the steps of the environments."""

  loss: clu_metrics.Average.from_output("loss")  # type: ignore[valid-type]
  value_loss: clu_metrics.Average.from_output("value_loss")  # type: ignore[valid-type]
  entropy: clu_metrics.Average.from_output("entropy")  # type: ignore[valid-type]
  clipped: clu_metrics.Average.from_output("clipped")  # type: ignore[valid-type]


class Task:
  """Plays with the newest policy, and trains on each rollout for some epochs.

  A rollout begins new episodes. `config.batch_size` divides its number of
  steps, `num_envs * rollout_length`.

  Args:
    num_envs: Carts that are played with at once.
    rollout_length: Steps of each cart in a rollout.
    epochs: Number of times that each step of a rollout is trained on.
    discount: Weight of a reward, one step later.
    trace: Weight of the error of the values, one step later.
    clip: Largest change of the probability ratio that still has a gradient.
    entropy_weight: Weight of the entropy of the policy in the loss.
    value_weight: Weight of the squared error of the values in the loss.

  References:
    Schulman et al., "Proximal Policy Optimization Algorithms", 2017. The
    advantages: Schulman et al., "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", 2016.
  """

  metrics = Metrics

  def __init__(
    self,
    num_envs: int = 32,
    rollout_length: int = 128,
    epochs: int = 4,
    discount: float = 0.99,
    trace: float = 0.95,
    clip: float = 0.2,
    entropy_weight: float = 0.01,
    value_weight: float = 0.5,
  ):
    self._num_envs = num_envs
    self._rollout_length = rollout_length
    self._epochs = epochs
    self._discount = discount
    self._trace = trace
    self._clip = clip
    self._entropy_weight = entropy_weight
    self._value_weight = value_weight

  def example(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one step of a rollout."""
    number = jax.ShapeDtypeStruct((), np.float32)
    return {
      "observation": jax.ShapeDtypeStruct((4,), np.float32),
      "action": jax.ShapeDtypeStruct((), np.int32),
      "log_prob": number,
      "advantage": number,
      "value": number,
    }

  def create_model(self, config: dict[str, Any], dtype: Any) -> ActorCritic:
    """Returns the model; `config` is `config.model`."""
    return ActorCritic(**config, dtype=dtype)

  def init_inputs(self, batch: Any) -> tuple[jax.Array]:
    """Returns the arguments of the model's call."""
    return (batch["observation"],)

  def train_batches(self, stream: Any) -> Iterator[dict[str, np.ndarray]]:
    """Yields the batches of one rollout after the other."""
    num_steps = self._num_envs * self._rollout_length
    if num_steps % stream.batch_size:
      raise ValueError(
        f"config.batch_size={stream.batch_size} must divide the steps of a "
        f"rollout, num_envs * rollout_length = {num_steps}."
      )
    while True:
      rollout = jax.device_get(self._play(stream.state(), stream.rng))
      rng = np.random.default_rng(np.asarray(jax.random.key_data(stream.rng)))
      for _ in range(self._epochs):
        order = rng.permutation(num_steps)
        for rows in order.reshape(-1, stream.batch_size):
          yield {key: x[rows] for key, x in rollout.items()}

  @functools.partial(jax.jit, static_argnums=0)
  def _play(self, state: Any, key: jax.Array) -> dict[str, jax.Array]:
    """Returns the steps of a rollout, `[steps, ...]`."""

    def act(observation: jax.Array, key: jax.Array) -> Any:
      logits, value = state.apply_fn({"params": state.params}, observation)
      action = jax.random.categorical(key, logits)
      log_prob = _of_actions(jax.nn.log_softmax(logits), action)
      after, done = step(observation, action)
      new = reset(jax.random.fold_in(key, 1), self._num_envs)
      return jnp.where(done[:, None], new, after), {
        "observation": observation,
        "action": action.astype(jnp.int32),
        "log_prob": log_prob,
        "value": value,
        "done": done,
      }

    reset_key, key = jax.random.split(key)
    start = reset(reset_key, self._num_envs)
    keys = jax.random.split(key, self._rollout_length)
    last, steps = jax.lax.scan(act, start, keys)
    _, last_value = state.apply_fn({"params": state.params}, last)

    def estimate(carry: Any, step: Any) -> Any:
      advantage, next_value = carry
      going_on = self._discount * (1.0 - step["done"])
      # Every step that the pole stands has the reward 1.
      error = 1.0 + going_on * next_value - step["value"]
      advantage = error + going_on * self._trace * advantage
      return (advantage, step["value"]), advantage

    zeros = jnp.zeros_like(last_value)
    _, advantage = jax.lax.scan(
      estimate, (zeros, last_value), steps, reverse=True
    )
    del steps["done"]
    # What the critic is to predict.
    steps["value"] += advantage
    normalized = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    steps["advantage"] = normalized
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), steps)

  def loss(
    self, apply_fn: Any, params: Any, batch: Any, rngs: Any, train: bool
  ) -> tuple[jax.Array, fs.tasks.Aux]:
    """Returns the clipped surrogate loss with those of value and entropy."""
    (logits, values), _ = apply_fn(params, batch["observation"])
    log_probs = jax.nn.log_softmax(logits)
    log_prob = _of_actions(log_probs, batch["action"])
    ratio = jnp.exp(log_prob - batch["log_prob"])
    clipped = jnp.clip(ratio, 1 - self._clip, 1 + self._clip)
    policy_losses = -jnp.minimum(
      ratio * batch["advantage"], clipped * batch["advantage"]
    )
    value_losses = optax.squared_error(values, batch["value"])
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
    losses = (
      policy_losses
      + self._value_weight * value_losses
      - self._entropy_weight * entropy
    )
    return losses.mean(), fs.tasks.Aux(
      metrics={
        "loss": losses,
        "value_loss": value_losses,
        "entropy": entropy,
        "clipped": (ratio != clipped).astype(jnp.float32),
      }
    )

  def evaluate(self, evaluation: Any) -> dict[str, float]:
    """Returns the mean and the smallest return of 64 episodes.

    An episode has at most 500 steps, each with the reward 1. The policy takes
    the action of the largest probability.
    """
    returns = np.asarray(
      _play_episodes(
        evaluation.apply_fn, evaluation.state.params, evaluation.rng
      )
    )
    return {"mean_return": returns.mean(), "min_return": returns.min()}


def _of_actions(log_probs: jax.Array, actions: jax.Array) -> jax.Array:
  """Returns the log-probability of each action, `[batch]`."""
  return jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]


@jax.jit
def _play_episodes(apply_fn: Any, params: Any, key: jax.Array) -> jax.Array:
  """Returns the return of each episode, `[64]`."""

  def act(carry: Any, _: None) -> Any:
    observation, standing = carry
    (logits, _), _ = apply_fn(params, observation)
    observation, done = step(observation, logits.argmax(-1))
    return (observation, standing & ~done), standing

  start = reset(key, 64), jnp.ones(64, bool)
  _, rewards = jax.lax.scan(act, start, length=500)
  return rewards.sum(axis=0)
