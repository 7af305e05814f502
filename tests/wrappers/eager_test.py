"""Conditionals inside and outside of a trace."""

from compilations import count
import jax
import jax.numpy as jnp
import optax
import pytest

import flaxshard as fs
from flaxshard.wrappers import base

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 0.25]]), "b": jnp.ones(2)}
LARGE = {"w": jnp.full((128, 128), 0.5)}


def quadratic(params):
  return sum((p**2).sum() for p in jax.tree.leaves(params))


def take_step(state):
  state, _ = state.minimize(quadratic)
  return state


@pytest.mark.parametrize("pred", [True, False])
def test_branches_are_those_of_lax_cond(pred):
  args = (lambda x: x * 2, lambda x: x - 1, jnp.float32(5))
  traced = jax.jit(lambda p: base.cond(p, *args))(pred)
  assert float(base.cond(jnp.array(pred), *args)) == float(traced)


@pytest.mark.parametrize(
  ("wrappers", "params"),
  [
    ([fs.LossScale("dynamic")], PARAMS),
    ([fs.LossScale("dynamic")], LARGE),
    ([fs.LossScale("dynamic"), fs.AGN(2, commit="mean")], PARAMS),
  ],
  ids=["dynamic", "large", "agn"],
)
def test_eager_steps_do_not_compile_again(wrappers, params):
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=optax.sgd(0.125), wrappers=wrappers
  )
  start = jax.tree.map(jnp.copy, state)
  for _ in range(4):  # an AGN commit is every second step
    state = take_step(state)
  with count() as compiled:
    for _ in range(4):
      state = take_step(state)
  assert compiled.total == 0

  jitted, step = start, jax.jit(take_step)
  for _ in range(8):
    jitted = step(jitted)
  # Powers of two: eager and fused arithmetic round alike.
  for got, want in zip(
    jax.tree.leaves(state), jax.tree.leaves(jitted), strict=True
  ):
    assert jnp.array_equal(got, want)
