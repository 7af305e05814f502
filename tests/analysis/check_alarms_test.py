"""fs.check is silent about correct programs that look like mistakes."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import flaxshard as fs
from flaxshard.analysis.findings import Findings

P = jax.sharding.PartitionSpec
_SPLIT = P("replica")


class _Mlp(nn.Module):
  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    return nn.Dense(96)(nn.relu(nn.Dense(64)(x)))


def _squares(out: jax.Array) -> jax.Array:
  return (out**2).mean()


def _check(
  strategy: fs.Strategy,
  model: nn.Module,
  shape: tuple[int, ...],
  spec: Any = _SPLIT,
  rules: Any = None,
  loss: Any = _squares,
  microbatches: int = 0,
) -> Findings:
  named = functools.partial(jax.sharding.NamedSharding, strategy.mesh)
  state = fs.create_train_state(
    model,
    jax.random.key(0),
    jax.ShapeDtypeStruct(shape, jnp.float32),
    optax.adam(1e-3),
    strategy=strategy,
    rules=rules,
    abstract=True,
  )

  def step(state: Any, x: jax.Array) -> Any:
    def gradients(x: jax.Array) -> Any:
      return jax.grad(lambda p: loss(state.apply_fn({"params": p}, x)))(
        state.params
      )

    if not microbatches:
      return state.apply_gradients(grads=gradients(x))

    def accumulate(total: Any, x: jax.Array) -> Any:
      return jax.tree.map(jnp.add, total, gradients(x)), None

    x = x.reshape(-1, microbatches, x.shape[-1]).swapaxes(0, 1)
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    grads, _ = jax.lax.scan(accumulate, zeros, x)
    return state.apply_gradients(grads=grads)

  batch = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=named(spec))
  shardings = jax.tree.map(lambda x: x.sharding, state)
  jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings)
  # Biases, which FSDP does not split, are smaller than this.
  return fs.check(jitted, state, batch, min_bytes=2**12)


def _experts(strategy: fs.Strategy) -> nn.Module:
  """Returns experts that are split over the axis of the batch."""
  constrain = lambda x, spec: jax.lax.with_sharding_constraint(
    x, jax.sharding.NamedSharding(strategy.mesh, spec)
  )

  class Experts(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [tokens, features]
      init = nn.initializers.lecun_normal()
      x = nn.Dense(64)(x).reshape(8, -1, 64)
      weights = nn.softmax(nn.Dense(8)(x))[..., None] * jnp.ones(32)
      by_expert = jnp.einsum("gtec,gtd->egcd", weights, x)
      by_expert = constrain(by_expert, P(None, "replica"))
      by_expert = constrain(by_expert, P("replica"))
      kernel = self.param("experts", init, (8, 64, 64))
      by_expert = nn.relu(jnp.einsum("egcd,edf->egcf", by_expert, kernel))
      by_expert = constrain(by_expert, P("replica"))
      by_expert = constrain(by_expert, P(None, "replica"))
      return jnp.einsum("gtec,egcd->gtd", weights, by_expert)

  return Experts()


@pytest.mark.slow
def test_tokens_go_to_experts_over_the_axis_of_the_batch() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  rules = (("experts", P("replica")),)
  found = _check(strategy, _experts(strategy), (512, 64), rules=rules)
  assert not found.findings, str(found)


@pytest.mark.slow
def test_rows_are_split_within_one_replica() -> None:
  class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
      x = nn.relu(nn.Conv(16, (3, 3))(x))
      return nn.Conv(16, (3, 3))(x)

  strategy = fs.Strategy(
    devices=jax.devices()[:8], mesh_shape={"replica": 1, "rows": 8}
  )
  spec = P("replica", "rows")
  found = _check(strategy, Model(), (32, 16, 128, 16), spec)
  assert not found.findings, str(found)


@pytest.mark.slow
def test_covariance_is_summed_over_the_batch() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  loss = lambda out: _squares(out.T @ out - 1)
  found = _check(strategy, _Mlp(), (512, 64), loss=loss)
  assert not found.findings, str(found)


@pytest.mark.slow
def test_fsdp_sums_microbatches_into_split_gradients() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  rules = fs.FSDP(min_size=1024)
  found = _check(strategy, _Mlp(), (8192, 64), rules=rules, microbatches=4)
  assert not found.findings, str(found)


def test_rows_of_a_table_of_fsdp_are_looked_up() -> None:
  strategy = fs.Strategy(devices=jax.devices()[:8])
  state = fs.create_train_state(
    nn.Sequential([nn.Embed(512, 32), nn.Dense(16)]),
    jax.random.key(0),
    jax.ShapeDtypeStruct((8,), jnp.int32),
    optax.adam(1e-3),
    strategy=strategy,
    rules="fsdp",
    sparse=["embedding"],
    abstract=True,
  )
  ids = jax.ShapeDtypeStruct(
    (96,), jnp.int32, sharding=jax.sharding.NamedSharding(strategy.mesh, _SPLIT)
  )

  def step(state: Any, ids: jax.Array) -> Any:
    return state.minimize(
      lambda p: _squares(state.apply_fn({"params": p}, ids))
    )

  step = jax.jit(step, donate_argnums=0)
  found = fs.check(step, state, ids, min_bytes=2**12)
  assert not found.findings, str(found)
