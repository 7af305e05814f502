"""States of a model with batch statistics, saved and restored."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard import checkpoint

X = np.array([[1.0, 2.0], [-0.5, 0.25]], np.float32)


class Normed(nn.Module):
  features: int = 3

  @nn.compact
  def __call__(self, x, train=True):
    x = nn.BatchNorm(use_running_average=not train)(x)
    return nn.Dense(self.features)(x)


MODEL = Normed()
TX = optax.adam(0.125)


@functools.cache
def _initialized(model, tx, wrappers, seed):
  return fs.create_train_state(
    model, jax.random.key(seed), X, tx, wrappers=wrappers
  )


def create(model=MODEL, tx=TX, wrappers=(), seed=0):
  # A copy, because one test donates it.
  return jax.tree.map(jnp.copy, _initialized(model, tx, tuple(wrappers), seed))


def dynamic():
  return [fs.LossScale("dynamic")]


@jax.jit
def _train_step(state):
  grads = jax.tree.map(lambda p: p + 1.0, state.params)
  batch_stats = jax.tree.map(lambda s: s + 0.5, state.batch_stats)
  return state.apply_gradients(grads=grads, batch_stats=batch_stats)


def trained(state, steps=3):
  """Takes some steps, after which no leaf has its initial value."""
  for _ in range(steps):
    state = _train_step(state)
  return state


def assert_plain_equal(a, b):
  """Compares step, parameters, optimizer state and batch statistics."""
  for field in ("step", "params", "opt_state", "batch_stats"):
    assert_trees_equal(getattr(a, field), getattr(b, field))


def save(path, state, step=3, **kwargs):
  with checkpoint.Checkpointer(path) as checkpointer:
    checkpointer.save(step, state, **kwargs)


def restore(path, state, step=None, **kwargs):
  # A new manager, as in a new process.
  with checkpoint.Checkpointer(path) as checkpointer:
    return checkpointer.restore(state, step, **kwargs)
