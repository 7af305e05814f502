"""Small train steps, compiled for TPUs that this machine does not have."""

from collections.abc import Sequence
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import flaxshard as fs
from flaxshard import plans

P = jax.sharding.PartitionSpec
Shape = jax.ShapeDtypeStruct

WIDTH = 256
BATCH = 64
# Two kernels and two biases.
PARAMS = 2 * (WIDTH * WIDTH + WIDTH)


class MLP(nn.Module):
  """Two layers, `up` and `down`."""

  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = nn.relu(nn.Dense(WIDTH, dtype=self.dtype, name="up")(x))
    return nn.Dense(WIDTH, dtype=self.dtype, name="down")(x)


def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
  """Takes one step on a squared error."""

  def loss_fn(params: Any) -> jax.Array:
    predictions = state.apply_fn({"params": params}, batch["x"])
    return jnp.mean(jnp.square(predictions.astype(jnp.float32) - batch["y"]))

  loss, grads = state.value_and_grad(loss_fn)
  return state.apply_gradients(grads=grads), loss


def create(
  strategy: fs.Strategy,
  wrappers: Sequence[Any] = (),
  rules: Any = None,
  dtype: Any = jnp.float32,
) -> tuple[fs.TrainState, dict[str, Shape]]:
  """Returns an abstract state of the MLP, and an abstract batch."""
  sample = Shape((1, WIDTH), jnp.float32)
  state = fs.create_train_state(
    MLP(dtype),
    jax.random.key(0),
    sample,
    optax.adam(1e-3),
    strategy=strategy,
    wrappers=wrappers,
    rules=rules,
  )
  x = Shape((BATCH, WIDTH), jnp.float32)
  return state, strategy.shard_batch({"x": x, "y": x})


@functools.cache
def strategy_of(topology: str, **mesh_shape: int) -> fs.Strategy:
  """Returns a strategy on a named topology."""
  return fs.Strategy(topology, mesh_shape=mesh_shape or None)


def collectives(program: Any, strategy: fs.Strategy) -> list[Any]:
  """Returns the collectives between devices."""
  found = plans.collectives(program, strategy.mesh)
  return [c for c in found if c.group_size > 1]
