"""16-bit gradients enter LossScale's branch in 16 bits; no result changes."""

import functools
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tree_equality import assert_trees_equal

import flaxshard as fs
from flaxshard.wrappers.loss_scale_narrow import NarrowGradients

P = jax.sharding.PartitionSpec
# Powers of two. XLA may multiply other scales by a constant of the optimizer
# before it divides by them, which rounds differently.
RULE = fs.DynamicLossScale(initial_scale=128.0, growth_factor=8.0)


def create_two():
  return fs.TrainState.create(
    apply_fn=None,
    params={"a": jnp.linspace(0.5, 3, 4), "b": jnp.zeros(2)},
    tx=optax.sgd(0.1),
    wrappers=[fs.LossScale(RULE)],
  )


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


def create(dtype, *wrappers, strategy=None):
  return fs.create_train_state(
    Model(dtype),
    jax.random.key(0),
    jnp.ones((1, 4)),
    optax.adam(0.1),
    wrappers=wrappers or [fs.LossScale(RULE)],
    strategy=strategy,
  )


def loss_of(state, batch, params):
  out = state.apply_fn({"params": params}, batch["x"]).astype(jnp.float32)
  # `weight` lets the gradient overflow.
  return ((out - batch["y"]) ** 2).mean() * batch["weight"].mean()


def train_step(state, batch):
  loss, grads = state.value_and_grad(functools.partial(loss_of, state, batch))
  return state.apply_gradients(grads=grads), loss


def minimize(state, batch):
  return state.minimize(functools.partial(loss_of, state, batch))


def by_hand(state, batch):
  def scaled_loss(params):
    return state.scale_loss(loss_of(state, batch, params))

  half = jax.tree.map(lambda p: p.astype(jnp.float16), state.params)
  grads = state.unscale_gradients(jax.grad(scaled_loss)(half))
  return state.apply_gradients(grads=grads), jnp.zeros(())


def clipped(state, batch):
  _, grads = state.value_and_grad(functools.partial(loss_of, state, batch))
  grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)
  return state.apply_gradients(grads=grads), jnp.zeros(())


def batches(place=lambda x: x):
  for i, weight in enumerate((1.0, 0.5, 3e38, 2.0)):
    x = np.random.default_rng(i).normal(size=(16, 4)).astype(np.float32)
    y = np.repeat(x, 2, axis=1)
    weight = np.full(16, weight, np.float32)
    yield place({"x": x, "y": y, "weight": weight})


def widen(monkeypatch):
  """Lets the gradients enter the branch unscaled, in float32."""
  monkeypatch.setattr(
    fs.LossScale, "takes_narrow_gradients", lambda self, state: False
  )
  monkeypatch.setattr(NarrowGradients, "recall", lambda *args: None)


def assert_same_when_wide(monkeypatch, train):
  """Asserts that `train()` returns the same without the 16-bit gradients."""
  narrow = train()
  with monkeypatch.context() as patch:
    widen(patch)
    wide = train()
  # Two models have two functions `apply`, which are not equal.
  assert_trees_equal(jax.tree.leaves(narrow), jax.tree.leaves(wide))
  skipped = narrow.wrapper_states["loss_scale"].skipped_steps
  assert int(skipped) == 1 and int(narrow.step) == 3


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
  ("step", "dtype"),
  [
    (train_step, "float16"),
    (minimize, "bfloat16"),
    (by_hand, "float32"),
  ],
)
def test_steps_equal_those_with_float32_gradients(monkeypatch, step, dtype):
  def train():
    state, jitted = create(dtype), jax.jit(step)
    for batch in batches():
      state, _ = jitted(state, batch)
    return state

  assert_same_when_wide(monkeypatch, train)


def test_steps_in_the_global_view_equal_those_with_float32_gradients(
  monkeypatch,
):
  strategy = fs.Strategy()

  def train():
    state, step = create("bfloat16", strategy=strategy), jax.jit(train_step)
    for batch in batches(strategy.shard_batch):
      state, _ = step(state, batch)
    return state

  assert_same_when_wide(monkeypatch, train)


def test_steps_in_run_equal_those_with_float32_gradients(monkeypatch):
  # Gradients that are summed over the replicas are float32; AGN sums none.
  strategy, agn = fs.Strategy(), fs.AGN(2, commit="mean")

  def train():
    state = create("float16", fs.LossScale(RULE), agn, strategy=strategy)
    # A new function: `run` keeps what it has compiled.
    step = lambda state, batch: train_step(state, batch)
    for batch in batches(strategy.shard_batch):
      state, _ = strategy.run(step, args=(state, batch))
    return state

  assert_same_when_wide(monkeypatch, train)


@pytest.mark.parametrize(
  ("step", "dtype"), [(train_step, "float16"), (minimize, "bfloat16")]
)
def test_gradients_enter_the_branch_in_16_bits(step, dtype):
  # `twice` has a sum of two gradients, in float32; `scale` has no 16 bits.
  assert gradients_in_branch(step, create(dtype)) == [
    dtype,
    "float32",
    "float32",
  ]


def test_eager_loss_may_branch_on_an_argument():
  state, x = create_two(), jnp.ones(2)

  def grad_of(a):
    params = {**state.params, "a": a}
    # Under vmap the parameters are tracers, and `x` is not.
    loss_fn = lambda p: p["a"].sum() if jnp.sum(x) > 0 else p["b"].sum()
    return state.replace(params=params).value_and_grad(loss_fn)[1]["a"]

  assert jax.vmap(grad_of)(jnp.zeros((2, 4))).tolist() == [[1] * 4] * 2


def test_gradients_that_were_clipped_enter_the_branch_in_float32():
  assert gradients_in_branch(clipped, create("float16")) == ["float32"] * 3


def test_gradients_of_16_bit_parameters_enter_the_branch_in_16_bits():
  assert gradients_in_branch(by_hand, create("float32")) == ["float16"] * 3


def test_another_wrapper_that_unscales_gets_float32_gradients():
  class Halve(fs.wrappers.Base):
    def unscale_gradients(self, state, grads):
      assert {g.dtype.name for g in jax.tree.leaves(grads)} == {"float32"}
      return grads

  state = create("float16", Halve(), fs.LossScale(RULE))
  assert gradients_in_branch(train_step, state) == ["float32"] * 3


def test_gradients_of_another_scale_are_not_taken_from_the_record():
  narrow, scale, other = NarrowGradients(), jnp.ones(()), jnp.ones(())
  scaled, unscaled = jnp.ones(2, jnp.float16), jnp.ones(2)
  narrow.remember(unscaled, scaled, scale)
  assert narrow.recall(unscaled, scale) is scaled
  assert narrow.recall(unscaled, other) is None
  assert narrow.recall(scaled, scale) is None
  del scaled
  assert narrow.recall(unscaled, scale) is None


def test_overflow_in_one_leaf_skips_the_step(monkeypatch):
  def step(state, weight):
    def loss_fn(params):
      a, b = (params[k].astype(jnp.float16) for k in "ab")
      loss = (a**2).sum() + (b * weight.astype(jnp.float16)).sum()
      return loss.astype(jnp.float32)

    return state.minimize(loss_fn)[0]

  def train():
    state, jitted = create_two(), jax.jit(step)
    for weight in (1.0, 0.5, 3e4, 2.0):
      state = jitted(state, jnp.float32(weight))
    return state

  assert_same_when_wide(monkeypatch, train)
