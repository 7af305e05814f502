"""Loss scaling: parity with Keras, the rules, and what peers get wrong."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
from scaled_states import apply_step
from scaled_states import create
from scaled_states import scale_state

import flaxshard as fs
from flaxshard.wrappers import LossScaleState

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "testdata/loss_scale.json").read_text()
)
FLOAT32_MAX = float(np.finfo(np.float32).max)

# Parity.

# Keras' epsilon is 1e-7; where it is added (Keras: to the root of the second
# moment before bias correction) makes a difference below the tolerance.
OPTIMIZERS = {
  "sgd": optax.sgd,
  "momentum": functools.partial(optax.sgd, momentum=0.9),
  "adam": functools.partial(optax.adam, eps=1e-7),
}


@pytest.mark.filterwarnings("ignore:LossScale. the scale is at its floor")
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["optimizer"])
def test_parity_with_keras(case):
  rule = fs.DynamicLossScale(
    initial_scale=case["initial_scale"],
    growth_interval=case["growth_interval"],
    growth_factor=case["factor"],
  )
  tx = OPTIMIZERS[case["optimizer"]](case["lr"])
  state = create({"v": np.array(case["var0"], np.float32)}, tx, rule)
  for i, golden in enumerate(case["steps"]):
    grads = np.array([float(g) for g in golden["grads"]], np.float32)
    assert np.isfinite(grads).all() == golden["finite"]
    state = apply_step(state, {"v": grads})
    got = scale_state(state)
    assert np.asarray(got.scale) == np.float32(golden["scale"]), i
    assert int(got.good_steps) == golden["good_steps"], i
    assert int(state.step) == golden["iterations"], i
    np.testing.assert_allclose(
      state.params["v"], golden["var"], rtol=2e-5, atol=2e-5, err_msg=str(i)
    )
  skipped = sum(not golden["finite"] for golden in case["steps"])
  assert int(scale_state(state).skipped_steps) == skipped


def test_golden_file_has_every_optimizer_and_bad_steps():
  cases = GOLDEN["cases"]
  assert len(cases) == 12
  assert {c["optimizer"] for c in cases} == set(OPTIMIZERS)
  assert any(not s["finite"] for c in cases for s in c["steps"])


# The rule.


def scales(rule, pattern):
  """Returns the scale after each good (`.`) and bad (`x`) step."""
  state = LossScaleState(
    jnp.float32(rule.initial_scale), jnp.int32(0), jnp.int32(0), jnp.int32(0)
  )
  update = jax.jit(rule.update)
  out = []
  for c in pattern:
    state = update(state, jnp.array(c == "."))
    out.append(float(state.scale))
  return out, state


def test_scale_grows_and_backs_off():
  rule = fs.DynamicLossScale(initial_scale=8.0, growth_interval=2)
  out, state = scales(rule, "...x..x.")
  assert out == [8, 16, 16, 8, 8, 16, 8, 8]
  assert (int(state.good_steps), int(state.skipped_steps)) == (1, 2)
  assert int(state.bad_steps) == 0


@pytest.mark.parametrize(
  ("hysteresis", "pattern", "wanted"),
  [
    # The second bad step in a row and each further one back off.
    (2, "xxx.xx", [64, 32, 16, 16, 16, 8]),
    # A good step starts the count of bad steps again.
    (3, "xx.xxxx", [64, 64, 64, 64, 64, 32, 16]),
  ],
)
def test_hysteresis_delays_backoff(hysteresis, pattern, wanted):
  rule = fs.DynamicLossScale(initial_scale=64.0, hysteresis=hysteresis)
  out, state = scales(rule, pattern)
  assert out == wanted
  # Every bad step is skipped, whether or not the scale moved.
  assert int(state.skipped_steps) == pattern.count("x")


def test_bad_step_within_hysteresis_resets_good_steps():
  rule = fs.DynamicLossScale(initial_scale=4.0, growth_interval=3, hysteresis=2)
  out, state = scales(rule, "..x..")
  assert out == [4, 4, 4, 4, 4]
  assert int(state.good_steps) == 2
  assert scales(rule, "..x...")[0][-1] == 8


def test_train_step_skips_within_hysteresis():
  rule = fs.DynamicLossScale(initial_scale=8.0, hysteresis=2)
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), rule)
  good, bad = {"w": jnp.array([0.25])}, {"w": jnp.array([jnp.nan])}
  seen = []
  for grads in (bad, good, bad, bad):
    state = apply_step(state, grads)
    seen.append((float(scale_state(state).scale), float(state.params["w"][0])))
  assert seen == [(8, 1.0), (8, 0.75), (8, 0.75), (4, 0.75)]
  assert int(state.step) == 1


def test_scale_stays_at_min_scale():
  rule = fs.DynamicLossScale(
    initial_scale=8.0, min_scale=1.5, backoff_factor=0.25
  )
  assert scales(rule, "xxx")[0] == [2, 1.5, 1.5]
  rule = fs.DynamicLossScale(initial_scale=1.0, min_scale=0.25)
  assert scales(rule, "xxx")[0] == [0.5, 0.25, 0.25]


def test_scale_does_not_grow_beyond_max_scale():
  rule = fs.DynamicLossScale(
    initial_scale=8.0, max_scale=100.0, growth_factor=4.0, growth_interval=1
  )
  out, state = scales(rule, "...")
  assert out == [32, 32, 32]  # 128 is too large: not clamped to 100
  assert int(state.good_steps) == 0
  rule = fs.DynamicLossScale(
    initial_scale=8.0, max_scale=16.0, growth_interval=1
  )
  assert scales(rule, "..")[0] == [16, 16]


def test_scale_does_not_grow_to_infinity():
  rule = fs.DynamicLossScale(initial_scale=2.0**126, growth_interval=1)
  assert scales(rule, "...")[0] == [2.0**127] * 3


def test_good_steps_reset_even_if_the_scale_cannot_grow():
  rule = fs.DynamicLossScale(initial_scale=2.0**127, growth_interval=2)
  counts = [int(scales(rule, "." * n)[1].good_steps) for n in range(1, 5)]
  assert counts == [1, 0, 1, 0]


def test_growth_and_backoff_factors():
  rule = fs.DynamicLossScale(
    initial_scale=100.0,
    growth_interval=1,
    growth_factor=1.5,
    backoff_factor=0.9,
  )
  out, _ = scales(rule, ".x")
  assert out == [150.0, float(np.float32(150) * np.float32(0.9))]

  # Divided, as Keras does: 1 / 3 is not a float32.
  rule = fs.DynamicLossScale(initial_scale=300.0, growth_factor=3.0)
  assert scales(rule, "x")[0] == [100.0]


def test_default_arguments():
  rule = fs.DynamicLossScale()
  assert rule.initial_scale == 2.0**15
  assert rule.growth_interval == 2000
  assert rule.growth_factor == 2.0
  assert rule.backoff_factor is None
  assert rule.min_scale == 1.0
  assert rule.max_scale == FLOAT32_MAX
  assert rule.hysteresis == 1
  wrapper = fs.LossScale()
  assert wrapper.scale == "dynamic"
  assert wrapper.rule == rule
  assert not wrapper.warn_at_floor
  assert wrapper.policy is None


@pytest.mark.parametrize(
  ("field", "value", "error"),
  [
    ("initial_scale", 0.0, ValueError),
    ("initial_scale", "8", TypeError),
    ("initial_scale", 0.5, ValueError),  # below min_scale
    ("max_scale", 4.0, ValueError),  # below initial_scale
    ("growth_interval", 0, ValueError),
    ("growth_factor", 1 + 1e-9, ValueError),  # 1 in float32
    ("backoff_factor", 1 - 1e-9, ValueError),  # 1 in float32
    ("backoff_factor", 1e-40, ValueError),  # subnormal in float32
    ("hysteresis", 0, ValueError),
  ],
)
def test_invalid_dynamic_scale_raises(field, value, error):
  with pytest.raises(error, match=f"DynamicLossScale.*{field}.*{value!r}"):
    fs.DynamicLossScale(**{field: value})


# The modes.


@pytest.mark.parametrize("value", [0, 1e39, 1e-40])
def test_invalid_fixed_scale_raises(value):
  with pytest.raises(ValueError, match=r"LossScale: scale"):
    fs.LossScale(value)
  with pytest.raises(ValueError, match=r"FixedLossScale: loss_scale"):
    fs.FixedLossScale(value)


def test_smallest_normal_float32_is_a_scale():
  tiny = float(np.finfo(np.float32).tiny)
  assert fs.LossScale(tiny).scale == tiny


def test_invalid_arguments_raise():
  with pytest.raises(ValueError, match=r"'dynamci'.*Did you mean 'dynamic'"):
    fs.LossScale("dynamci")
  for value in (True, None, [1.0], jnp.float32):
    with pytest.raises(TypeError, match=r"scale=.*'dynamic', 'auto'"):
      fs.LossScale(value)
  with pytest.raises(ValueError, match="'half'"):
    fs.LossScale("auto", policy="half")
  with pytest.raises(TypeError, match=r"policy .* 16"):
    fs.LossScale("auto", policy=16)
  with pytest.raises(TypeError, match=r"warn_at_floor .* 1"):
    fs.LossScale(warn_at_floor=1)


def test_equal_arguments_make_equal_wrappers():
  # Wrappers are static fields: an unequal one would recompile the step.
  assert fs.LossScale(1024) == fs.LossScale(np.float32(1024))
  assert hash(fs.LossScale(1024)) == hash(fs.LossScale(1024.0))
  assert fs.LossScale(fs.DynamicLossScale(8)) == fs.LossScale(
    fs.DynamicLossScale(8.0)
  )
  assert fs.LossScale("auto", policy="mixed_float16") == fs.LossScale(
    "auto", policy=fs.Policy("mixed_float16")
  )


@pytest.mark.parametrize("scale", ["auto", 8])
def test_init_returns_strongly_typed_scalars(scale):
  params = {"w": jnp.ones(2, jnp.float16)}
  got = scale_state(create(params, optax.sgd(0.1), scale))
  wanted = 2.0**15 if isinstance(scale, str) else 8.0
  assert float(got.scale) == wanted
  assert got.scale.dtype == jnp.float32
  for count in (got.good_steps, got.skipped_steps, got.bad_steps):
    assert count.dtype == jnp.int32
    assert int(count) == 0
  assert not any(x.weak_type for x in got)


@pytest.mark.parametrize(
  ("dtype", "policy", "on"),
  [
    ("bfloat16", None, False),
    ("float16", None, True),
    ("float32", "mixed_float16", True),
    ("float32", "mixed_bfloat16", False),
  ],
)
def test_auto_scales_for_float16_only(dtype, policy, on):
  params = {"a": jnp.ones(1), "b": jnp.ones(2, dtype)}
  state = create(params, optax.sgd(0.1), "auto", policy=policy)
  assert (scale_state(state) != ()) == on
  loss = jnp.float32(3.0)
  assert float(state.scale_loss(loss)) == (3.0 * 2**15 if on else 3.0)


def test_auto_without_float16_does_not_skip():
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), "auto")
  assert scale_state(state) == ()
  state = apply_step(state, {"w": jnp.array([jnp.inf])})
  assert float(state.params["w"][0]) == -np.inf
  assert int(state.step) == 1


def test_fixed_scale_never_skips():
  state = create({"w": jnp.ones(2)}, optax.sgd(0.5), fs.FixedLossScale(16))
  assert float(state.scale_loss(jnp.float32(2.0))) == 32.0
  grads = state.unscale_gradients({"w": jnp.array([16.0, 8.0])})
  np.testing.assert_array_equal(grads["w"], [1.0, 0.5])
  state = apply_step(state, {"w": jnp.array([1.0, jnp.inf])})
  np.testing.assert_array_equal(state.params["w"], [0.5, -np.inf])
  assert int(state.step) == 1
  assert scale_state(state) == (16.0, 0, 0, 0)


def test_configured_fixed_scale_replaces_the_one_in_the_state():
  # A checkpoint may hold another scale.
  state = create({"w": jnp.ones(1)}, optax.sgd(0.5), 16)
  old = scale_state(state)._replace(scale=jnp.float32(2.0))
  state = state.replace(wrapper_states={"loss_scale": old})
  assert float(state.scale_loss(jnp.float32(1.0))) == 16.0
  state = apply_step(state, {"w": jnp.ones(1)})
  assert float(scale_state(state).scale) == 16.0


def test_partition_specs_are_replicated():
  wrapper = fs.LossScale()
  got = wrapper.init({}, None)
  specs = wrapper.partition_specs(got)
  assert specs == LossScaleState(P(), P(), P(), P())
  assert wrapper.partition_specs(()) == ()
