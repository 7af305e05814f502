"""A table, ids and a loss, for the tests of row-sparse gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxshard as fs

ROWS, WIDTH, BATCH = 48, 4, 16

_rng = np.random.default_rng(0)
TABLE = _rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
BIAS = _rng.normal(size=(WIDTH,)).astype(np.float32)
# Few ids, so that examples share rows.
IDS = _rng.integers(0, 12, (3, BATCH)).astype(np.int32)
TARGETS = _rng.normal(size=(3, BATCH, WIDTH)).astype(np.float32)


def params(dtype=jnp.float32):
  return {"table": jnp.asarray(TABLE, dtype), "bias": jnp.asarray(BIAS, dtype)}


def batch(i, bad=None):
  """Returns the i-th global batch; the example `bad` is not finite."""
  targets = TARGETS[i].copy()
  if bad is not None:
    targets[bad] = np.inf
  return {"ids": IDS[i], "targets": targets}


def loss_of_rows(rows, bias, batch):
  error = rows + bias - batch["targets"].astype(rows.dtype)
  return jnp.square(error).astype(jnp.float32).mean()


def loss_fn(params, batch):
  rows = params["table"][batch["ids"]]
  return loss_of_rows(rows, params["bias"], batch)


def rows_step(state, batch):
  """A step that makes the rows by hand."""

  def loss(rows, bias):
    value = loss_of_rows(rows, bias, batch)
    return state.scale_loss(value), value

  rows = state.params["table"][batch["ids"]]
  (_, value), (rows, bias) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
    rows, state.params["bias"]
  )
  table = fs.IndexedSlices(batch["ids"], rows, state.params["table"].shape)
  grads = state.unscale_gradients({"table": table, "bias": bias})
  return state.apply_gradients(grads=grads), value


def dense_step(state, batch):
  return state.minimize(loss_fn, batch)


def reference(tx, num_steps, dtype=jnp.float32):
  """Returns the parameters after steps of optax, with the whole gradient."""
  state = fs.TrainState.create(apply_fn=None, params=params(dtype), tx=tx)
  step = jax.jit(dense_step)
  for i in range(num_steps):
    state, _ = step(state, batch(i))
  return state.params


def sgd(learning_rate=0.5):
  """Gradient descent for rows; optax multiplies row numbers too."""
  return optax.stateless(
    lambda grads, params: jax.tree.map(
      lambda g: g * -learning_rate, grads, is_leaf=fs.is_indexed_slices
    )
  )
