"""States with a loss scale."""

import jax

import flaxshard as fs

# Shared by the tests, so that each kind of state is compiled once.
apply_step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))


def create(params, tx, scale="dynamic", **kwargs):
  return fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=tx,
    wrappers=[fs.LossScale(scale, **kwargs)],
  )


def scale_state(state):
  return state.wrapper_states["loss_scale"]
