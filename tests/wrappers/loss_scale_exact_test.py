"""LossScale: the scale to the last bit, and what float32 cannot tell."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.wrappers import LossScaleState


@pytest.mark.parametrize("growth_factor", [7.3, 1.5, 1.0001])
@pytest.mark.parametrize("backoff_factor", [None, 0.9, 1 / 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_scale_is_exact_to_the_last_bit(
  growth_factor, backoff_factor, seed
):
  rule = fs.DynamicLossScale(
    initial_scale=1234.5,
    growth_interval=2,
    growth_factor=growth_factor,
    backoff_factor=backoff_factor,
  )
  finite = np.random.default_rng(seed).random(300) < 0.7
  # Restated, in float32.
  scale, good, wanted = np.float32(1234.5), 0, []
  growth = np.float32(growth_factor)
  for ok in finite:
    if ok and good + 1 >= 2:
      with np.errstate(over="ignore"):
        grown = scale * growth
      scale, good = (grown if np.isfinite(grown) else scale), 0
    elif ok:
      good += 1
    else:
      lower = (
        scale / growth
        if backoff_factor is None
        else scale * np.float32(backoff_factor)
      )
      scale, good = np.maximum(lower, np.float32(1)), 0
    assert scale.dtype == np.float32
    wanted.append(scale)
  state = LossScaleState(
    jnp.float32(1234.5), jnp.int32(0), jnp.int32(0), jnp.int32(0)
  )
  # Step by step, and in a loop that XLA compiles as one.
  update, one, stepwise = jax.jit(rule.update), state, []
  for ok in finite:
    one = update(one, jnp.array(ok))
    stepwise.append(np.asarray(one.scale))
  body = lambda s, ok: (new := rule.update(s, ok), new.scale)
  last, looped = jax.jit(lambda s: jax.lax.scan(body, s, finite))(state)
  for got in (np.array(stepwise), np.asarray(looped)):
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array(wanted))
  assert len(set(wanted)) > 5
  assert int(last.good_steps) == good
  assert int(last.skipped_steps) == int((~finite).sum())


def test_a_step_backs_off_exactly():
  rule = fs.DynamicLossScale(initial_scale=1234.5, growth_factor=7.3)
  state = fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.ones(1)},
    tx=optax.sgd(1.0),
    wrappers=[fs.LossScale(rule)],
  )
  step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
  wanted = np.float32(1234.5)
  for _ in range(3):
    state = step(state, {"w": jnp.array([jnp.inf])})
    wanted = wanted / np.float32(7.3)
    assert np.asarray(state.wrapper_states["loss_scale"].scale) == wanted


@pytest.mark.parametrize(
  ("kwargs", "match"),
  [
    ({"min_scale": 1e-40}, "min_scale must be positive and finite, a normal"),
    ({"initial_scale": 1e-40, "min_scale": 1e-40}, "initial_scale must be pos"),
    ({"growth_factor": 1 + 1e-9}, "growth_factor must be greater than 1"),
    ({"backoff_factor": 1 - 1e-9}, "backoff_factor must be between 0 and 1"),
    ({"backoff_factor": 1e-40}, "backoff_factor must be positive and finite"),
  ],
)
def test_rules_that_float32_cannot_tell(kwargs, match):
  with pytest.raises(ValueError, match=f"DynamicLossScale: {match}"):
    fs.DynamicLossScale(**kwargs)


@pytest.mark.parametrize("value", [1e-40, np.float32(1e-40), 1.17e-38])
def test_subnormal_scales_are_refused(value):
  with pytest.raises(ValueError, match=r"LossScale: scale must be .* normal"):
    fs.LossScale(value)
  with pytest.raises(ValueError, match=r"loss_scale must be .* a normal"):
    fs.FixedLossScale(value)
  tiny = float(np.finfo(np.float32).tiny)
  assert fs.LossScale(tiny).scale == tiny
