"""States of a quadratic loss with two parameters."""

import jax.numpy as jnp
import optax

import flaxshard as fs


def make_params():
  return {"w": jnp.array([1.0, -2.0]), "b": {"c": jnp.array(0.5)}}


def create(wrappers=(), tx=None, params=None, **collections):
  return fs.TrainState.create(
    apply_fn=None,
    params=make_params() if params is None else params,
    tx=tx or optax.sgd(0.5),
    wrappers=wrappers,
    **collections,
  )


def quadratic(params, scale=1.0, shift=0.0):
  return scale * (params["w"] ** 2).sum() + params["b"]["c"] + shift
