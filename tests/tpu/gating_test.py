"""`gate_gradients` in a program for TPU."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
import tpu_programs

import flaxshard as fs

pytestmark = pytest.mark.tpu

WIDTH, LAYERS, BATCH = 1024, 2, 256


def loss_fn(params, x):
  for name in sorted(params):
    x = jax.nn.relu(x @ params[name]["kernel"])
  return jnp.mean(jnp.square(x))


def fused_updates(mode):
  """Returns how many matrix products a step fuses with an update."""
  kernel = jnp.zeros((WIDTH, WIDTH))
  create = lambda: fs.TrainState.create(
    apply_fn=None,
    params={f"layer{i}": {"kernel": kernel} for i in range(LAYERS)},
    tx=optax.sgd(0.1),
  )
  mesh = tpu_programs.strategy_of("v5e:2x4").mesh
  device = jax.sharding.SingleDeviceSharding(mesh.devices.flat[0])
  place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device)
  state = jax.tree.map(place, jax.eval_shape(create))
  batch = place(jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
  step = jax.jit(
    lambda s, x: s.minimize(loss_fn, x, gate_gradients=mode)[0],
    donate_argnums=0,
  )
  text = step.lower(state, batch).compile().as_text()
  return sum(
    bool(re.search(r" convolution\(.* add\(", computation, re.S))
    for computation in text.split("\n\n")
    if not computation.startswith("ENTRY")
  )


def test_updates_are_fused_with_gradients_only_without_a_barrier():
  assert fused_updates("none") == LAYERS
  assert fused_updates("graph") == 0
