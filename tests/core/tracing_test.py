"""Conditionals inside and outside of a trace."""

from compilations import count
import jax
import jax.numpy as jnp
import optax
import pytest

import flaxshard as fs
from flaxshard.core import tracing

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
  traced = jax.jit(lambda p: tracing.cond(p, *args))(pred)
  assert float(tracing.cond(jnp.array(pred), *args)) == float(traced)


FLOOR = fs.LossScale(
  fs.DynamicLossScale(1.0, backoff_factor=0.5), warn_at_floor=True
)


@pytest.mark.parametrize(
  ("wrappers", "params"),
  [
    ([fs.LossScale("dynamic")], PARAMS),
    ([fs.LossScale("dynamic")], LARGE),
    pytest.param([FLOOR], PARAMS, marks=pytest.mark.slow),
    pytest.param([fs.AGN(2)], PARAMS, marks=pytest.mark.slow),
    ([fs.LossScale("dynamic"), fs.AGN(2, commit="mean")], PARAMS),
    pytest.param(
      [fs.AGN(2), fs.LossScale("dynamic")], PARAMS, marks=pytest.mark.slow
    ),
  ],
  ids=["dynamic", "large", "floor", "agn", "scale-agn", "agn-scale"],
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


@pytest.mark.parametrize("warn_at_floor", [False, True])
def test_eager_step_with_an_overflow_is_skipped(warn_at_floor):
  scale = fs.LossScale(
    fs.DynamicLossScale(initial_scale=1.0), warn_at_floor=warn_at_floor
  )
  state = fs.TrainState.create(
    apply_fn=None,
    params=dict(PARAMS),
    tx=optax.adam(0.125),
    wrappers=[scale],
    batch_stats={"mean": jnp.ones(2)},
  )
  bad = jax.tree.map(lambda p: p * jnp.inf, PARAMS)

  def skip():
    return state.apply_gradients(
      grads=bad, batch_stats={"mean": jnp.full(2, jnp.nan)}
    )

  if warn_at_floor:
    with pytest.warns(RuntimeWarning, match="at its floor, 1"):
      new = skip()
  else:
    new = skip()
  assert int(new.metrics()["skipped_steps"]) == 1
  kept = ("step", "params", "opt_state", "batch_stats")
  for name in kept:
    for got, want in zip(
      jax.tree.leaves(getattr(new, name)),
      jax.tree.leaves(getattr(state, name)),
      strict=True,
    ):
      assert jnp.array_equal(got, want), name
