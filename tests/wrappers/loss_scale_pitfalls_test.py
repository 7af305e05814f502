"""LossScale does not repeat the errors of other loss scaling libraries."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest
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


def test_donated_adam_state_is_updated_in_place():
  bare = compiled_mlp_step([]).memory_analysis()
  ours = compiled_mlp_step([fs.LossScale("dynamic")])
  memory = ours.memory_analysis()
  gradients = 3 * 512 * 512 * 4
  # To select between old and new would copy the state: three times this.
  assert memory.temp_size_in_bytes <= bare.temp_size_in_bytes + 1.1 * gradients
  # The outputs use the buffers of the donated state.
  assert memory.alias_size_in_bytes >= 3 * gradients
  assert "conditional(" in ours.as_text()


def test_fixed_scale_compiles_to_no_conditional():
  assert "conditional(" not in compiled_mlp_step([fs.LossScale(8)]).as_text()


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


def mesh8():
  return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize(
  ("spec", "shape"), [(P("x"), (8, 16)), (P(None, "x"), (128, 256))]
)
def test_one_nonfinite_shard_skips_the_step_on_every_shard(spec, shape):
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


def test_skipped_step_changes_only_the_scale():
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


def test_complex_gradients_are_unscaled():
  state = create({"w": jnp.ones(1, jnp.complex64)}, optax.sgd(1.0), 4.0)
  grads = state.unscale_gradients({"w": jnp.array([4.0 + 8.0j], jnp.complex64)})
  assert complex(grads["w"][0]) == 1 + 2j
