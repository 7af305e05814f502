"""Loss scaling: parity with Keras, the rules, and what peers get wrong."""

import functools
import json
import pathlib

from flax.training import train_state as flax_train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
from tree_equality import assert_trees_close
from tree_equality import assert_trees_equal

import flaxshard as fs

GOLDEN = json.loads(
  (pathlib.Path(__file__).parents[1] / "testdata/loss_scale.json").read_text()
)
SGD = optax.sgd(0.5)

# Shared by the tests, so that each kind of state is compiled once.
apply_step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))


def create(params, tx=SGD, scale="dynamic", **kwargs):
  return quadratic_states.create([fs.LossScale(scale, **kwargs)], tx, params)


def scale_state(state):
  return state.wrapper_states["loss_scale"]


# Keras' epsilon is 1e-7; where it is added (Keras: to the root of the second
# moment before bias correction) makes a difference below the tolerance.
OPTIMIZERS = {
  "sgd": optax.sgd,
  "momentum": functools.partial(optax.sgd, momentum=0.9),
  "adam": functools.partial(optax.adam, eps=1e-7),
}


@pytest.mark.filterwarnings("ignore:LossScale. the scale is at its floor")
def test_parity_with_keras():
  states, cases = [], GOLDEN["cases"]
  for case in cases:
    rule = fs.DynamicLossScale(
      initial_scale=case["initial_scale"],
      growth_interval=case["growth_interval"],
      growth_factor=case["factor"],
    )
    tx = OPTIMIZERS[case["optimizer"]](case["lr"])
    states.append(create({"v": np.array(case["var0"], np.float32)}, tx, rule))
  apply_steps = jax.jit(lambda *pairs: [apply_step(*pair) for pair in pairs])
  for i, steps in enumerate(zip(*(c["steps"] for c in cases), strict=True)):
    grads = [np.array([*map(float, x["grads"])], np.float32) for x in steps]
    states = apply_steps(*zip(states, ({"v": g} for g in grads), strict=True))
    for case, golden, state in zip(cases, steps, states, strict=True):
      where, got = f"{case['optimizer']}, step {i}", scale_state(state)
      assert np.asarray(got.scale) == np.float32(golden["scale"]), where
      assert int(got.good_steps) == golden["good_steps"], where
      assert int(state.step) == golden["iterations"], where
      np.testing.assert_allclose(
        state.params["v"], golden["var"], rtol=2e-5, atol=2e-5, err_msg=where
      )
  for case, state in zip(cases, states, strict=True):
    skipped = sum(not golden["finite"] for golden in case["steps"])
    assert int(scale_state(state).skipped_steps) == skipped


# The rule, to the last bit of float32.


def reference(rule, finite):
  """Returns the states before and after each step."""
  scale, good, skipped, bad = np.float32(rule.initial_scale), 0, 0, 0
  states = [(scale, good, skipped, bad)]
  for is_finite in finite:
    if is_finite:
      good, bad = good + 1, 0
      if good == rule.growth_interval:
        with np.errstate(over="ignore"):
          grown = scale * np.float32(rule.growth_factor)
        scale = grown if grown <= np.float32(rule.max_scale) else scale
        good = 0
    else:
      good, bad, skipped = 0, bad + 1, skipped + 1
      if bad >= rule.hysteresis:
        if rule.backoff_factor is None:
          # Divided, as Keras does: 1 / 3 is not a float32.
          scale = scale / np.float32(rule.growth_factor)
        else:
          scale = scale * np.float32(rule.backoff_factor)
        scale = max(scale, np.float32(rule.min_scale))
    states.append((scale, good, skipped, bad))
  return states


def rule_of(initial_scale=1234.5, growth_interval=2, **options):
  return fs.DynamicLossScale(initial_scale, growth_interval, **options)


RULES = [
  rule_of(growth_factor=7.3),
  rule_of(growth_factor=3.0, growth_interval=1),
  rule_of(growth_factor=1.5, backoff_factor=0.9, growth_interval=3),
  rule_of(growth_factor=1.0001, backoff_factor=1 / 3),
  rule_of(hysteresis=2, growth_interval=3),
  rule_of(hysteresis=3, growth_interval=5),
  rule_of(min_scale=1.5, backoff_factor=0.25),
  rule_of(min_scale=0.25, initial_scale=1.0, growth_interval=4),
  # Not clamped to 2000, nor to infinity.
  rule_of(max_scale=2000.0, growth_factor=4.0, growth_interval=1),
  rule_of(initial_scale=2.0**126, growth_interval=1),
  rule_of(max_scale=1234.5 * 4),
]


@jax.jit
def update_all(states, ok):
  return [r.update(x, ok) for r, x in zip(RULES, states, strict=True)]


def test_states_equal_a_float32_reference():
  finite = np.random.default_rng(0).random(200) < 0.7
  firsts = [scale_state(create({"w": np.ones(1)}, scale=r)) for r in RULES]
  wanted = [
    type(firsts[0])(*map(np.array, zip(*reference(rule, finite), strict=True)))
    for rule in RULES
  ]
  assert firsts == [jax.tree.map(lambda x: x[0], x) for x in wanted]
  assert min(len(set(x.scale)) for x in wanted) > 2
  # XLA may round differently in a compiled loop, for many scales at once, and
  # step by step.
  body = lambda states, ok: (update_all(states, ok),) * 2
  loops = jax.jit(lambda: jax.lax.scan(body, firsts, finite)[1])()
  before = jax.tree.map(lambda x: x[:-1], wanted)
  after = jax.tree.map(lambda x: x[1:], wanted)
  for found in (loops, jax.vmap(update_all)(before, finite)):
    assert {x.scale.dtype for x in found} == {np.dtype(np.float32)}
    jax.tree.map(np.testing.assert_array_equal, found, after)
  for i, ok in enumerate(finite[:50]):
    firsts = update_all(firsts, ok)
    assert [x.scale for x in firsts] == [x.scale[i] for x in after]


# The modes.


def test_equal_arguments_make_equal_wrappers():
  # Wrappers are static fields: an unequal one would recompile the step.
  rules = fs.DynamicLossScale(8), fs.DynamicLossScale(8.0)
  for a, b in ((1024, np.float32(1024)), rules):
    assert fs.LossScale(a) == fs.LossScale(b)
    assert hash(fs.LossScale(a)) == hash(fs.LossScale(b))
  policy = fs.Policy("mixed_float16")
  assert fs.LossScale(policy="mixed_float16") == fs.LossScale(policy=policy)


@pytest.mark.parametrize(
  ("dtype", "policy", "factor"),
  [
    ("bfloat16", None, 1),
    ("float16", None, 2**15),
    ("float32", "mixed_float16", 2**15),
    ("float32", "mixed_bfloat16", 1),
  ],
)
def test_auto_scales_for_float16_only(dtype, policy, factor):
  params = {"a": jnp.ones(1), "b": jnp.ones(2, dtype)}
  state = create(params, scale="auto", policy=policy)
  assert (scale_state(state) == ()) == (factor == 1)
  assert float(state.scale_loss(jnp.float32(3.0))) == 3.0 * factor


def test_fixed_scale_never_skips():
  state = create({"w": jnp.ones(2)}, scale=fs.FixedLossScale(16))
  state = apply_step(state, {"w": np.array([1.0, np.inf], "f")})
  np.testing.assert_array_equal(state.params["w"], [0.5, -np.inf])
  assert int(state.step) == 1
  assert scale_state(state) == (16.0, 0, 0, 0)


@pytest.mark.parametrize(
  ("scale", "wanted"),
  [
    (16, 16.0),
    (fs.DynamicLossScale(4.0, max_scale=8.0), 8.0),
    (fs.DynamicLossScale(2.0**17, min_scale=2.0**16), 2.0**16),
  ],
)
def test_a_step_moves_a_restored_scale_into_the_bounds(scale, wanted):
  params = {"w": np.ones(1, "f")}
  old = create(params, scale=fs.DynamicLossScale(2.0**15))
  state = create(params, scale=scale).replace(wrapper_states=old.wrapper_states)
  state = apply_step(state, {"w": np.ones(1, "f")})
  assert float(scale_state(state).scale) == wanted


# Scaling is done in float32.


def test_small_float16_gradients_do_not_underflow():
  # 2**-12 / 8 times 2**-12 is 2**-27: under float16's smallest number.
  x = np.full(8, 2.0**-12, np.float16)

  def loss_fn(params):
    # The mean keeps cotangents in range.
    y = params["w"].astype(jnp.float16) * x
    return y.astype(jnp.float32).mean() * np.float32(2.0**-12)

  params = {"w": np.ones(8, "f")}
  assert (np.asarray(jax.jit(jax.grad(loss_fn))(params)["w"]) == 0).all()
  state = create(params, scale=2.0**16)
  loss, grads = jax.jit(lambda s: s.value_and_grad(loss_fn))(state)
  assert float(loss) == 2.0**-24
  assert grads["w"].dtype == jnp.float32
  np.testing.assert_array_equal(grads["w"], np.full(8, 2.0**-27, np.float32))


def test_the_largest_scale_is_exact():
  state = create({"w": jnp.full(3, 1000.0)}, scale=2.0**127)
  # The scale is not a finite float16.
  for dtype in ("float16", "bfloat16", "float32"):
    scaled = state.scale_loss(jnp.ones((), dtype))
    assert (scaled.dtype, float(scaled)) == (jnp.float32, 2.0**127)
  # The reciprocal of 2**127 is subnormal and would be flushed to zero.
  unscale = jax.jit(lambda state, grads: state.unscale_gradients(grads))
  for values in ([1.0, -1.5, 2.0**-20], [0.5, 1 + 0.5j, -1j]):
    scaled = np.array(values) * 2.0**127
    dtype = np.complex64 if np.iscomplexobj(scaled) else np.float32
    grads = unscale(state, {"w": scaled.astype(dtype)})
    np.testing.assert_array_equal(grads["w"], values)
  # The scaled loss, 3000 * 2**127, overflows; its gradients do not.
  loss_fn = lambda p: p["w"].sum()
  loss, grads = jax.jit(lambda s: s.value_and_grad(loss_fn))(state)
  assert float(loss) == 3000.0
  np.testing.assert_array_equal(grads["w"], np.ones(3))


# A skipped step.

X = np.array([[1.0, 2.0], [-1.0, 0.5], [0.25, -2.0], [3.0, 1.0]], np.float32)
Y = np.array([1.0, -1.0, 0.5, 2.0], np.float32)
BAD_X = X * np.array([[1, 1], [np.inf, 1], [1, 1], [1, 1]], np.float32)
PARAMS = {"w": np.array([0.5, -0.25], "f"), "b": np.float32(0.125)}
SCALE = fs.DynamicLossScale(2.0**10)


def loss_fn(params, x):
  return ((x @ params["w"] + params["b"] - Y) ** 2).mean()


def train_step(state, x):
  return state.minimize(loss_fn, x)


jitted_step = jax.jit(train_step)
gradient = jax.jit(jax.grad(loss_fn))


def train_w_alone(tx):
  labels = lambda params: {k: "w" if k == "w" else "rest" for k in params}
  return optax.multi_transform({"w": tx, "rest": optax.set_to_zero()}, labels)


@pytest.mark.parametrize(
  "tx",
  [
    train_w_alone(optax.adam(0.1)),
    optax.inject_hyperparams(optax.sgd)(
      learning_rate=optax.linear_schedule(0.1, 0.0, 6), momentum=0.9
    ),
    optax.MultiSteps(optax.adam(0.1), 2),
  ],
)
def test_skipped_step_equals_training_without_its_batch(tx):
  state = create(PARAMS, tx, SCALE)
  wanted = flax_train_state.TrainState.create(
    apply_fn=None, params=PARAMS, tx=tx
  )
  for x in (X, X * 0.5, BAD_X, X * 1.5, -X, X):
    state, loss = jitted_step(state, x)
    assert np.isfinite(loss) == (x is not BAD_X)
    if x is not BAD_X:
      wanted = apply_step(wanted, gradient(wanted.params, x))
  # NaN in the gradient of a parameter, and be it frozen.
  state = apply_step(state, {"w": np.ones(2, "f"), "b": np.float32(np.nan)})
  assert_trees_close(
    (state.params, state.opt_state), (wanted.params, wanted.opt_state)
  )
  assert int(state.step) == int(wanted.step) == 5
  assert float(scale_state(state).scale) == 2.0**8


def test_a_clip_gets_unscaled_gradients_after_the_check():
  # A check that sees clipped gradients would let the infinite one through.
  tx = optax.chain(optax.clip(10.0), optax.sgd(1.0))
  state = create({"w": np.zeros(2, "f")}, tx, SCALE)
  loss_fn = lambda p, factor: factor * (3 * p["w"][0] + 4 * p["w"][1])
  step = jax.jit(lambda state, factor: state.minimize(loss_fn, factor)[0])
  for factor, wanted in ((1, [-3, -4]), (10, [-13, -14]), (np.inf, [-13, -14])):
    state = step(state, np.float32(factor))
    np.testing.assert_array_equal(state.params["w"], wanted)
  assert int(state.step) == 2


def test_members_of_a_vmapped_ensemble_skip_separately():
  # A batched flag turns the branch into a select: one member's overflow must
  # not hold back the others.
  state = create(PARAMS, optax.adam(0.1), SCALE)
  states = jax.tree.map(lambda x: np.stack([x, x]), state)
  states, _ = jax.jit(jax.vmap(train_step))(states, np.stack([X, BAD_X]))
  member, _ = jitted_step(state, X)
  np.testing.assert_allclose(
    states.params["w"][0], member.params["w"], rtol=1e-6
  )
  np.testing.assert_array_equal(states.params["w"][1], state.params["w"])
  assert states.step.tolist() == [1, 0]
  assert scale_state(states).scale.tolist() == [1024, 512]


def test_one_nonfinite_shard_skips_the_step_on_every_shard():
  mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  put = lambda x, *spec: jax.device_put(
    x, jax.NamedSharding(mesh, jax.P(*spec))
  )
  ones = {
    "v": put(np.ones((8, 16), "f"), "x"),
    # So large that the check is a product.
    "w": put(np.ones((128, 256), "f"), None, "x"),
  }
  state = apply_step(create(ones, optax.adam(0.5)), ones)
  for name, x in ones.items():
    np.testing.assert_allclose(state.params[name], np.full(x.shape, 0.5), 1e-5)
    bad = put(x.at[5, 11].set(jnp.inf), *x.sharding.spec)
    skipped = apply_step(state, {**ones, name: bad})
    kept = lambda s: (s.params, s.opt_state, s.step)
    assert_trees_equal(kept(skipped), kept(state))
    for old, new in zip(*map(jax.tree.leaves, (state, skipped)), strict=True):
      assert old.sharding.is_equivalent_to(new.sharding, old.ndim)
    assert float(scale_state(skipped).scale) == 2.0**14


# Leaves without a gradient, and statistics.


def slots(state, name):
  return [
    x
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
    if jax.tree_util.keystr(path).endswith(f"['{name}']")
  ]


def test_none_gradient_keeps_parameter_and_slots():
  adamw = optax.inject_hyperparams(optax.adamw)(0.5, weight_decay=0.1)
  tx = optax.multi_transform(
    {"a": adamw, "b": optax.set_to_zero()}, {"w": "a", "n": "a"}
  )
  state = create({"w": np.ones(2, "f"), "n": np.full(2, 3.0, "f")}, tx)
  # A first step, so that the slots of `n` are not zero.
  state = apply_step(state, {"w": np.ones(2, "f"), "n": np.full(2, -1.0, "f")})
  assert [np.asarray(x).all() for x in slots(state, "n")] == [True, True]
  new = apply_step(state, {"w": np.ones(2, "f"), "n": None})
  assert int(new.step) == 2
  assert (np.asarray(new.params["w"]) < state.params["w"]).all()
  assert_trees_equal(new.params["n"], state.params["n"])
  assert_trees_equal(slots(new, "n"), slots(state, "n"))
  for a, b in zip(slots(new, "w"), slots(state, "w"), strict=True):
    assert (np.asarray(a) != b).all()


def test_integer_parameters_and_float0_gradients_pass_through():
  params = {"w": np.full(2, 2.0, "f"), "i": np.array([7, 8], "i")}
  adam = optax.adam(0.5)
  state = create(params, adam, 1024.0)
  loss_fn = lambda params: (params["w"] * params["i"]).sum()
  plain = quadratic_states.create((), adam, {"w": params["w"]})
  wanted = apply_step(plain, {"w": np.array([7.0, 8.0], "f")}).params

  def by_hand(state):
    loss = lambda p: state.scale_loss(loss_fn(p))
    grads = jax.grad(loss, allow_int=True)(state.params)
    grads = state.unscale_gradients(grads)
    assert grads["i"].dtype == jax.dtypes.float0
    return state.apply_gradients(grads=grads)

  for step in (by_hand, lambda state: state.minimize(loss_fn)[0]):
    new = jax.jit(step)(state)
    assert_trees_equal(new.params["i"], params["i"])
    assert_trees_equal(slots(new, "i"), slots(state, "i"))
    np.testing.assert_allclose(new.params["w"], wanted["w"], rtol=1e-6)
  grads = jax.eval_shape(lambda s: s.value_and_grad(loss_fn)[1], state)
  assert grads["i"] is None


def test_statistics_are_neither_scaled_nor_checked():
  def tree(w, scale):
    statistics = {"scale": jnp.array([scale])}
    return {"params": {"w": w}, "_overwrite_with_gradient": statistics}

  state = create(tree(jnp.ones(1), 1.0), optax.sgd(0.5, momentum=0.9), SCALE)
  grads = state.unscale_gradients(tree(jnp.array([1024.0]), 3.0))
  assert_trees_equal(grads, tree(jnp.ones(1), 3.0))
  state = apply_step(state, grads)
  assert_trees_equal(state.params, tree(jnp.array([0.5]), 3.0))
  skipped = apply_step(state, tree(jnp.array([jnp.inf]), 4.0))
  assert_trees_equal(skipped.params, state.params)
  new = apply_step(skipped, tree(None, jnp.inf))
  assert int(new.step) == 2
  assert_trees_equal(new.params, tree(jnp.array([0.5]), jnp.inf))
