"""16-bit gradients enter LossScale's branch in 16 bits; no result changes."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.wrappers import loss_scale
from flaxshard.wrappers import step as step_lib

# No power of two: a division by it rounds.
RULE = fs.DynamicLossScale(initial_scale=123.4, growth_factor=7.3)


class Model(nn.Module):
  """Uses the kernel `twice` twice, and `scale` in float32."""

  dtype: str

  @nn.compact
  def __call__(self, x):
    narrow = lambda x: x.astype(self.dtype)
    grid = lambda key, shape: jnp.linspace(
      -0.5, 0.7, math.prod(shape), dtype=jnp.float32
    ).reshape(shape)
    once = self.param("once", grid, (4, 8))
    twice = self.param("twice", grid, (8, 8))
    scale = self.param("scale", grid, (8,))
    x = nn.relu(narrow(x) @ narrow(once)) @ narrow(twice)
    x = jax.checkpoint(jnp.multiply)(x.astype(jnp.float32), scale)
    return narrow(x) @ narrow(twice)


def create(dtype, *wrappers):
  return fs.create_train_state(
    Model(dtype),
    jax.random.key(0),
    jnp.ones((1, 4)),
    optax.adam(0.1),
    wrappers=wrappers or [fs.LossScale(RULE)],
  )


def loss_of(state, batch, params):
  out = state.apply_fn({"params": params}, batch["x"]).astype(jnp.float32)
  # `weight` lets the gradient overflow.
  return ((out - batch["y"]) ** 2).mean() * batch["weight"].mean()


def train_step(state, batch):
  _, grads = state.value_and_grad(functools.partial(loss_of, state, batch))
  return state.apply_gradients(grads=grads)


def minimize(state, batch):
  return state.minimize(functools.partial(loss_of, state, batch))[0]


def by_hand(state, batch):
  def scaled_loss(params):
    return state.scale_loss(loss_of(state, batch, params))

  half = jax.tree.map(lambda p: p.astype(jnp.float16), state.params)
  grads = state.unscale_gradients(jax.grad(scaled_loss)(half))
  return state.apply_gradients(grads=grads)


def clipped(state, batch):
  _, grads = state.value_and_grad(functools.partial(loss_of, state, batch))
  grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
  return state.apply_gradients(grads=grads)


def batches():
  for i, weight in enumerate((1.0, 0.5, 3e38, 2.0)):
    x = np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32)
    y = np.repeat(x, 2, axis=1)
    weight = np.full(16, weight, np.float32)
    yield {"x": x, "y": y, "weight": weight}


def widen(monkeypatch):
  """Lets the gradients enter the branch unscaled, in float32."""
  monkeypatch.setattr(step_lib, "_unscales_16_bits", lambda *args: False)
  monkeypatch.setattr(loss_scale, "_narrow", lambda g, scale: g)


def assert_same_when_wide(monkeypatch, state, step):
  """Asserts that each step has the same results with float32 gradients."""
  # Two functions: what is compiled of one is not reused for the other.
  narrow, wide = (jax.jit(lambda *args: step(*args)) for _ in range(2))
  for batch in batches():
    with monkeypatch.context() as patch:
      widen(patch)
      wanted = wide(state, batch)
    state = narrow(state, batch)
    for x, y in zip(
      jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True
    ):
      assert x.dtype == y.dtype
      # XLA fuses the division with the optimizer, and may round the last bit
      # differently. 16 bits would differ by 5e-4.
      np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7)
  skipped = state.wrapper_states["loss_scale"].skipped_steps
  assert int(skipped) == 1 and int(state.step) == 3


def gradients_in_branch(step, state):
  """Returns the dtypes of the arrays that only gradients can be."""
  batch = next(batches())
  with_state = jax.make_jaxpr(step)(state, batch)
  (cond,) = [e for e in with_state.eqns if e.primitive.name == "cond"]
  dtypes = [x.aval.dtype.name for x in cond.invars if x.aval.ndim]
  # Parameters and the two slots of Adam are float32.
  for _ in range(3 * len(jax.tree.leaves(state.params))):
    dtypes.remove("float32")
  return sorted(dtypes)


@pytest.mark.parametrize(
  ("step", "dtype", "entered"),
  [
    # `twice` has a sum of two gradients, in float32; `scale` has no 16 bits.
    (train_step, "float16", ["float16", "float32", "float32"]),
    (minimize, "bfloat16", ["bfloat16", "float32", "float32"]),
    (clipped, "float16", ["float32"] * 3),
    # Gradients of 16-bit parameters.
    (by_hand, "float32", ["float16"] * 3),
  ],
)
def test_gradients_enter_the_branch_in_16_bits(
  monkeypatch, step, dtype, entered
):
  state = create(dtype)
  assert gradients_in_branch(step, state) == entered
  if step != clipped:
    assert_same_when_wide(monkeypatch, state, step)


def test_another_wrapper_that_unscales_gets_float32_gradients():
  class Halve(fs.wrappers.Base):
    def unscale_gradients(self, state, grads):
      assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
      return grads

  state = create("float16", Halve(), fs.LossScale(RULE))
  assert gradients_in_branch(train_step, state) == ["float32"] * 3
