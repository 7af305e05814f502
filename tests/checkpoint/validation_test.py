"""A state that cannot be saved raises before anything is written."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs


def create(params):
  state = fs.TrainState.create(
    apply_fn=None, params={"w": jnp.ones(3)}, tx=optax.sgd(0.1)
  )
  return state.replace(params=params)


def deleted():
  array = jnp.ones(3)
  array.delete()
  return array


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda: np.array([1, None]), "numbers, booleans or .* dtype object"),
    (lambda: 3, "must be an array, got 3"),
    (lambda: jax.ShapeDtypeStruct((3,), "int8"), "must be an array, got Shape"),
    (
      lambda: np.ones(2),
      "is float64, which JAX supports only with jax_enable_x64",
    ),
    (deleted, "was deleted: save the state before you donate"),
    (lambda: jnp.ones((0, 3)), r"has no elements, shape \(0, 3\)"),
  ],
)
def test_saving_an_invalid_leaf_raises(tmp_path, make, message):
  state = create({"a": {"b": make()}})
  with fs.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises((TypeError, ValueError), match=message) as e:
      checkpointer.save(1, state)
    assert str(e.value).startswith("state[params/a/b]")
    assert os.listdir(tmp_path) == []


def test_valid_leaves_are_saved(tmp_path):
  params = {"none": None, "scalar": np.float32(2), "key": jax.random.key(3)}
  state = create(params)
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, state)
    restored = checkpointer.restore(state).params
  assert restored["none"] is None
  assert float(restored["scalar"]) == 2.0
  keys = map(jax.random.key_data, (restored["key"], params["key"]))
  np.testing.assert_array_equal(*keys)
