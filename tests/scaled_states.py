"""States with a loss scale."""

import jax
import quadratic_states

import flaxshard as fs

# Shared by the tests, so that each kind of state is compiled once.
apply_step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))


def create(params, tx, scale="dynamic", **kwargs):
  return quadratic_states.create([fs.LossScale(scale, **kwargs)], tx, params)


def scale_state(state):
  return state.wrapper_states["loss_scale"]
