"""Programs of `Strategy.run` for replicas of several logical devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs

P = jax.sharding.PartitionSpec


@jax.custom_vjp
def _double(x):
  return 2 * x


_double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def _compute(x: jax.Array, key: jax.Array) -> Any:
  """Computes with each kind of inner program that XLA runs as plain code."""

  def step(carry, row):
    carry = jax.lax.cond(
      row[0] > 0, lambda c: c + row, lambda c: c - row, carry
    )
    return carry, jnp.sum(carry)

  def loss(x):
    last, sums = jax.lax.scan(step, jnp.zeros(x.shape[1:]), _double(x))
    return jnp.sum(last**2) + jnp.sum(jax.nn.relu(sums))

  grads = jax.grad(jax.checkpoint(loss))(x)
  halved = jax.lax.while_loop(
    lambda v: jnp.max(v) > 1, lambda v: v * 0.5, jnp.abs(grads)
  )
  ref = jax.new_ref(halved)
  ref[...] = ref[...] + jax.random.normal(key, halved.shape)
  return jax.lax.psum(ref[...], "replica"), jax.random.split(key)


def _strategy() -> fs.Strategy:
  return fs.Strategy(
    devices=jax.devices()[:4], mesh_shape={"replica": 2, "model": 2}
  )


@pytest.mark.slow
def test_programs_compute_the_same_on_split_replicas():
  x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
  key = jax.random.key(0)
  results = []
  for strategy in (_strategy(), fs.Strategy(devices=jax.devices()[:2])):
    spec = P("replica", *strategy.mesh.axis_names[1:])
    batch = strategy.shard_batch(x, spec=spec)
    results.append(strategy.run(_compute, args=(batch, key)))
  (split, split_keys), (whole, whole_keys) = results
  np.testing.assert_allclose(split[0], whole[0], rtol=1e-6)
  np.testing.assert_array_equal(
    *(jax.random.key_data(keys[1]) for keys in (split_keys, whole_keys))
  )


def test_only_the_constraints_of_the_program_are_lowered():
  strategy = _strategy()

  def step(x):
    x = jax.lax.with_sharding_constraint(x + 1, P(None, "model"))
    y = strategy.split_to_logical_devices(jax.nn.relu(x) * 3, [1, 2])
    return jax.lax.cond(y[0, 0] > 0, lambda v: v * 2, lambda v: v + 1, y)

  batch = strategy.shard_batch(np.ones((8, 4), np.float32))
  text = strategy.jit(step).lower(batch).as_text()
  values = [
    line
    for line in text[text.index("func.func private") :].splitlines()
    if "sharding_constraint" in line and "xf32" in line
  ]
  assert len(values) == 2
  assert all('[{}, {"model"}]' in line for line in values)


def test_a_jitted_function_that_is_called_twice_is_lowered_once():
  strategy = _strategy()

  @jax.jit
  def layer(x):
    return jnp.tanh(x @ x)

  batch = strategy.shard_batch(np.ones((8, 4, 4), np.float32))
  lowered = strategy.jit(lambda x: layer(layer(x))).lower(batch)
  text = lowered.as_text()
  assert text.count("func.func private @layer") == 1
  assert text.count("call @layer") == 2
