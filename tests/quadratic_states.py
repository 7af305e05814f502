"""States of a quadratic loss with two parameters."""

import numpy as np
import optax

import flaxshard as fs


def make_params():
  return {"w": np.array([1, -2], "f"), "b": {"c": np.float32(0.5)}}


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
