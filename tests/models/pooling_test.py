"""Max pooling."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.models import pooling


@pytest.mark.parametrize(
  ("size", "window", "stride", "padding"),
  [
    pytest.param((8, 6), 2, 2, 0, marks=pytest.mark.slow),
    pytest.param((9, 7), 2, 2, 0, marks=pytest.mark.slow),
    ((8, 7), 3, 2, 1),
    pytest.param((5, 5), 3, 1, 1, marks=pytest.mark.slow),
  ],
)
def test_values_and_gradients_are_those_of_flax(size, window, stride, padding):
  # Many values are equal.
  values = np.random.default_rng(0).integers(-3, 3, (2, *size, 3))
  x = jnp.asarray(values, jnp.float32)

  def flax_pool(x):
    sides = (padding, padding)
    return nn.max_pool(x, (window,) * 2, (stride,) * 2, (sides, sides))

  def pool(x):
    return pooling.max_pool(x, window, stride=stride, padding=padding)

  np.testing.assert_array_equal(pool(x), flax_pool(x))
  grads = [
    jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (pool, flax_pool)
  ]
  np.testing.assert_allclose(*grads, rtol=1e-6)


@pytest.mark.parametrize("position", [0, 1, 3])
def test_a_nan_is_the_maximum(position):
  x = jnp.arange(4.0).at[position].set(jnp.nan).reshape(1, 2, 2, 1)
  assert np.isnan(pooling.max_pool(x, 2, stride=2)).all()
