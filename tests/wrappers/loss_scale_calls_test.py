"""Scaled gradients that are applied are told once, when a step is traced."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

PARAMS = {"w": jnp.ones(3, jnp.float16), "b": jnp.ones(2)}


def create(*wrappers, params=PARAMS):
  return fs.TrainState.create(
    apply_fn=None,
    params=dict(params),
    tx=optax.sgd(0.125),
    wrappers=wrappers or [fs.LossScale("dynamic")],
  )


def quadratic(params):
  return sum((p.astype(jnp.float32) ** 2).sum() for p in params.values())


def scaled_grads(state):
  loss_fn = lambda params: state.scale_loss(quadratic(params))
  return jax.grad(loss_fn)(state.params)


def scale_only(state):
  return state.apply_gradients(grads=scaled_grads(state))


def scale_and_unscale(state):
  grads = state.unscale_gradients(scaled_grads(state))
  return state.apply_gradients(grads=grads)


def minimize(state):
  return state.minimize(quadratic)[0]


unscale = jax.jit(lambda state, grads: state.unscale_gradients(grads))


def unscale_apart(state):
  grads = unscale(state, scaled_grads(state))
  return state.apply_gradients(grads=grads)


def messages(fn, *args):
  """Returns what `LossScale` warns of in `fn(*args)`."""
  with warnings.catch_warnings(record=True) as record:
    warnings.simplefilter("always")
    fn(*args)
  caught = [w for w in record if "LossScale" in str(w.message)]
  for warning in caught:
    assert warning.filename == __file__  # the user's line, not one of ours
  # Python shows a warning of one line once, however often it is traced.
  return list({str(warning.message) for warning in caught})


def jit(step, state):
  jitted = jax.jit(step)
  jitted(jitted(state))


def eager(step, state):
  step(state)


def scan(step, state):
  jax.lax.scan(lambda state, x: (step(state), x), state, jnp.ones(3))


def run_steps(step, state):
  fn = lambda state, x: (step(state), x)
  fs.Strategy().run_steps(fn, state, np.ones((2, 8), np.float32))


@pytest.mark.parametrize("way", [jit, eager, scan, run_steps])
def test_scaled_gradients_are_told_once(way):
  (said,) = messages(way, scale_only, create())
  assert "state.unscale_gradients" in said
  assert "state.value_and_grad(loss_fn)" in said
  for step in (scale_and_unscale, minimize):
    assert messages(way, step, create()) == []


@pytest.mark.parametrize(
  "wrappers",
  [
    (fs.LossScale(8.0),),
    (fs.CrossShard("mean"), fs.LossScale("dynamic")),
    (fs.LossScale("auto"),),  # scales: a parameter is float16
    (fs.LossScale("dynamic"), fs.AGN(2, commit="mean")),
    (fs.AGN(2, commit="mean"), fs.LossScale("dynamic")),
  ],
  ids=["fixed", "cross-shard", "auto", "outside-agn", "inside-agn"],
)
def test_other_wrappers_and_scales(wrappers):
  state = create(*wrappers)
  for step in (minimize, scale_and_unscale):
    assert messages(jit, step, state) == []
  assert len(messages(jit, scale_only, state)) == 1


def test_functions_that_are_jitted_apart_say_nothing():
  grad_fn = jax.jit(lambda state: state.value_and_grad(quadratic)[1])
  apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  by_hand = jax.jit(scaled_grads)

  def take_steps(state):
    state = apply(state, grad_fn(state))
    state = state.apply_gradients(grads=grad_fn(state))
    return apply(state, unscale(state, by_hand(state)))

  assert messages(take_steps, create()) == []
  assert messages(jit, unscale_apart, create()) == []


def unscale_again(state):
  _, grads = state.value_and_grad(quadratic)
  return state.unscale_gradients(grads)


def scale_inside(state):
  return state.minimize(lambda params: state.scale_loss(quadratic(params)))


@pytest.mark.parametrize("way", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("scale", ["dynamic", 8.0])
@pytest.mark.parametrize(
  ("step", "message"),
  [
    (unscale_again, "unscale_gradients: the gradients are unscaled already"),
    (scale_inside, "scale_loss: value_and_grad and minimize scale the loss"),
  ],
)
def test_a_loss_is_scaled_once_and_unscaled_once(step, message, scale, way):
  with pytest.raises(ValueError, match=message):
    way(step)(create(fs.LossScale(scale)))
