"""A loss is scaled once, and its gradients are unscaled once."""

import jax
import jax.numpy as jnp
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
