"""Element-wise updates and functions, and those that only look like it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flaxshard.wrappers import agn_sequential

PARAMS = {"w": np.ones((8, 3)), "b": np.ones(16), "scalar": np.ones(())}
PARAMS = jax.tree.map(np.float32, PARAMS)
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 50)
BY_LEAF = {"a": optax.adam(0.1), "b": optax.sgd(0.1)}
LABELS = {"w": "a", "b": "b", "scalar": "b"}


def half(x):
  shape = (x.shape[0] // 2, *x.shape[1:]) if x.shape else ()
  return jax.ShapeDtypeStruct(shape, x.dtype)


def matrices(params):
  return jax.tree.map(lambda p: p.ndim > 1, params)


def is_elementwise(fn, *args):
  """Decides for arguments of which each device has a half."""
  return agn_sequential.is_elementwise(fn, args, jax.tree.map(half, args))


@pytest.mark.parametrize(
  ("tx", "wanted"),
  [
    (optax.adam(0.1, mu_dtype=jnp.bfloat16), True),
    (optax.adamw(SCHEDULE, mask=matrices), True),
    (optax.multi_transform(BY_LEAF, lambda _: LABELS), True),
    (optax.MultiSteps(optax.adam(0.1), 3), True),
    (optax.inject_hyperparams(optax.adam)(0.1), True),
    (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
    (optax.contrib.muon(0.1), False),
    (optax.apply_if_finite(optax.adam(0.1), 3), False),
  ],
)
def test_optimizers(tx, wanted):
  def update(center, grads):
    params, state = center
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  assert is_elementwise(update, (PARAMS, tx.init(PARAMS)), PARAMS) == wanted


def refuses_parts(x):
  if x.shape[0] != 8:
    raise ValueError("eight rows, please")
  return x


X = np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
  ("fn", "wanted"),
  [
    (lambda x: jnp.where(x > 0, x, jnp.exp(x)), True),
    (lambda x: jax.nn.relu(x) + jax.jit(jnp.tanh)(x), True),
    (lambda x: x + jnp.full_like(x, 2), True),
    (lambda x: x * jnp.array([3.0, 2.0, 1.0])[jnp.minimum(x.ndim, 1)], True),
    (lambda x: x - x.mean(0), False),
    # Element-wise for this split, but not recognized.
    (lambda x: x - x.mean(1, keepdims=True), False),
    (lambda x: x + jnp.arange(x.shape[0])[:, None], False),
    (lambda x: x + jax.random.normal(jax.random.key(0), x.shape), False),
    (lambda x: x.T if x.shape[0] == x.shape[1] else x, False),
    (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), False),
    # Numbers that depend on the shape: a literal, constants, computed values,
    # and parameters of equations.
    (lambda x: x * x.shape[0] ** -0.5, False),
    (lambda x: x * jnp.arange(x.size).sum(), False),
    (lambda x: x * jnp.asarray(np.array([x.size]))[0], False),
    (lambda x: x * jax.lax.fori_loop(0, len(x), lambda _, c: c + 1, 1), False),
    (lambda x: jax.lax.reduce_precision(x, 8, 3 if len(x) > 4 else 20), False),
    (refuses_parts, False),
  ],
)
def test_functions(fn, wanted):
  assert is_elementwise(fn, X) == wanted


@pytest.mark.parametrize(
  ("parts", "shape", "wanted"),
  [
    (((2, 4), (2, 4)), (4, 4), True),
    (((2, 4), (4, 2)), (4, 4), False),
    (((1, 4), (4, 4)), (4, 4), False),
    # Repeated along the rows.
    (((2, 4), (1, 4)), (1, 4), True),
    (((2, 4), (1, 1)), (1, 4), False),
  ],
)
def test_parts_along_different_dimensions_do_not_combine(parts, shape, wanted):
  args = jnp.ones((4, 4)), jnp.ones(shape)
  parts = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in parts]
  assert agn_sequential.is_elementwise(jnp.add, args, parts) == wanted


def test_an_unsplit_output_must_not_depend_on_a_part():
  state = X, jnp.ones(())
  assert not is_elementwise(lambda s: (s[0], s[1] + s[0].sum()), state)
  assert is_elementwise(lambda s: (s[0] * s[1], s[1] + 1), state)


def test_values_that_may_be_per_replica():
  # Captured from an outer trace.
  captures = lambda y: jnp.array(is_elementwise(lambda x: x * y, X))
  assert not jax.jit(captures)(2.0)

  def fn(x):
    return x * is_elementwise(lambda x: x * jax.lax.axis_index("replica"), X)

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("replica",))
  spec = jax.P("replica")
  out = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)(X)
  np.testing.assert_array_equal(out, np.zeros_like(X))
