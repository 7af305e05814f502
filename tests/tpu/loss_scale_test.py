"""Costs of LossScale on TPU, over the same step without it."""

import jax
import jax.numpy as jnp
import optax
import pytest
import tpu_programs

import flaxshard as fs

pytestmark = pytest.mark.tpu

# In smaller programs more arrays lie in VMEM, where "bytes accessed" counts
# every copy between VMEM and HBM too.
WIDTH, LAYERS, BATCH = 4096, 2, 1024


def compile_step(dtype, *wrappers):
  """Returns a compiled step, and the bytes of its gradients in float32."""

  def loss_fn(params, x):
    for w in params:
      x = jax.nn.relu(x.astype(dtype) @ w.astype(dtype))
    return jnp.mean(jnp.square(x.astype(jnp.float32)))

  def create():
    return fs.TrainState.create(
      apply_fn=None,
      params=[jnp.zeros((WIDTH, WIDTH)) for _ in range(LAYERS)],
      tx=optax.adam(1e-3),
      wrappers=wrappers,
    )

  mesh = tpu_programs.strategy_of("v5p:2x2x1").mesh
  device = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
  state = jax.tree.map(place, jax.eval_shape(create))
  batch = place(jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
  step = jax.jit(lambda s, x: s.minimize(loss_fn, x), donate_argnums=0)
  return step.lower(state, batch).compile(), 4 * LAYERS * WIDTH**2


def test_dynamic_scale_takes_one_16_bit_copy_of_the_gradients():
  bare, grads = compile_step("float16")
  scaled, _ = compile_step("float16", fs.LossScale("dynamic"))
  # The gradients are written once, in 16 bits.
  assert scaled.memory_analysis().temp_size_in_bytes <= 0.85 * grads
  more = [c.memory_analysis().peak_memory_in_bytes for c in (scaled, bare)]
  assert more[0] - more[1] <= 0.55 * grads
