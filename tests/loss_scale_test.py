"""Loss scaling: parity with Keras, the rules, and what peers get wrong."""

import functools
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.wrappers import LossScaleState

OWG = "_overwrite_with_gradient"
GOLDEN = json.loads(
  (pathlib.Path(__file__).parent / "testdata/loss_scale.json").read_text()
)
FLOAT32_MAX = float(np.finfo(np.float32).max)

# Compiled once for each kind of state.
apply_step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))


def create(params, tx, scale="dynamic", **kwargs):
  return fs.TrainState.create(
    apply_fn=None,
    params=params,
    tx=tx,
    wrappers=[fs.LossScale(scale, **kwargs)],
  )


def scale_state(state):
  return state.wrapper_states["loss_scale"]


def assert_trees_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


# Parity.

# Keras' epsilon is 1e-7; where it is added (Keras: to the root of the second
# moment before its bias is corrected) is a difference below the tolerance.
OPTIMIZERS = {
  "sgd": optax.sgd,
  "momentum": functools.partial(optax.sgd, momentum=0.9),
  "adam": functools.partial(optax.adam, eps=1e-7),
}


@pytest.mark.filterwarnings("ignore:LossScale. the scale stands at its floor")
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


def test_the_golden_file_covers_what_it_should():
  cases = GOLDEN["cases"]
  assert len(cases) == 12
  assert {c["optimizer"] for c in cases} == set(OPTIMIZERS)
  assert any(not s["finite"] for c in cases for s in c["steps"])


# The rule.


def scales(rule, pattern):
  """The scale after each of some good (`.`) and bad (`x`) steps."""
  state = LossScaleState(
    jnp.float32(rule.initial_scale), jnp.int32(0), jnp.int32(0), jnp.int32(0)
  )
  update = jax.jit(rule.update)
  out = []
  for c in pattern:
    state = update(state, jnp.array(c == "."))
    out.append(float(state.scale))
  return out, state


def test_growth_and_backoff():
  rule = fs.DynamicLossScale(initial_scale=8.0, growth_interval=2)
  out, state = scales(rule, "...x..x.")
  assert out == [8, 16, 16, 8, 8, 16, 8, 8]
  assert (int(state.good_steps), int(state.skipped_steps)) == (1, 2)
  assert int(state.bad_steps) == 0


@pytest.mark.parametrize(
  ("hysteresis", "pattern", "wanted"),
  [
    (1, "xx.x", [32, 16, 16, 8]),
    # The second bad step in a row and each further one back off.
    (2, "xxx.xx", [64, 32, 16, 16, 16, 8]),
    # A good step starts the count anew.
    (2, "x.x.x", [64, 64, 64, 64, 64]),
    (3, "xx.xxxx", [64, 64, 64, 64, 64, 32, 16]),
  ],
)
def test_hysteresis(hysteresis, pattern, wanted):
  rule = fs.DynamicLossScale(initial_scale=64.0, hysteresis=hysteresis)
  out, state = scales(rule, pattern)
  assert out == wanted
  # Every bad step is skipped, whether or not the scale moved.
  assert int(state.skipped_steps) == pattern.count("x")


def test_a_bad_step_within_hysteresis_zeroes_good_steps():
  rule = fs.DynamicLossScale(initial_scale=4.0, growth_interval=3, hysteresis=2)
  out, state = scales(rule, "..x..")
  assert out == [4, 4, 4, 4, 4]
  assert int(state.good_steps) == 2
  assert scales(rule, "..x...")[0][-1] == 8


def test_hysteresis_in_the_train_step():
  rule = fs.DynamicLossScale(initial_scale=8.0, hysteresis=2)
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), rule)
  good, bad = {"w": jnp.array([0.25])}, {"w": jnp.array([jnp.nan])}
  seen = []
  for grads in (bad, good, bad, bad):
    state = apply_step(state, grads)
    seen.append((float(scale_state(state).scale), float(state.params["w"][0])))
  assert seen == [(8, 1.0), (8, 0.75), (8, 0.75), (4, 0.75)]
  assert int(state.step) == 1


def test_min_scale_is_a_floor():
  rule = fs.DynamicLossScale(
    initial_scale=8.0, min_scale=1.5, backoff_factor=0.25
  )
  assert scales(rule, "xxx")[0] == [2, 1.5, 1.5]


def test_min_scale_below_one():
  rule = fs.DynamicLossScale(initial_scale=1.0, min_scale=0.25)
  assert scales(rule, "xxx")[0] == [0.5, 0.25, 0.25]


def test_max_scale_is_not_passed_and_not_clamped_to():
  rule = fs.DynamicLossScale(
    initial_scale=8.0, max_scale=100.0, growth_factor=4.0, growth_interval=1
  )
  out, state = scales(rule, "...")
  assert out == [32, 32, 32]  # 128 would be too much, so it stays
  assert int(state.good_steps) == 0


def test_max_scale_may_be_reached():
  rule = fs.DynamicLossScale(
    initial_scale=8.0, max_scale=16.0, growth_interval=1
  )
  assert scales(rule, "..")[0] == [16, 16]


def test_growth_stops_where_float32_ends():
  rule = fs.DynamicLossScale(initial_scale=2.0**126, growth_interval=1)
  assert scales(rule, "...")[0] == [2.0**127] * 3


def test_the_counter_is_zeroed_even_where_the_scale_cannot_grow():
  rule = fs.DynamicLossScale(initial_scale=2.0**127, growth_interval=2)
  counts = [int(scales(rule, "." * n)[1].good_steps) for n in range(1, 5)]
  assert counts == [1, 0, 1, 0]


def test_factors_other_than_two():
  rule = fs.DynamicLossScale(
    initial_scale=100.0,
    growth_interval=1,
    growth_factor=1.5,
    backoff_factor=0.9,
  )
  out, _ = scales(rule, ".x")
  assert out == [150.0, float(np.float32(150) * np.float32(0.9))]


def test_backoff_is_by_default_the_inverse_of_growth():
  # Divided, as Keras does: 1 / 3 is not a float32.
  rule = fs.DynamicLossScale(initial_scale=300.0, growth_factor=3.0)
  assert scales(rule, "x")[0] == [100.0]


def test_defaults():
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
  assert wrapper.warn_at_floor
  assert wrapper.policy is None


@pytest.mark.parametrize(
  ("kwargs", "error", "match"),
  [
    ({"initial_scale": 0.0}, ValueError, "initial_scale must be positive"),
    ({"initial_scale": np.inf}, ValueError, "initial_scale must be positive"),
    ({"initial_scale": 0.5}, ValueError, "between min_scale=1.0 and"),
    ({"initial_scale": 8.0, "max_scale": 4.0}, ValueError, "max_scale=4.0"),
    ({"initial_scale": "8"}, TypeError, "initial_scale must be a number"),
    ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1"),
    ({"growth_interval": 2.0}, TypeError, "growth_interval must be an int"),
    ({"growth_interval": True}, TypeError, "growth_interval must be an int"),
    ({"growth_factor": 1.0}, ValueError, "growth_factor must be greater"),
    ({"growth_factor": np.nan}, ValueError, "growth_factor must be positive"),
    ({"backoff_factor": 1.0}, ValueError, "backoff_factor must be between"),
    ({"backoff_factor": 0.0}, ValueError, "backoff_factor must be positive"),
    ({"min_scale": -1.0}, ValueError, "min_scale must be positive"),
    ({"hysteresis": 0}, ValueError, "hysteresis must be at least 1"),
  ],
)
def test_wrong_rules(kwargs, error, match):
  with pytest.raises(error, match=match):
    fs.DynamicLossScale(**kwargs)


# The modes.


@pytest.mark.parametrize("value", [0, -1.0, np.inf, np.nan, 1e39, 1e-60])
def test_fixed_scales_are_positive_and_finite(value):
  with pytest.raises(ValueError, match="must be positive and finite"):
    fs.LossScale(value)
  with pytest.raises(ValueError, match="must be positive and finite"):
    fs.FixedLossScale(value)


def test_wrong_modes():
  with pytest.raises(ValueError, match="'dynamci'; allowed: 'dynamic', 'auto'"):
    fs.LossScale("dynamci")
  for value in (True, None, [1.0], jnp.float32):
    with pytest.raises(TypeError, match="allowed: 'dynamic', 'auto'"):
      fs.LossScale(value)
  with pytest.raises(ValueError, match="Policy: unknown name 'half'"):
    fs.LossScale("auto", policy="half")
  with pytest.raises(TypeError, match="policy must be a Policy"):
    fs.LossScale("auto", policy=16)
  with pytest.raises(TypeError, match="warn_at_floor must be a bool"):
    fs.LossScale(warn_at_floor=1)


def test_wrappers_are_values():
  # The state is static in its wrappers: equal ones must not recompile.
  assert fs.LossScale(1024) == fs.LossScale(np.float32(1024))
  assert hash(fs.LossScale(1024)) == hash(fs.LossScale(1024.0))
  assert fs.LossScale(fs.DynamicLossScale(8)) == fs.LossScale(
    fs.DynamicLossScale(8.0)
  )
  assert fs.LossScale("auto", policy="mixed_float16") == fs.LossScale(
    "auto", policy=fs.Policy("mixed_float16")
  )


@pytest.mark.parametrize("scale", ["dynamic", "auto", 8, fs.FixedLossScale(8)])
def test_first_state(scale):
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
    ("float32", None, False),
    ("bfloat16", None, False),
    ("float16", None, True),
    ("float32", "mixed_float16", True),
    ("float32", "mixed_bfloat16", False),
    ("float32", "float32", False),
  ],
)
def test_auto(dtype, policy, on):
  params = {"a": jnp.ones(1), "b": jnp.ones(2, dtype)}
  state = create(params, optax.sgd(0.1), "auto", policy=policy)
  assert (scale_state(state) != ()) == on
  loss = jnp.float32(3.0)
  assert float(state.scale_loss(loss)) == (3.0 * 2**15 if on else 3.0)


def test_auto_off_does_not_skip():
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), "auto")
  assert scale_state(state) == ()
  state = apply_step(state, {"w": jnp.array([jnp.inf])})
  assert float(state.params["w"][0]) == -np.inf
  assert int(state.step) == 1


@pytest.mark.parametrize("scale", [16, fs.FixedLossScale(16)])
def test_a_fixed_scale_scales_and_never_skips(scale):
  state = create({"w": jnp.ones(2)}, optax.sgd(0.5), scale)
  assert float(state.scale_loss(jnp.float32(2.0))) == 32.0
  grads = state.unscale_gradients({"w": jnp.array([16.0, 8.0])})
  np.testing.assert_array_equal(grads["w"], [1.0, 0.5])
  state = apply_step(state, {"w": jnp.array([1.0, jnp.inf])})
  np.testing.assert_array_equal(state.params["w"], [0.5, -np.inf])
  assert int(state.step) == 1
  assert scale_state(state) == (16.0, 0, 0, 0)


def test_a_fixed_scale_is_the_configured_one():
  # A checkpoint of a run with another scale must not decide it.
  state = create({"w": jnp.ones(1)}, optax.sgd(0.5), 16)
  old = scale_state(state)._replace(scale=jnp.float32(2.0))
  state = state.replace(wrapper_states={"loss_scale": old})
  assert float(state.scale_loss(jnp.float32(1.0))) == 16.0
  state = apply_step(state, {"w": jnp.ones(1)})
  assert float(scale_state(state).scale) == 16.0


def test_partition_specs_are_replicated_scalars():
  wrapper = fs.LossScale()
  got = wrapper.init({}, None)
  specs = wrapper.partition_specs(got)
  assert specs == LossScaleState(P(), P(), P(), P())
  assert wrapper.partition_specs(()) == ()


# Pitfall: scaling in another precision than float32.


def half_loss(params, x):
  # float16 compute and a float32 loss; the mean keeps cotangents in range.
  y = params["w"].astype(jnp.float16) * x
  return y.astype(jnp.float32).mean()


def test_small_float16_gradients_survive():
  # 2**-12 / 8 times 2**-12 is 2**-27: under float16's smallest number.
  x = jnp.full(8, 2.0**-12, jnp.float16)
  params = {"w": jnp.ones(8)}

  def loss_fn(params, x):
    return half_loss(params, x) * jnp.float32(2.0**-12)

  bare = jax.grad(loss_fn)(params, x)
  assert (np.asarray(bare["w"]) == 0).all()
  state = create(params, optax.sgd(1.0), 2.0**16)
  loss, grads = jax.jit(lambda s, x: s.value_and_grad(loss_fn, x))(state, x)
  assert float(loss) == 2.0**-24
  assert grads["w"].dtype == jnp.float32
  np.testing.assert_array_equal(grads["w"], np.full(8, 2.0**-27, np.float32))


@pytest.mark.parametrize("power", [16, 127])
def test_a_scaled_loss_does_not_overflow(power):
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), 2.0**power)
  # Neither number is one in float16.
  for dtype in ("float16", "bfloat16", "float32"):
    scaled = state.scale_loss(jnp.ones((), dtype))
    assert scaled.dtype == jnp.float32
    assert float(scaled) == 2.0**power


def test_a_scale_beyond_float16_with_float16_compute():
  state = create({"w": jnp.full(8, 2.0)}, optax.sgd(1.0), 2.0**16)
  loss, grads = state.value_and_grad(half_loss, jnp.full(8, 2.0, jnp.float16))
  assert float(loss) == 4.0  # 2**18 when scaled
  np.testing.assert_array_equal(grads["w"], np.full(8, 0.25))


def test_the_largest_scale_with_float16_compute():
  state = create({"w": jnp.full(8, 2.0)}, optax.sgd(1.0), 2.0**127)

  def loss_fn(params, x):
    return half_loss(params, x) * 2.0**-120

  x = jnp.full(8, 2.0, jnp.float16)
  loss, grads = jax.jit(lambda s, x: s.value_and_grad(loss_fn, x))(state, x)
  assert float(loss) == 2.0**-118
  np.testing.assert_array_equal(grads["w"], np.full(8, 2.0**-122))


@pytest.mark.parametrize("jit", [False, True])
def test_unscaling_the_largest_scale_is_exact(jit):
  # The reciprocal of 2**127 is subnormal and would be flushed to zero.
  state = create({"w": jnp.ones(3)}, optax.sgd(1.0), 2.0**127)
  unscale = lambda state, grads: state.unscale_gradients(grads)
  unscale = jax.jit(unscale) if jit else unscale
  scaled = np.array([1.0, -1.5, 2.0**-20], np.float32) * np.float32(2.0**127)
  np.testing.assert_array_equal(
    unscale(state, {"w": scaled})["w"], [1.0, -1.5, 2.0**-20]
  )


def test_the_reported_loss_is_not_touched_by_the_scale():
  # 1000 * 2**127 overflows; gradients are fine, and so is the loss reported.
  state = create({"w": jnp.array([1000.0])}, optax.sgd(1.0), 2.0**127)
  loss, grads = state.value_and_grad(lambda p: p["w"].sum())
  assert float(loss) == 1000.0
  assert float(grads["w"][0]) == 1.0


def test_float16_gradients_are_unscaled_in_float32():
  state = create({"w": jnp.ones(1, jnp.float16)}, optax.sgd(1.0), 2.0**16)
  grads = state.unscale_gradients({"w": jnp.ones(1, jnp.float16)})
  assert grads["w"].dtype == jnp.float32
  assert float(grads["w"][0]) == 2.0**-16


def test_complex_gradients_are_unscaled_in_both_parts():
  state = create({"w": jnp.ones(1, jnp.complex64)}, optax.sgd(1.0), 4.0)
  grads = state.unscale_gradients({"w": jnp.array([4.0 + 8.0j], jnp.complex64)})
  assert complex(grads["w"][0]) == 1 + 2j


# Pitfall: a skipped step that costs a copy of the state, or half happens.


def mlp_state(wrappers):
  key = jax.random.key(0)
  params = {
    f"w{i}": jax.random.normal(jax.random.fold_in(key, i), (512, 512)) / 32
    for i in range(3)
  }
  return fs.TrainState.create(
    apply_fn=None, params=params, tx=optax.adam(1e-3), wrappers=wrappers
  )


def mlp_loss(params, x):
  for w in params.values():
    x = jnp.tanh(x @ w)
  return (x**2).mean()


def compiled_mlp_step(wrappers):
  step = jax.jit(lambda s, x: s.minimize(mlp_loss, x), donate_argnums=0)
  x = jnp.ones((4, 512))
  return step.lower(mlp_state(wrappers), x).compile()


def test_a_donated_adam_state_is_updated_in_place():
  bare = compiled_mlp_step([]).memory_analysis()
  ours = compiled_mlp_step([fs.LossScale("dynamic")])
  memory = ours.memory_analysis()
  gradients = 3 * 512 * 512 * 4
  # Selecting after the fact would take a copy of the state: three times this.
  assert memory.temp_size_in_bytes <= bare.temp_size_in_bytes + 1.1 * gradients
  # All of the state is donated: the outputs lie where the inputs lay.
  assert memory.alias_size_in_bytes >= 3 * gradients
  assert "conditional(" in ours.as_text()


def test_a_fixed_scale_needs_no_conditional():
  assert "conditional(" not in compiled_mlp_step([fs.LossScale(8)]).as_text()


def test_nothing_but_the_scale_moves_on_a_skipped_step():
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adam(optax.linear_schedule(1.0, 0.0, 4)),
  )
  state = fs.TrainState.create(
    apply_fn=None,
    params={"a": jnp.ones(2), "b": jnp.ones(3)},
    tx=tx,
    wrappers=[fs.LossScale("dynamic")],
    batch_stats={"mean": jnp.zeros(2)},
  )
  step = jax.jit(
    lambda s, g, stats: s.apply_gradients(grads=g, batch_stats=stats)
  )
  good = {"a": jnp.ones(2), "b": jnp.ones(3)}
  state = step(state, good, {"mean": jnp.full(2, 5.0)})
  assert int(state.step) == 1
  assert int(optax.tree.get(state.opt_state[1][1], "count")) == 1
  bad = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.inf, 1.0])}
  skipped = step(state, bad, {"mean": jnp.full(2, jnp.nan)})
  assert int(skipped.step) == 1
  assert int(optax.tree.get(skipped.opt_state[1][1], "count")) == 1
  np.testing.assert_array_equal(skipped.batch_stats["mean"], [5.0, 5.0])
  assert_trees_equal(skipped.params, state.params)
  assert_trees_equal(skipped.opt_state, state.opt_state)
  assert float(scale_state(skipped).scale) == 2.0**14
  assert int(scale_state(skipped).skipped_steps) == 1


def test_the_check_comes_before_a_clip():
  # A global norm of inf clips every gradient to 0 (and inf to NaN): a check
  # that sees the clipped gradients lets some of those through.
  tx = optax.chain(optax.clip(1.0), optax.sgd(1.0))
  state = create({"w": jnp.zeros(2)}, tx)
  skipped = apply_step(state, {"w": jnp.array([jnp.inf, 1.0])})
  np.testing.assert_array_equal(skipped.params["w"], [0.0, 0.0])
  assert int(skipped.step) == 0
  assert float(scale_state(skipped).scale) == 2.0**14
  clipped = apply_step(state, {"w": jnp.array([1e30, 0.5])})
  np.testing.assert_array_equal(clipped.params["w"], [-1.0, -0.5])


# Pitfall: shards and replicas that do not agree.


def mesh8():
  return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
@pytest.mark.parametrize("shape", [(8, 16), (128, 256)])
def test_one_bad_shard_skips_the_step_on_every_shard(spec, shape):
  mesh = mesh8()
  sharding = NamedSharding(mesh, spec)
  put = lambda x: jax.device_put(np.asarray(x, np.float32), sharding)
  params = {"v": put(np.ones(shape)), "w": put(np.ones(shape))}
  state = create(params, optax.adam(0.5))
  step = jax.jit(lambda s, g: s.apply_gradients(grads=g))
  grads = {"v": put(np.ones(shape)), "w": put(np.ones(shape))}
  state = step(state, grads)
  for name in ("v", "w"):
    np.testing.assert_allclose(state.params[name], np.full(shape, 0.5), 1e-5)
  bad = np.ones(shape, np.float32)
  bad[5, 11] = np.inf
  skipped = step(state, {"v": grads["v"], "w": put(bad)})
  for old, new in zip(
    jax.tree.leaves((state.params, state.opt_state, state.step)),
    jax.tree.leaves((skipped.params, skipped.opt_state, skipped.step)),
    strict=True,
  ):
    assert old.sharding.is_equivalent_to(new.sharding, old.ndim)
    for a, b in zip(
      old.addressable_shards, new.addressable_shards, strict=True
    ):
      np.testing.assert_array_equal(a.data, b.data)
  assert float(scale_state(skipped).scale) == 2.0**14


def shard_map_specs(state, params_spec):
  """Specs of a state whose parameters and slots have `params_spec`."""
  specs = jax.tree.map(lambda _: P(), state)
  slots = optax.tree_utils.tree_map_params(
    state.tx, lambda _: params_spec, specs.opt_state
  )
  params = jax.tree.map(lambda _: params_spec, state.params)
  return specs.replace(params=params, opt_state=slots)


def test_devices_agree_inside_shard_map_on_local_gradients():
  state = create({"w": jnp.ones(8)}, optax.adam(0.5))
  specs = shard_map_specs(state, P("x"))

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh8(), in_specs=(specs, P("x")), out_specs=specs
  )
  def step(state, grads):
    return state.apply_gradients(grads={"w": grads})

  good = step(state, jnp.ones(8))
  np.testing.assert_allclose(good.params["w"], np.full(8, 0.5), 1e-5)
  # Keras 3 looks at replica 0: neither it nor the last may be the one.
  for i in (0, 3, 7):
    skipped = step(good, jnp.ones(8).at[i].set(jnp.inf))
    assert_trees_equal(skipped.params, good.params)
    assert_trees_equal(skipped.opt_state, good.opt_state)
    assert int(skipped.step) == 1
    assert float(scale_state(skipped).scale) == 2.0**14
    assert int(scale_state(skipped).skipped_steps) == 1


def test_devices_agree_inside_shard_map_on_a_whole_step():
  state = create({"w": jnp.ones(2)}, optax.adam(0.5))
  specs = shard_map_specs(state, P())

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh8(), in_specs=(specs, P("x")), out_specs=specs
  )
  def step(state, x):
    def loss_fn(params):
      return jax.lax.pmean((params["w"] * x).sum(), "x")

    _, grads = state.value_and_grad(loss_fn)
    return state.apply_gradients(grads=grads)

  x = jnp.ones((8, 2))
  good = step(state, x)
  np.testing.assert_allclose(good.params["w"], [0.5, 0.5], 1e-5)
  np.testing.assert_allclose(good.opt_state[0].mu["w"], [0.1, 0.1], 1e-6)
  skipped = step(good, x.at[6, 1].set(jnp.nan))
  assert_trees_equal(skipped.params, good.params)
  assert_trees_equal(skipped.opt_state, good.opt_state)
  assert float(scale_state(skipped).scale) == 2.0**14


# Pitfall: a scale at its floor, silently.

FLOOR = fs.DynamicLossScale(initial_scale=2.0)


def step_and_wait(step, state, grads):
  state = step(state, grads)
  jax.block_until_ready(state)
  jax.effects_barrier()
  return state


@pytest.mark.parametrize("jit", [False, True])
def test_the_user_is_told_at_the_floor(jit):
  step = lambda state, grads: state.apply_gradients(grads=grads)
  step = jax.jit(step) if jit else step
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), FLOOR)
  bad = {"w": jnp.array([jnp.nan])}
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    state = step_and_wait(step, state, bad)  # it can still back off
    state = step_and_wait(step, state, {"w": jnp.zeros(1)})
  assert float(scale_state(state).scale) == 1.0
  with pytest.warns(
    RuntimeWarning, match=r"at its floor, 1,.*2 steps skipped.*nonfinite_leaves"
  ):
    state = step_and_wait(step, state, bad)
  assert int(scale_state(state).skipped_steps) == 2
  assert float(state.params["w"][0]) == 1.0
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    step_and_wait(step, state, {"w": jnp.zeros(1)})


def test_the_user_can_ask_not_to_be_told():
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), FLOOR, warn_at_floor=False)
  bad = {"w": jnp.array([jnp.nan])}
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    for _ in range(3):
      state = step_and_wait(apply_step, state, bad)
  assert int(scale_state(state).skipped_steps) == 3
  text = apply_step.lower(state, bad).compile().as_text()
  assert "callback" not in text


def test_telling_leaves_no_effect_in_the_step():
  # An effect would take the step off JAX's fast dispatch.
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), FLOOR)
  jaxpr = jax.make_jaxpr(apply_step)(state, {"w": jnp.ones(1)})
  assert not jaxpr.effects


def test_the_user_is_told_inside_scan_and_shard_map():
  state = create({"w": jnp.ones(8)}, optax.sgd(1.0), FLOOR)
  bad = jnp.ones((3, 8)).at[:, 4].set(jnp.nan)

  @jax.jit
  def steps(state, grads):
    body = lambda s, g: (s.apply_gradients(grads={"w": g}), None)
    return jax.lax.scan(body, state, grads)[0]

  with pytest.warns(RuntimeWarning, match="steps skipped"):
    out = steps(state, bad)
    jax.block_until_ready(out)
  assert int(scale_state(out).skipped_steps) == 3

  specs = shard_map_specs(state, P("x"))
  mapped = jax.jit(
    jax.shard_map(
      steps, mesh=mesh8(), in_specs=(specs, P(None, "x")), out_specs=specs
    )
  )
  with pytest.warns(RuntimeWarning, match="steps skipped"):
    out = mapped(state, bad)
    jax.block_until_ready(out)
  np.testing.assert_array_equal(out.params["w"], np.ones(8))


# Leaves without a gradient.


def partial_optimizers():
  labels = lambda params: jax.tree.map(lambda _: "a", params)
  return {
    "sgd": optax.sgd(0.5, momentum=0.9),
    "adam": optax.adam(0.5),
    "adamw": optax.adamw(0.5, weight_decay=0.1),
    "multi_transform": optax.multi_transform(
      {"a": optax.adam(0.5), "b": optax.set_to_zero()}, labels
    ),
    "chain": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.5)),
    "inject": optax.inject_hyperparams(optax.adam)(learning_rate=0.5),
  }


def slots(state, name):
  return [
    x
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
    if jax.tree_util.keystr(path).endswith(f"['{name}']")
  ]


@pytest.mark.parametrize("name", partial_optimizers())
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_none_gradient_keeps_parameter_and_slots(name, wrapped):
  tx = partial_optimizers()[name]
  params = {"w": jnp.ones(2), "n": jnp.full(2, 3.0)}
  wrappers = [fs.LossScale("dynamic")] if wrapped else []
  state = fs.TrainState.create(
    apply_fn=None, params=params, tx=tx, wrappers=wrappers
  )
  # The slots of `n` are something else than zeros when it gets no gradient.
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


@pytest.mark.parametrize("name", ["sgd", "adam", "multi_transform"])
def test_integers_and_float0_pass_through(name):
  tx = partial_optimizers()[name]
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


def owg_optimizers():
  labels = lambda params: jax.tree.map(lambda _: "a", params)
  return {
    "sgd": optax.sgd(0.5),
    "adam": optax.adam(0.5),
    "multi_transform": optax.multi_transform({"a": optax.sgd(0.5)}, labels),
  }


@pytest.mark.parametrize("name", owg_optimizers())
def test_overwrite_with_gradient_leaves_are_new_values(name):
  params = {"params": {"w": jnp.ones(2)}, OWG: {"scale": jnp.array([1.0])}}
  state = create(params, owg_optimizers()[name], 1024.0)
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


def test_overwrite_with_gradient_is_held_back_and_not_checked():
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
