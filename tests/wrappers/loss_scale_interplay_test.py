"""LossScale with optax transformations and vmap."""

from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scaled_states import create
from tree_equality import assert_trees_close

import flaxshard as fs

X = np.array([[1.0, 2.0], [-1.0, 0.5], [0.25, -2.0], [3.0, 1.0]], np.float32)
Y = np.array([1.0, -1.0, 0.5, 2.0], np.float32)
PARAMS = {"w": jnp.array([0.5, -0.25]), "b": jnp.array(0.125)}
SCALE = fs.DynamicLossScale(2.0**10)


def batches():
  """Yields six batches; the gradients of the third one are not finite."""
  for i in range(6):
    x = X * np.float32(1 + i / 6)
    if i == 2:
      x[1, 0] = np.inf
    yield x, Y


def loss_fn(params, x, y):
  return ((x @ params["w"] + params["b"] - y) ** 2).mean()


def train_step(state, batch):
  return state.minimize(loss_fn, *batch)


jitted_step = jax.jit(train_step)


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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_step_equals_training_without_its_batch(name):
  tx = OPTIMIZERS[name]()
  state = create(PARAMS, tx, SCALE)
  wanted = flax_train_state.TrainState.create(
    apply_fn=None, params=PARAMS, tx=tx
  )
  apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  for batch in batches():
    state, loss = jitted_step(state, batch)
    assert np.isfinite(loss) == np.isfinite(batch[0]).all()
    if np.isfinite(loss):
      wanted = apply(wanted, jax.grad(loss_fn)(wanted.params, *batch))
  assert_trees_close(state.params, wanted.params)
  assert_trees_close(state.opt_state, wanted.opt_state)
  assert int(state.step) == int(wanted.step) == 5
  assert float(state.wrapper_states["loss_scale"].scale) == 2.0**9


def test_members_of_a_vmapped_ensemble_skip_separately():
  # A batched flag turns the branch into a select: one member's overflow must
  # not hold back the others.
  state = create(PARAMS, optax.adam(0.1), SCALE)
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
  state = create({"w": jnp.zeros(2)}, tx, 1024.0)
  loss_fn = lambda p: 3 * p["w"][0] + 4 * p["w"][1]
  state, _ = state.minimize(loss_fn)
  np.testing.assert_array_equal(state.params["w"], [-3.0, -4.0])
  state, _ = state.minimize(lambda p: 10 * loss_fn(p))
  np.testing.assert_allclose(state.params["w"], [-9.0, -12.0], rtol=1e-6)


def test_gradients_of_frozen_parameters_are_checked():
  # A NaN in a frozen branch comes from an overflow of the whole as well.
  state = create(PARAMS, OPTIMIZERS["frozen"](), SCALE)
  grads = {"w": jnp.ones(2), "b": jnp.array(jnp.nan)}
  skipped = state.apply_gradients(grads=grads)
  assert int(skipped.step) == 0
  np.testing.assert_array_equal(skipped.params["w"], [0.5, -0.25])
