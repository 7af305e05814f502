"""Gradients of random programs of lookups equal those of `jax.grad`."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.sparse import gradient_rows

pytestmark = pytest.mark.slow

ROWS = 11
IDS = jnp.array([4, 1, 4, 0])
LOOKUPS = (
  lambda t, i: t[i],
  lambda t, i: jnp.take(t, -i, axis=0),
  lambda t, i: t.at[3 * i].get(mode="clip"),
  lambda t, i: t.at[3 * i].get(mode="fill", fill_value=0),
  lambda t, i: jax.vmap(lambda j: t[j])(i),
  lambda t, i: jax.lax.dynamic_slice_in_dim(t, i[0], 2),
  lambda t, i: (0.5 * t)[i],
  lambda t, i: t.at[0].set(0.0)[i],
  lambda t, i: t[2:5],
)


def turns(f, reverse):
  """Returns the sum of a function over a loop that carries its last value."""

  def loop(t, i):
    step = lambda c, j: (jnp.tanh(c + f(t, (i + j) % ROWS)), c)
    return jax.lax.scan(step, 0.3, i, reverse=reverse)[1].sum()

  return loop


def program(rng, depth):
  """Returns a random function of a table and ids."""
  if not depth:
    lookup, act = rng.choice(LOOKUPS), rng.choice([jnp.sin, jnp.square])
    return lambda t, i: act(lookup(t, i)).sum()
  f, g = program(rng, depth - 1), program(rng, depth - 1)
  return rng.choice(
    [
      lambda t, i: f(t, i) + g(t, i),
      lambda t, i: jnp.tanh(f(t, i)) * g(t, i),
      jax.jit(f),
      jax.checkpoint(f),
      turns(f, False),
      turns(jax.checkpoint(f), True),
      lambda t, i: jax.lax.cond(i[0] > 2, f, g, t, i),
      lambda t, i: jax.vmap(lambda s: g(t, i + s))(jnp.arange(2)).sum(),
    ]
  )


@pytest.mark.parametrize(
  "seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3, 38))]
)
def test_gradient_of_a_random_program_equals_that_of_jax(seed):
  loss = program(random.Random(seed), 3)
  table = jax.random.normal(jax.random.key(seed), (ROWS, 3))

  @jax.jit
  def run(t):
    fn = lambda t: (loss(t, IDS), None)
    return (
      gradient_rows.value_and_grad(fn, t, True),
      jax.value_and_grad(fn, has_aux=True)(t),
    )

  ((value, _), rows), ((want_value, _), want) = run(table)
  assert fs.is_indexed_slices(rows)
  np.testing.assert_array_equal(value, want_value)
  scale = max(1, float(jnp.abs(want).max()))
  np.testing.assert_allclose(rows.to_dense(), want, atol=1e-5 * scale)
