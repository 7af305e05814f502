"""LossScale with parameters that have no gradient, and statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scaled_states import apply_step
from scaled_states import create
from tree_equality import assert_trees_equal

import flaxshard as fs

OWG = "_overwrite_with_gradient"


# Leaves without a gradient.


def partial_optimizers():
  labels = lambda params: jax.tree.map(lambda _: "a", params)
  return {
    "adamw": optax.adamw(0.5, weight_decay=0.1),
    "multi_transform": optax.multi_transform(
      {"a": optax.adam(0.5), "b": optax.set_to_zero()}, labels
    ),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=0.5),
  }


def slots(state, name):
  return [
    x
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
    if jax.tree_util.keystr(path).endswith(f"['{name}']")
  ]


@pytest.mark.parametrize(
  ("name", "wrapped"),
  [("adamw", False), ("multi_transform", True), ("inject", True)],
)
def test_none_gradient_keeps_parameter_and_slots(name, wrapped):
  tx = partial_optimizers()[name]
  params = {"w": jnp.ones(2), "n": jnp.full(2, 3.0)}
  wrappers = [fs.LossScale("dynamic")] if wrapped else []
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers
  )
  # A first step, so that the slots of `n` are not zero.
  state = apply_step(state, {"w": jnp.ones(2), "n": jnp.full(2, -1.0)})
  assert slots(state, "n")
  assert all(np.asarray(x).any() for x in slots(state, "n"))
  new = apply_step(state, {"w": jnp.ones(2), "n": None})
  assert int(new.step) == 2
  np.testing.assert_array_equal(new.params["n"], state.params["n"])
  for a, b in zip(slots(new, "n"), slots(state, "n"), strict=True):
    np.testing.assert_array_equal(a, b)
  assert (new.params["w"] < state.params["w"]).all()
  for a, b in zip(slots(new, "w"), slots(state, "w"), strict=True):
    assert (np.asarray(a) != np.asarray(b)).all()


def test_integer_parameters_and_float0_gradients_pass_through():
  tx = optax.adam(0.5)
  params = {"w": jnp.full(2, 2.0), "i": jnp.array([7, 8])}
  state = create(params, tx, 1024.0)
  bare = tx.init({"w": params["w"]})

  def loss_fn(params):
    return (params["w"] * params["i"]).sum()

  @jax.jit
  def by_hand(state):
    loss = lambda p: state.scale_loss(loss_fn(p))
    grads = jax.grad(loss, allow_int=True)(state.params)
    assert grads["i"].dtype == jax.dtypes.float0
    grads = state.unscale_gradients(grads)
    assert grads["i"].dtype == jax.dtypes.float0
    return state.apply_gradients(grads=grads)

  @jax.jit
  def by_minimize(state):
    return state.minimize(loss_fn)[0]

  updates, _ = tx.update({"w": jnp.array([7.0, 8.0])}, bare, {"w": params["w"]})
  wanted = params["w"] + updates["w"]
  for step in (by_hand, by_minimize):
    new = step(state)
    np.testing.assert_array_equal(new.params["i"], [7, 8])
    assert new.params["i"].dtype == jnp.int32
    np.testing.assert_allclose(new.params["w"], wanted, rtol=1e-6)
    for a, b in zip(slots(new, "i"), slots(state, "i"), strict=True):
      np.testing.assert_array_equal(a, b)
  _, grads = state.value_and_grad(loss_fn)
  assert grads["i"] is None


def test_statistics_replace_parameters():
  params = {"params": {"w": jnp.ones(2)}, OWG: {"scale": jnp.array([1.0])}}
  state = create(params, optax.adam(0.5), 1024.0)
  scaled = {
    "params": {"w": jnp.full(2, 1024.0)},
    OWG: {"scale": jnp.array([3.0])},
  }
  grads = state.unscale_gradients(scaled)
  np.testing.assert_array_equal(grads["params"]["w"], [1.0, 1.0])
  np.testing.assert_array_equal(grads[OWG]["scale"], [3.0])
  new = apply_step(state, grads)
  np.testing.assert_array_equal(new.params[OWG]["scale"], [3.0])
  np.testing.assert_allclose(new.params["params"]["w"], [0.5, 0.5], rtol=1e-5)


def test_skipped_step_keeps_statistics_and_nonfinite_statistics_pass():
  params = {
    "params": {"w": jnp.ones(1), "n": jnp.ones(1)},
    OWG: {"scale": jnp.array([1.0])},
  }
  state = create(params, optax.sgd(0.5, momentum=0.9))
  grads = lambda w, s: {
    "params": {"w": jnp.array([w]), "n": None},
    OWG: {"scale": jnp.array([s])},
  }
  skipped = apply_step(state, grads(jnp.inf, 3.0))
  assert_trees_equal(skipped.params, state.params)
  new = apply_step(skipped, grads(1.0, jnp.inf))
  assert int(new.step) == 1
  assert float(new.params[OWG]["scale"][0]) == np.inf
  assert float(new.params["params"]["w"][0]) == 0.5
  assert float(new.params["params"]["n"][0]) == 1.0
