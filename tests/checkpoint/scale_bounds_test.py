"""Mistake: another loss scale is configured than the checkpoint has."""

import warnings

import jax
import jax.numpy as jnp
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
  ("scale", "fact", "wanted"),
  [
    (fs.DynamicLossScale(4.0, max_scale=8.0), "max_scale=8:", 8.0),
    (
      fs.DynamicLossScale(2.0**17, min_scale=2.0**16),
      "min_scale=65536",
      2.0**16,
    ),
    (128.0, "fixed scale", 128.0),
    # Within the bounds nothing is told.
    ("dynamic", None, 2.0**15),
    (fs.DynamicLossScale(2.0, max_scale=2.0**15), None, 2.0**15),
    (2.0**15, None, 2.0**15),
  ],
)
@pytest.mark.parametrize("abstract", [False, True])
def test_restored_scale_outside_of_the_bounds_is_told(
  path, scale, fact, wanted, abstract
):
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    restored = fs.checkpoint.restore(path, create(scale, abstract))
  assert len(told) == (fact is not None)
  for warning in told:
    assert warning.filename == __file__
    for part in (str(path / "1"), "32768", f"{wanted:g}.", fact):
      assert part in str(warning.message)
  state = restored.wrapper_states["loss_scale"]
  assert (float(state.scale), state.scale.dtype) == (wanted, jnp.float32)
