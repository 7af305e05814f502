"""A small model on eight replicas in groups, for the tests of CrossShard."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quadratic_states

from flaxshard import plans

HALVES = ((0, 2, 4, 6), (1, 3, 5, 7))
X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
GRADIENT_BYTES = 4 * (20 + 4)
SGD = optax.sgd(1.0)


def make_params():
  return {
    "w": np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4),
    "b": np.full(4, 0.5, np.float32),
  }


def loss_fn(params, x):
  return ((jnp.tanh(x @ params["w"]) + params["b"]) ** 2).mean()


def train_step(state, x):
  return state.minimize(loss_fn, x)


def create(strategy, *wrappers, tx=SGD, params=None, **collections):
  return quadratic_states.create(
    wrappers, tx, params or make_params(), strategy=strategy, **collections
  )


def on_each(x):
  """Returns the copy of a replicated array on every device."""
  return [np.asarray(shard.data) for shard in x.addressable_shards]


@functools.cache
def gradients_of(num_replicas):
  """One replica's after the other, by `jax.grad` on its part of the batch."""
  grad = jax.jit(jax.grad(loss_fn))
  parts = np.split(X, num_replicas)
  return [jax.device_get(grad(make_params(), x)) for x in parts]


def collectives(compiled, strategy):
  """The kind, the bytes, and the size of the groups of each collective."""
  return [
    (c.kind, c.operand_bytes, c.group_size)
    for c in plans.collectives(compiled, strategy.mesh)
  ]
