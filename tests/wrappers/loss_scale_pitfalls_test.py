"""LossScale does not repeat the errors of other loss scaling libraries."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
import quadratic_states
from scaled_states import apply_step
from scaled_states import create
from scaled_states import scale_state
from tree_equality import assert_trees_equal

import flaxshard as fs

# Scaling is done in float32.


def half_loss(params, x):
  # float16 compute and a float32 loss; the mean keeps cotangents in range.
  y = params["w"].astype(jnp.float16) * x
  return y.astype(jnp.float32).mean()


def test_small_float16_gradients_do_not_underflow():
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


def test_scaled_loss_does_not_overflow():
  power = 127
  state = create({"w": jnp.ones(1)}, optax.sgd(1.0), 2.0**power)
  # The scale is not a finite float16.
  for dtype in ("float16", "bfloat16", "float32"):
    scaled = state.scale_loss(jnp.ones((), dtype))
    assert scaled.dtype == jnp.float32
    assert float(scaled) == 2.0**power


def test_unscaling_by_the_largest_scale_is_exact():
  # The reciprocal of 2**127 is subnormal and would be flushed to zero.
  state = create({"w": jnp.ones(3)}, optax.sgd(1.0), 2.0**127)
  unscale = jax.jit(lambda state, grads: state.unscale_gradients(grads))
  for values in ([1.0, -1.5, 2.0**-20], [0.5, 1 + 0.5j, -1j]):
    scaled = np.array(values) * 2.0**127
    dtype = np.complex64 if np.iscomplexobj(scaled) else np.float32
    grads = unscale(state, {"w": scaled.astype(dtype)})
    np.testing.assert_array_equal(grads["w"], values)


def test_returned_loss_does_not_overflow():
  # The scaled loss, 1000 * 2**127, overflows; its gradients do not.
  state = create({"w": jnp.array([1000.0])}, optax.sgd(1.0), 2.0**127)
  loss, grads = state.value_and_grad(lambda p: p["w"].sum())
  assert float(loss) == 1000.0
  assert float(grads["w"][0]) == 1.0


# A skipped step changes nothing and copies nothing.


def compiled_mlp_step(*wrappers):
  shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
  state = fs.TrainState.create(
    apply_fn=None,
    params=[shape] * 3,
    tx=optax.adam(1e-3),
    wrappers=wrappers,
  )

  def loss_fn(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return (x**2).mean()

  step = jax.jit(lambda s, x: s.minimize(loss_fn, x), donate_argnums=0)
  return step.lower(state, jnp.ones((4, 512))).compile()


def test_donated_adam_state_is_updated_in_place():
  bare = compiled_mlp_step().memory_analysis()
  ours = compiled_mlp_step(fs.LossScale("dynamic"))
  memory = ours.memory_analysis()
  gradients = 3 * 512 * 512 * 4
  # To select between old and new would copy the state: three times this.
  assert memory.temp_size_in_bytes <= bare.temp_size_in_bytes + 1.1 * gradients
  # The outputs use the buffers of the donated state.
  assert memory.alias_size_in_bytes >= 3 * gradients
  assert "conditional(" in ours.as_text()


def test_fixed_scale_compiles_to_no_conditional():
  assert "conditional(" not in compiled_mlp_step(fs.LossScale(8)).as_text()


def test_unclipped_gradients_are_checked():
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


# All shards and replicas skip together.


@pytest.mark.parametrize(
  ("spec", "shape"), [(P("x"), (8, 16)), (P(None, "x"), (128, 256))]
)
def test_one_nonfinite_shard_skips_the_step_on_every_shard(spec, shape):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
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


# Leaves without a gradient, and statistics.

OWG = "_overwrite_with_gradient"


def slots(state, name):
  return [
    x
    for path, x in jax.tree_util.tree_leaves_with_path(state.opt_state)
    if jax.tree_util.keystr(path).endswith(f"['{name}']")
  ]


@pytest.mark.parametrize(
  ("tx", "wrappers"),
  [
    (optax.adamw(0.5, weight_decay=0.1), []),
    (
      optax.multi_transform(
        {"a": optax.adam(0.5), "b": optax.set_to_zero()},
        lambda params: jax.tree.map(lambda _: "a", params),
      ),
      [fs.LossScale("dynamic")],
    ),
    (
      optax.inject_hyperparams(optax.adam)(learning_rate=0.5),
      [fs.LossScale("dynamic")],
    ),
  ],
)
def test_none_gradient_keeps_parameter_and_slots(tx, wrappers):
  params = {"w": jnp.ones(2), "n": jnp.full(2, 3.0)}
  state = quadratic_states.create(wrappers, tx, params)
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
