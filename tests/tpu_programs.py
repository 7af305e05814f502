"""Small train steps, compiled for TPUs that this machine does not have."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import flaxshard as fs

WIDTH, BATCH = 256, 64
# Two kernels and two biases.
PARAMS = 2 * (WIDTH * WIDTH + WIDTH)


class MLP(nn.Module):
  """Two layers, `up` and `down`."""

  dtype: Any
  width: int

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(self.width, dtype=self.dtype, name="up")(x))
    return nn.Dense(self.width, dtype=self.dtype, name="down")(x)


def train_step(state, batch):
  """Takes one step on a squared error."""

  def loss_fn(params):
    predictions = state.apply_fn({"params": params}, batch["x"])
    return jnp.mean(jnp.square(predictions.astype(jnp.float32) - batch["y"]))

  loss, grads = state.value_and_grad(loss_fn)
  return state.apply_gradients(grads=grads), loss


def create(strategy, wrappers=(), rules=None, dtype=jnp.float32, width=WIDTH):
  """Returns an abstract state of the MLP, and an abstract batch."""
  shape = jax.ShapeDtypeStruct
  state = fs.create_train_state(
    MLP(dtype, width),
    jax.random.key(0),
    shape((1, width), jnp.float32),
    optax.adam(1e-3),
    strategy=strategy,
    wrappers=wrappers,
    rules=rules,
  )
  x = shape((BATCH, width), jnp.float32)
  return state, strategy.shard_batch({"x": x, "y": x})


@functools.cache
def strategy_of(topology, **mesh_shape):
  """Returns a strategy on a named topology."""
  return fs.Strategy(topology, mesh_shape=mesh_shape or None)
