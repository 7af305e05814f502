"""Element-wise updates and functions, and those that only look like it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxshard.wrappers import elementwise

P = jax.sharding.PartitionSpec
PARAMS = {"w": jnp.ones((8, 3)), "b": jnp.ones(16), "scalar": jnp.ones(())}


def half(x):
  shape = (x.shape[0] // 2, *x.shape[1:]) if x.shape else ()
  return jax.ShapeDtypeStruct(shape, x.dtype)


def is_elementwise(tx):
  def update(center, grads):
    params, state = center
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  args = ((PARAMS, tx.init(PARAMS)), PARAMS)
  parts = jax.tree.map(half, args)
  return elementwise.is_elementwise(update, args, parts)


def matrices(params):
  return jax.tree.map(lambda p: p.ndim > 1, params)


def labels(params):
  return {key: "a" if key == "w" else "b" for key in params}


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 50)


@pytest.mark.parametrize(
  ("tx", "wanted"),
  [
    (optax.adam(0.1, mu_dtype=jnp.bfloat16), True),
    (optax.adamw(SCHEDULE, mask=matrices), True),
    (optax.chain(optax.clip(1.0), optax.rmsprop(0.1)), True),
    (
      optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.sgd(0.1)}, labels
      ),
      True,
    ),
    (optax.MultiSteps(optax.adam(0.1), 3), True),
    (optax.inject_hyperparams(optax.adam)(0.1), True),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
    (optax.lamb(0.1), False),
    (optax.contrib.muon(0.1), False),
    (optax.apply_if_finite(optax.adam(0.1), 3), False),
  ],
)
def test_optimizers(tx, wanted):
  assert is_elementwise(tx) == wanted


def refuses_parts(x):
  if x.shape[0] != 8:
    raise ValueError("eight rows, please")
  return x


X, PART = jnp.ones((8, 4)), jax.ShapeDtypeStruct((4, 4), jnp.float32)


@pytest.mark.parametrize(
  "fn",
  [
    lambda x: jnp.where(x > 0, x, jnp.exp(x)),
    lambda x: jax.nn.relu(x) + jax.jit(jnp.tanh)(x),
    lambda x: x + jnp.full_like(x, 2),
    lambda x: x * jnp.array([3.0, 2.0, 1.0])[jnp.minimum(x.ndim, 1)],
  ],
)
def test_elementwise_functions(fn):
  assert elementwise.is_elementwise(fn, (X,), (PART,))


@pytest.mark.parametrize(
  "fn",
  [
    lambda x: x - x.mean(0),
    # Element-wise for this split, but not recognized.
    lambda x: x - x.mean(1, keepdims=True),
    lambda x: x + jnp.arange(x.shape[0])[:, None],
    lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
    lambda x: x.T if x.shape[0] == x.shape[1] else x,
    lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    # Numbers that depend on the shape: a literal, constants, computed values,
    # and parameters of equations.
    lambda x: x * x.shape[0] ** -0.5,
    lambda x: x * jnp.arange(x.size).sum(),
    lambda x: x * jnp.asarray(np.array([x.size]))[0],
    lambda x: x * jax.lax.fori_loop(0, x.shape[0], lambda _, c: c + 1.0, 1.0),
    lambda x: jax.lax.reduce_precision(x, 8, 3 if x.size > 16 else 20),
    refuses_parts,
  ],
)
def test_functions_that_mix_elements_or_depend_on_the_shape(fn):
  assert not elementwise.is_elementwise(fn, (X,), (PART,))


def test_parts_along_different_dimensions_do_not_combine():
  x = jnp.ones((4, 4))
  shapes = ((2, 4), (4, 2))
  parts = tuple(jax.ShapeDtypeStruct(s, x.dtype) for s in shapes)
  add = lambda x, y: x + y
  assert not elementwise.is_elementwise(add, (x, x), parts)
  assert elementwise.is_elementwise(add, (x, x), (parts[0],) * 2)
  # Nor do a part and a whole array.
  whole = jax.ShapeDtypeStruct((4, 4), x.dtype)
  assert not elementwise.is_elementwise(add, (x, x), (parts[0], whole))


def test_an_unsplit_output_must_not_depend_on_a_part():
  scalar = jnp.ones(())

  def leaks(state):
    x, s = state
    return x, s + x.sum()

  args, parts = ((X, scalar),), ((PART, scalar),)
  assert not elementwise.is_elementwise(leaks, args, parts)
  keeps = lambda state: (state[0] * state[1], state[1] + 1)
  assert elementwise.is_elementwise(keeps, args, parts)


def test_a_captured_traced_value_may_be_per_replica():
  def outer(y):
    fn = lambda x: x * y
    return jnp.array(elementwise.is_elementwise(fn, (X,), (PART,)))

  assert not jax.jit(outer)(2.0)


def test_an_axis_index_is_per_replica():
  def fn(x):
    times = lambda x: x * jax.lax.axis_index("replica")
    return x * elementwise.is_elementwise(times, (X,), (PART,))

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
  spec = P("replica")
  out = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)(X)
  np.testing.assert_array_equal(out, np.zeros_like(X))
