"""LossScale with optax transformations, checkpointing, scan, donation, vmap."""

from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

X = np.array([[1.0, 2.0], [-1.0, 0.5], [0.25, -2.0], [3.0, 1.0]], np.float32)
Y = np.array([1.0, -1.0, 0.5, 2.0], np.float32)
OVERFLOW = 2  # the batch whose gradients are not finite


def batches(n=6, bad=OVERFLOW):
  x = np.stack([X * (1 + i / n) for i in range(n)])
  y = np.stack([Y] * n)
  if bad is not None:
    x[bad, 1, 0] = np.inf
  return x, y


def make_params():
  return {"w": jnp.array([0.5, -0.25]), "b": jnp.array(0.125)}


def loss_fn(params, x, y):
  return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def create(tx, scale=2.0**10):
  return fs.TrainState.create(
    apply_fn=None,
    params=make_params(),
    tx=tx,
    wrappers=[fs.LossScale(fs.DynamicLossScale(scale))],
  )


def train_step(state, batch):
  return state.minimize(loss_fn, *batch)


jitted_step = jax.jit(train_step)


def train(state, data, step=jitted_step):
  losses = []
  for batch in zip(*data, strict=True):
    state, loss = step(state, batch)
    losses.append(float(loss))
  return state, losses


def reference(tx, data, bad=OVERFLOW):
  """Plain Flax on the good batches only."""
  state = flax_train_state.TrainState.create(
    apply_fn=None, params=make_params(), tx=tx
  )

  @jax.jit
  def step(state, batch):
    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, *batch))

  for i, batch in enumerate(zip(*data, strict=True)):
    if i != bad:
      state = step(state, batch)
  return state


def assert_close(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), a, b
  )


def frozen_labels(params):
  return {name: "frozen" if name == "b" else "train" for name in params}


OPTIMIZERS = {
  "adamw": lambda: optax.adamw(0.1),
  "frozen": lambda: optax.multi_transform(
    {"train": optax.adam(0.1), "frozen": optax.set_to_zero()}, frozen_labels
  ),
  "inject": lambda: optax.inject_hyperparams(optax.sgd)(
    learning_rate=optax.linear_schedule(0.1, 0.0, 6), momentum=0.9
  ),
  "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
}


@pytest.mark.parametrize("name", ["adamw", "frozen", "inject", "multi_steps"])
def test_skipped_step_equals_training_without_its_batch(name):
  tx = OPTIMIZERS[name]()
  data = batches()
  state, losses = train(create(tx), data)
  wanted = reference(tx, data)
  assert_close(state.params, wanted.params)
  assert_close(state.opt_state, wanted.opt_state)
  assert int(state.step) == int(wanted.step) == 5
  assert not np.isfinite(losses[OVERFLOW])
  assert np.isfinite(np.delete(losses, OVERFLOW)).all()
  assert float(state.wrapper_states["loss_scale"].scale) == 2.0**9


def test_members_of_a_vmapped_ensemble_skip_separately():
  # A batched flag turns the branch into a select: one member's overflow must
  # not hold back the others.
  state = create(optax.adam(0.1))
  states = jax.tree.map(lambda x: jnp.stack([x, x]), state)
  x = np.stack([X, X])
  x[1, 0, 0] = np.inf
  step = jax.jit(jax.vmap(train_step, in_axes=(0, (0, None))))
  states, _ = step(states, (x, Y))
  member, _ = jitted_step(state, (X, Y))
  np.testing.assert_allclose(
    states.params["w"][0], member.params["w"], rtol=1e-6
  )
  np.testing.assert_array_equal(states.params["w"][1], state.params["w"])
  assert states.step.tolist() == [1, 0]
  assert states.wrapper_states["loss_scale"].scale.tolist() == [1024, 512]


def test_clip_by_global_norm_clips_unscaled_gradients():
  # The norm is 5; times the scale it would be 5120, and the result the same,
  # but for a threshold between the two.
  tx = optax.chain(optax.clip_by_global_norm(10.0), optax.sgd(1.0))
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.zeros(2)},
    tx=tx,
    wrappers=[fs.LossScale(1024.0)],
  )
  loss_fn = lambda p: 3 * p["w"][0] + 4 * p["w"][1]
  state, _ = state.minimize(loss_fn)
  np.testing.assert_array_equal(state.params["w"], [-3.0, -4.0])
  state, _ = state.minimize(lambda p: 10 * loss_fn(p))
  np.testing.assert_allclose(state.params["w"], [-9.0, -12.0], rtol=1e-6)


def test_gradients_of_frozen_parameters_are_checked():
  # A NaN in a frozen branch comes from an overflow of the whole as well.
  state = create(OPTIMIZERS["frozen"]())
  grads = {"w": jnp.ones(2), "b": jnp.array(jnp.nan)}
  skipped = state.apply_gradients(grads=grads)
  assert int(skipped.step) == 0
  np.testing.assert_array_equal(skipped.params["w"], [0.5, -0.25])
