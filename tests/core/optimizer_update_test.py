"""Flax's update with leaves without a gradient, float8 and mixed dtypes."""

from flax.training import train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax

from flaxshard.core import optimizer_update


def create(params, tx):
  return train_state.TrainState.create(apply_fn=None, params=params, tx=tx)


def test_a_leaf_without_a_gradient_keeps_its_parameter_and_slots():
  # Weight decay and momentum change a parameter also with a zero gradient.
  tx = optax.chain(
    optax.add_decayed_weights(0.5), optax.sgd(0.25, momentum=0.5)
  )
  state = create({"a": jnp.ones(2), "b": jnp.ones(2)}, tx)
  grads = {"a": jnp.ones(2), "b": jnp.ones(2)}
  state = optimizer_update.flax_update(state, grads, {})
  new = optimizer_update.flax_update(state, {**grads, "b": None}, {})
  trace, new_trace = state.opt_state[1][0].trace, new.opt_state[1][0].trace
  np.testing.assert_array_equal(new.params["b"], state.params["b"])
  np.testing.assert_array_equal(new_trace["b"], trace["b"])
  plain = state.apply_gradients(grads=grads)
  np.testing.assert_array_equal(new.params["a"], plain.params["a"])
  assert int(new.step) == 2


def test_with_all_gradients_the_update_is_that_of_flax():
  state = create({"w": jnp.arange(3.0)}, optax.adam(0.1))
  grads = {"w": jnp.ones(3)}
  new = optimizer_update.flax_update(state, grads, {"apply_fn": len})
  plain = state.apply_gradients(grads=grads)
  jax.tree.map(
    np.testing.assert_array_equal,
    (new.step, new.params, new.opt_state),
    (plain.step, plain.params, plain.opt_state),
  )
  assert new.apply_fn is len


def test_float8_parameters_are_updated_in_float32():
  params = {"w": jnp.array([1.0, -2.0], jnp.float8_e4m3fn)}
  state = create(params, optax.sgd(0.25))
  grads = {"w": jnp.array([0.5, 1.0], jnp.float32)}
  new = optimizer_update.flax_update(state, grads, {})
  assert new.params["w"].dtype == jnp.float8_e4m3fn
  np.testing.assert_array_equal(
    new.params["w"], jnp.array([0.875, -2.25], jnp.float8_e4m3fn)
  )


def test_keep_dtypes_casts_to_the_old_dtypes():
  old = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
  new = {"a": jnp.full(2, 3.0), "b": jnp.zeros(2)}
  kept = optimizer_update.keep_dtypes(new, old)
  assert kept["a"].dtype == jnp.float16 and kept["a"].tolist() == [3, 3]
  assert kept["b"] is new["b"]
