"""Updates of rows of tables, compiled for a TPU."""

import jax
import jax.numpy as jnp
import optax
import pytest

import flaxshard as fs

pytestmark = pytest.mark.tpu

TABLE = (1_000_000, 16)
NUM_IDS = 256


def test_update_has_no_temporary_array_of_the_size_of_a_table():
  (device, *_) = fs.Strategy("v5e:2x2").mesh.devices.flat
  sharding = jax.sharding.SingleDeviceSharding(device)

  def shape(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  def create():
    return fs.TrainState.create(
      apply_fn=None,
      params={"table": jnp.zeros(TABLE, jnp.bfloat16)},
      tx=optax.adamw(optax.linear_schedule(0.1, 0.0, 10)),
      wrappers=[fs.LossScale("dynamic")],
      sparse=["table"],
    )

  def step(state, ids, rows):
    slices = fs.IndexedSlices(ids, rows, TABLE)
    grads = state.unscale_gradients({"table": slices})
    return state.apply_gradients(grads=grads)

  compiled = (
    jax.jit(step, donate_argnums=0)
    .lower(
      jax.tree.map(shape, jax.eval_shape(create)),
      shape(jnp.zeros(NUM_IDS, jnp.int32)),
      shape(jnp.zeros((NUM_IDS, TABLE[1]))),
    )
    .compile()
  )
  size = 2 * TABLE[0] * TABLE[1]
  used = compiled.memory_analysis().temp_size_in_bytes
  assert used < size / 4
