"""Mistake: another loss scale is configured than the checkpoint has."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs


def create(scale, abstract=False):
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.ones(3)},
    tx=optax.sgd(0.1),
    wrappers=[fs.LossScale(scale)],
  )
  return jax.eval_shape(lambda: state) if abstract else state


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  path = tmp_path_factory.mktemp("saved") / "checkpoints"
  with fs.Checkpointer(path) as checkpointer:
    checkpointer.save(1, create("dynamic"))  # its scale is 32768
  return path


@pytest.mark.parametrize(
  ("scale", "facts", "wanted"),
  [
    (
      fs.DynamicLossScale(initial_scale=4.0, max_scale=8.0),
      ["min_scale=1 ", "max_scale=8:"],
      8.0,
    ),
    (
      fs.DynamicLossScale(initial_scale=2.0**17, min_scale=2.0**16),
      ["min_scale=65536"],
      2.0**16,
    ),
    (128.0, ["fixed scale"], 128.0),
  ],
)
def test_restored_scale_outside_of_the_bounds_is_told(
  path, scale, facts, wanted
):
  with pytest.warns(UserWarning, match="the saved scale 32768") as told:
    restored = fs.checkpoint.restore(path, create(scale))
  (message,) = [str(w.message) for w in told]
  assert told[0].filename == __file__
  for fact in (str(path / "1"), f"goes on with {wanted:g}.", *facts):
    assert fact in message
  state = restored.wrapper_states["loss_scale"]
  assert (float(state.scale), state.scale.dtype) == (wanted, jnp.float32)
  # The first step has that scale.
  state, _ = restored.minimize(lambda p: p["w"].sum())
  np.testing.assert_allclose(state.params["w"], np.full(3, 0.9), rtol=1e-6)


def test_restored_scale_within_the_bounds_is_not_told(path):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for scale in (
      "dynamic",
      fs.DynamicLossScale(initial_scale=2.0, max_scale=2.0**15),
      2.0**15,
    ):
      for abstract in (False, True):
        restored = fs.checkpoint.restore(path, create(scale, abstract))
        assert float(restored.wrapper_states["loss_scale"].scale) == 2.0**15
