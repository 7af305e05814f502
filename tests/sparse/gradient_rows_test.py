"""Gradients of tables are rows, and equal to those of `jax.grad`."""

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.sparse import gradient_rows

IDS = jnp.array([1, 2, 1, -1, 9])
TABLE = jax.random.normal(jax.random.key(0), (7, 3))
BIAS = jnp.arange(1.0, 4.0)


def total(rows, bias):
  return (jnp.sin(rows) * bias).sum()


LOOKUPS = {
  "indexing": lambda t: t[IDS],
  "two-dimensional ids": lambda t: t[jnp.stack([IDS, IDS + 1])],
  "scalar id": lambda t: t[IDS[0]],
  "constant id": lambda t: t[2],
  "slice of rows": lambda t: t[2:5],
  "take": lambda t: jnp.take(t, IDS % 7, axis=0),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_has_gradient_of_rows(name, jit):
  lookup = LOOKUPS[name]

  def fn(params):
    return total(lookup(params["table"]), params["bias"]), None

  params = {"table": TABLE, "bias": BIAS}
  mask = {"table": True, "bias": False}
  transform = jax.jit if jit else lambda f: f
  (loss, _), grads = transform(
    lambda p: gradient_rows.value_and_grad(fn, p, mask)
  )(params)
  (want_loss, _), want = transform(jax.value_and_grad(fn, has_aux=True))(params)
  assert fs.is_indexed_slices(grads["table"])
  assert grads["table"].indices.size == lookup(TABLE).size // 3
  np.testing.assert_array_equal(loss, want_loss)
  np.testing.assert_array_equal(grads["bias"], want["bias"])
  np.testing.assert_array_equal(grads["table"].to_dense(), want["table"])


def test_train_state_updates_rows_of_embed():
  model = nn.Embed(7, 3)
  variables = model.init(jax.random.key(0), IDS % 7)
  state = fs.TrainState.create(
    apply_fn=model.apply,
    params=variables["params"],
    tx=fs.sparse_rows(optax.sgd(0.5), ["embedding"]),
  )

  def loss_fn(params, ids):
    return (model.apply({"params": params}, ids) ** 2).sum()

  @jax.jit
  def step(state, ids):
    _, grads = state.value_and_grad(loss_fn, ids)
    return state.apply_gradients(grads=grads), grads

  new, grads = step(state, jnp.array([3, 3, 0]))
  assert grads["embedding"].indices.tolist() == [3, 3, 0]
  old = np.asarray(state.params["embedding"])
  want = old - 0.5 * np.asarray(
    jax.grad(loss_fn)(state.params, jnp.array([3, 3, 0]))["embedding"]
  )
  np.testing.assert_allclose(new.params["embedding"], want, rtol=1e-6)
