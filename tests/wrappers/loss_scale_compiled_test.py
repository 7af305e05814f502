"""The compiled step of LossScale: its branch, memory, and 16-bit gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import quadratic_states
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
SCALE = fs.LossScale(fs.DynamicLossScale(123.4, growth_factor=7.3))
ADAM = optax.adam(0.1)


def grid(*shape):
  return np.linspace(-0.5, 0.7, math.prod(shape), dtype="f").reshape(shape)


PARAMS = {"once": grid(4, 8), "twice": grid(8, 8), "scale": grid(8)}


def loss_of(params, dtype, x, weight):
  """Uses `twice` twice, and `scale` in float32."""
  narrow = lambda x: x.astype(dtype)
  y = jax.nn.relu(narrow(x) @ narrow(params["once"])) @ narrow(params["twice"])
  y = jax.checkpoint(jnp.multiply)(y.astype("float32"), params["scale"])
  y = (narrow(y) @ narrow(params["twice"])).astype("float32")
  # `weight` lets the gradient overflow.
  return ((y - np.repeat(x, 2, axis=1)) ** 2).mean() * weight


class Halve(fs.wrappers.Base):
  """Another wrapper that unscales: it gets gradients in float32."""

  def unscale_gradients(self, state, grads):
    assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
    return grads


def minimize(state, *batch):
  return state.minimize(loss_of, *batch)[0]


def clipped(state, *batch):
  _, grads = state.value_and_grad(loss_of, *batch)
  grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
  return state.apply_gradients(grads=grads)


def half(state):
  return jax.tree.map(lambda p: p.astype(jnp.float16), state.params)


def scaled_gradients(state, params, *batch):
  loss = lambda params: state.scale_loss(loss_of(params, *batch))
  return jax.grad(loss)(params)


def by_hand(state, *batch):
  grads = scaled_gradients(state, half(state), *batch)
  return state.apply_gradients(grads=state.unscale_gradients(grads))


@functools.partial(jax.jit, static_argnums=2)
def in_float32(state, params, *batch):
  """A step that divides the gradients by the scale before it gives them."""
  grads = scaled_gradients(state, params, *batch)
  scale = state.wrapper_states["loss_scale"].scale
  grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
  return state.apply_gradients(grads=grads)


@pytest.mark.parametrize(
  ("step", "dtype", "wrappers", "entered"),
  [
    # `twice` has a sum of two gradients, in float32; `scale` has no 16 bits.
    (minimize, "float16", [], ["float16", "float32", "float32"]),
    (minimize, "bfloat16", [], ["bfloat16", "float32", "float32"]),
    (minimize, "float16", [Halve()], ["float32"] * 3),
    (clipped, "float16", [], ["float32"] * 3),
    # Gradients of 16-bit parameters.
    (by_hand, "float32", [], ["float16"] * 3),
  ],
)
def test_gradients_enter_the_branch_in_16_bits(step, dtype, wrappers, entered):
  state = quadratic_states.create([*wrappers, SCALE], ADAM, PARAMS)
  x = np.random.default_rng(0).normal(size=(4, 16, 4)).astype(np.float32)
  narrow = jax.jit(step, static_argnums=1)
  program = narrow.trace(state, dtype, x[0], 1.0).jaxpr
  (cond,) = [e for e in program.eqns if e.primitive.name == "cond"]
  dtypes = [x.aval.dtype.name for x in cond.invars if x.aval.ndim]
  # Parameters and the two slots of Adam are float32.
  for _ in range(3 * len(jax.tree.leaves(state.params))):
    dtypes.remove("float32")
  assert sorted(dtypes) == entered
  if step is clipped:
    return
  for i, weight in enumerate((1.0, 0.5, 3e38, 2.0)):
    params = half(state) if step is by_hand else state.params
    wanted = in_float32(state, params, dtype, x[i], weight)
    state = narrow(state, dtype, x[i], weight)
    # XLA fuses the division with the optimizer, and may round the last bit
    # differently. 16 bits would differ by 5e-4.
    assert_trees_close(state, wanted, rtol=2e-6, atol=1e-7)
  assert (int(state.metrics()["skipped_steps"]), int(state.step)) == (1, 3)
