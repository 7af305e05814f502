"""Gradients are cast to 16 bits where that is exact, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.core import narrow_gradients

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def half(w, dtype=F16):
  return (w.astype(dtype) ** 2).sum().astype(F32)


def reused(w):
  return half(w) + half(2 * w)


def reshaped(w):
  return half(w.reshape(3, 2).T)


def looped(w):
  # The gradient is collected over the turns of a loop.
  turn = lambda total, row: (total + half(row), None)
  return jax.lax.scan(turn, jnp.float32(0), w)[0]


LOSSES = {
  "float16": (half, F16),
  "bfloat16": (lambda w: half(w, BF16), BF16),
  "float32": (lambda w: (w**2).sum(), F32),
  "moved": (reshaped, F16),
  "in jit": (jax.jit(half), F16),
  "in remat": (jax.checkpoint(half), F16),
  # A sum of two 16-bit gradients is computed in float32.
  "used twice": (reused, F32),
  # XLA would collect float32 gradients and cast them after the loop.
  "in scan": (looped, F32),
  "also in float32": (lambda w: half(w) + w.sum(), F32),
  "unused": (lambda w: jnp.float32(0), F32),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_narrow_only_if_its_last_operation_widens_it(name):
  loss, dtype = LOSSES[name]
  w = jnp.linspace(0.1, 3, 6).reshape(2, 3)
  (value, _), grad = jax.jit(
    lambda w: narrow_gradients.value_and_grad(lambda w: (loss(w), None), w)
  )(w)
  wanted, wanted_grad = jax.jit(jax.value_and_grad(loss))(w)
  assert grad.dtype == dtype
  np.testing.assert_array_equal(value, wanted)
  np.testing.assert_array_equal(grad.astype(F32), wanted_grad)


def test_aux_may_hold_anything_and_the_function_is_called_once():
  calls = []
  stored = {}

  def step(params, x):
    def loss_fn(params):
      calls.append(1)
      stored["twice"] = 2 * x
      aux = {"n": 3, "x": x, "host": np.ones(2)}
      # The product with x in float32 is differentiated after the cast.
      return half(params["w"] * x), aux

    (loss, aux), grads = narrow_gradients.value_and_grad(loss_fn, params)
    assert aux["n"] == 3 and aux["x"].shape == aux["host"].shape == (2,)
    assert grads["w"].dtype == F32 and grads["i"].dtype == jax.dtypes.float0
    return loss, grads["w"], aux["x"], stored["twice"]

  x = jnp.arange(2.0)
  params = {"w": jnp.ones(2), "i": jnp.ones(2, int)}
  loss, grad, same, twice = jax.jit(step)(params, x)
  assert float(loss) == 1 and grad.tolist() == [0, 2]
  assert same.tolist() == [0, 1] and twice.tolist() == [0, 2]
  assert len(calls) == 1


def test_no_tracer_is_left_behind():
  fn = lambda params: (half(params["w"]), None)
  step = lambda params: narrow_gradients.value_and_grad(fn, params)[1]["w"]
  with jax.checking_leaks():
    grad = jax.jit(step)({"w": jnp.ones(2), "i": jnp.ones(2, int)})
  assert grad.dtype == F16
