"""A table, ids and a loss, for the tests of row-sparse gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quadratic_states

ROWS, WIDTH, BATCH = 48, 4, 16

# Clipping needs the norm of the sum of all rows; zero gradients change nothing.
ADAGRAD = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.5))

_rng = np.random.default_rng(0)
TABLE = _rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
BIAS = _rng.normal(size=(WIDTH,)).astype(np.float32)
# Few ids, so that examples share rows.
IDS = _rng.integers(0, 12, (3, BATCH)).astype(np.int32)
TARGETS = _rng.normal(size=(3, BATCH, WIDTH)).astype(np.float32)


def params(dtype=jnp.float32, rows=ROWS):
  table = jnp.asarray(TABLE[:rows], dtype)
  return {"table": table, "bias": jnp.asarray(BIAS, dtype)}


def batch(i):
  """Returns the i-th global batch."""
  return {"ids": IDS[i], "targets": TARGETS[i]}


def create(strategy, tx, wrappers=(), spec=None, rows=ROWS, **kwargs):
  """Returns a state with a sparse table, split over the mesh by `spec`."""
  values = params(rows=rows)
  sharding = jax.sharding.NamedSharding(strategy.mesh, spec or jax.P())
  values["table"] = jax.device_put(values["table"], sharding)
  return quadratic_states.create(
    wrappers, tx, values, strategy=strategy, sparse=["table"], **kwargs
  )


def loss_fn(params, batch):
  rows = params["table"][batch["ids"]]
  error = rows + params["bias"] - batch["targets"].astype(rows.dtype)
  return jnp.square(error).astype(jnp.float32).mean()


def train_step(state, batch):
  return state.minimize(loss_fn, batch)


@functools.cache
def reference(tx, num_steps, dtype=jnp.float32):
  """Returns the parameters after steps of optax, with the whole gradient."""
  state = quadratic_states.create(tx=tx, params=params(dtype))
  step = jax.jit(train_step)
  for i in range(num_steps):
    state, _ = step(state, batch(i))
  return state.params


def dense(slices):
  """Returns the whole array, by NumPy."""
  array = np.zeros(slices.dense_shape, np.float32)
  indices, values = jax.device_get((slices.indices, slices.values))
  is_row = (indices >= 0) & (indices < len(array))
  np.add.at(array, indices[is_row], values[is_row])
  return array


def step_with_poison(state, batch):
  """A step whose gradient is not finite in some rows alone."""
  loss, grads = state.value_and_grad(loss_fn, batch)
  table = grads["table"].map_values(lambda g: g + batch["poison"][:, None])
  return state.apply_gradients(grads={**grads, "table": table}), loss
