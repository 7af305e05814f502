"""A small model on eight replicas in groups, for the tests of CrossShard."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs
from flaxshard import plans

GROUPINGS = {
  "all": None,
  "one group, reordered": ((5, 2, 7, 0, 1, 6, 3, 4),),
  "strided": ((0, 2, 4, 6), (1, 3, 5, 7)),
  "interleaved": ((0, 7), (1, 6), (2, 5), (3, 4)),
  "reordered": ((6, 3), (0, 5), (7, 2), (4, 1)),
  "irregular": ((0, 3, 5, 6), (7, 1, 4, 2)),
  "alone": tuple((i,) for i in range(8)),
}
HALVES = GROUPINGS["strided"]
X = np.random.default_rng(0).normal(size=(16, 5)).astype(np.float32)
GRADIENT_BYTES = 4 * (15 + 3)


def make_params():
  return {
    "w": np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3),
    "b": np.full(3, 0.5, np.float32),
  }


def loss_fn(params, x):
  return ((jnp.tanh(x @ params["w"]) + params["b"]) ** 2).mean()


def train_step(state, x):
  return state.minimize(loss_fn, x)


def create(strategy, *wrappers, tx=None, **kwargs):
  return fs.TrainState.create(
    **{
      "apply_fn": None,
      "params": make_params(),
      "tx": optax.sgd(1.0) if tx is None else tx,
      "wrappers": wrappers,
      "strategy": strategy,
      **kwargs,
    }
  )


def on_each(x):
  """Returns the copy of a replicated array on every device."""
  return [np.asarray(shard.data) for shard in x.addressable_shards]


def group_of(replica, groups):
  groups = groups or [range(8)]
  return sorted(next(group for group in groups if replica in group))


def rows_of(replicas):
  """The rows of X that some of eight replicas have."""
  return np.concatenate([X[2 * i : 2 * i + 2] for i in replicas])


@functools.cache
def local_gradients():
  """One replica's after the other, by `jax.grad` on its part of the batch."""
  grad = jax.jit(jax.grad(loss_fn))
  return [jax.device_get(grad(make_params(), rows_of([i]))) for i in range(8)]


def trained(params, batches, tx):
  """Plain optax on whole batches."""
  opt_state = tx.init(params)
  for x in batches:
    updates, opt_state = tx.update(jax.grad(loss_fn)(params, x), opt_state)
    params = optax.apply_updates(params, updates)
  return params


def collectives(compiled, strategy):
  """The kind, the bytes, and the size of the groups of each collective."""
  return [
    (c.kind, c.operand_bytes, c.group_size)
    for c in plans.collectives(compiled, strategy.mesh)
  ]
