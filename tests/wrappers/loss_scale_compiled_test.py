"""The compiled step of LossScale: its branch, memory, and 16-bit gradients."""

import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_close

import flaxshard as fs


def compiled_mlp_step(*wrappers):
  shape = jax.ShapeDtypeStruct((512, 512), jnp.float32)
  state = fs.TrainState.create(
    apply_fn=None, params=[shape] * 3, tx=optax.adam(1e-3), wrappers=wrappers
  )

  def loss_fn(params, x):
    for w in params:
      x = jnp.tanh(x @ w)
    return (x**2).mean()

  step = jax.jit(lambda s, x: s.minimize(loss_fn, x), donate_argnums=0)
  return step.lower(state, jnp.ones((4, 512))).compile()


def test_donated_adam_state_is_updated_in_place_in_a_branch():
  bare = compiled_mlp_step().memory_analysis()
  ours = compiled_mlp_step(fs.LossScale("dynamic"))
  memory = ours.memory_analysis()
  gradients = 3 * 512 * 512 * 4
  # To select between old and new would copy the state: three times this.
  assert memory.temp_size_in_bytes <= bare.temp_size_in_bytes + 1.1 * gradients
  # The outputs use the buffers of the donated state.
  assert memory.alias_size_in_bytes >= 3 * gradients
  assert "conditional(" in ours.as_text()
  assert "conditional(" not in compiled_mlp_step(fs.LossScale(8)).as_text()


# 16-bit gradients enter the branch in 16 bits; no result changes.

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


class Halve(fs.wrappers.Base):
  """Another wrapper that unscales: it gets gradients in float32."""

  def unscale_gradients(self, state, grads):
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
    return grads


def create(dtype, *wrappers):
  return fs.create_train_state(
    Model(dtype),
    jax.random.key(0),
    jnp.ones((1, 4)),
    optax.adam(0.1),
    wrappers=[*wrappers, fs.LossScale(RULE)],
  )


def loss_of(params, state, x, weight):
  out = state.apply_fn({"params": params}, x).astype(jnp.float32)
  # `weight` lets the gradient overflow.
  return ((out - np.repeat(x, 2, axis=1)) ** 2).mean() * weight


def minimize(state, *batch):
  return state.minimize(loss_of, state, *batch)[0]


def clipped(state, *batch):
  _, grads = state.value_and_grad(loss_of, state, *batch)
  grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
  return state.apply_gradients(grads=grads)


def half(state):
  return jax.tree.map(lambda p: p.astype(jnp.float16), state.params)


def scaled_gradients(state, params, *batch):
  loss = lambda params: state.scale_loss(loss_of(params, state, *batch))
  return jax.grad(loss)(params)


def by_hand(state, *batch):
  grads = scaled_gradients(state, half(state), *batch)
  return state.apply_gradients(grads=state.unscale_gradients(grads))


def in_float32(state, params, *batch):
  """A step that divides the gradients by the scale before it gives them."""
  grads = scaled_gradients(state, params, *batch)
  scale = state.wrapper_states["loss_scale"].scale
  grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
  return state.apply_gradients(grads=grads)


@pytest.mark.parametrize(
  ("step", "model", "entered"),
  [
    # `twice` has a sum of two gradients, in float32; `scale` has no 16 bits.
    (minimize, ["float16"], ["float16", "float32", "float32"]),
    (minimize, ["bfloat16"], ["bfloat16", "float32", "float32"]),
    (minimize, ["float16", Halve()], ["float32"] * 3),
    (clipped, ["float16"], ["float32"] * 3),
    # Gradients of 16-bit parameters.
    (by_hand, ["float32"], ["float16"] * 3),
  ],
)
def test_gradients_enter_the_branch_in_16_bits(step, model, entered):
  state = create(*model)
  x = np.random.default_rng(0).normal(size=(4, 16, 4)).astype(np.float32)
  program = jax.make_jaxpr(step)(state, x[0], 1.0)
  (cond,) = [e for e in program.eqns if e.primitive.name == "cond"]
  dtypes = [x.aval.dtype.name for x in cond.invars if x.aval.ndim]
  # Parameters and the two slots of Adam are float32.
  for _ in range(3 * len(jax.tree.leaves(state.params))):
    dtypes.remove("float32")
  assert sorted(dtypes) == entered
  if step is clipped:
    return
  narrow, wide = jax.jit(step), jax.jit(in_float32)
  for i, weight in enumerate((1.0, 0.5, 3e38, 2.0)):
    params = half(state) if step is by_hand else state.params
    wanted = wide(state, params, x[i], weight)
    state = narrow(state, x[i], weight)
    # XLA fuses the division with the optimizer, and may round the last bit
    # differently. 16 bits would differ by 5e-4.
    assert_trees_close(state, wanted, rtol=2e-6, atol=1e-7)
  assert (int(state.metrics()["skipped_steps"]), int(state.step)) == (1, 3)
