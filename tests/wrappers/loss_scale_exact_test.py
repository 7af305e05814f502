"""The loss scale is exact to the last bit of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.wrappers import LossScaleState


@pytest.mark.parametrize(
  ("growth_factor", "backoff_factor", "seed"),
  [(7.3, None, 0), (1.5, None, 1), (1.5, 0.9, 0), (1.0001, 1 / 3, 1)],
)
def test_scale_equals_a_float32_reference(growth_factor, backoff_factor, seed):
  rule = fs.DynamicLossScale(
    initial_scale=1234.5,
    growth_interval=2,
    growth_factor=growth_factor,
    backoff_factor=backoff_factor,
  )
  finite = np.random.default_rng(seed).random(300) < 0.7
  # The rule again, in NumPy's float32.
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
  # XLA may round differently in a compiled loop than step by step, which
  # loss_scale_test.py has.
  body = lambda s, ok: (new := rule.update(s, ok), new.scale)
  last, looped = jax.jit(lambda s: jax.lax.scan(body, s, finite))(state)
  assert looped.dtype == np.float32
  np.testing.assert_array_equal(looped, np.array(wanted))
  assert len(set(wanted)) > 5
  assert int(last.good_steps) == good
  assert int(last.skipped_steps) == int((~finite).sum())


@pytest.mark.parametrize("growth_factor", [1.7, 3.0, 10.0])
def test_many_scales_at_once_are_divided_as_one_is(growth_factor):
  rule = fs.DynamicLossScale(growth_factor=growth_factor)
  scales = np.random.default_rng(0).uniform(20, 2**20, 500).astype(np.float32)
  zero = jnp.int32(0)

  def back_off(scale):
    state = LossScaleState(scale, zero, zero, zero)
    return rule.update(state, jnp.array(False)).scale

  for way in (jax.vmap(back_off), jax.jit(jax.vmap(back_off))):
    np.testing.assert_array_equal(
      way(scales), scales / np.float32(rule.growth_factor)
    )
