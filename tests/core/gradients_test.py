"""Gradient trees: which leaves are gradients, and whether all are finite."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.core import gradients

BAD = [np.inf, -np.inf, np.nan]

# Shared by the tests, so that each shape is compiled once.
all_finite = jax.jit(gradients.all_finite)


def test_every_corner_of_a_large_matrix_is_checked():
  # On CPU large float32 leaves are checked by a product with zeros.
  x = np.ones((130, 257), np.float32)
  corners = [(0, 0), (0, -1), (-1, 0), (-1, -1), (64, 100)]
  for where, value in itertools.product(corners, BAD):
    y = x.copy()
    y[where] = value
    assert not bool(all_finite(y)), (where, value)
  assert bool(all_finite(x))


def test_largest_values_and_subnormals_are_finite():
  # Neither 0 * x nor the sum may overflow.
  x = np.full((130, 257), np.finfo(np.float32).max, np.float32)
  x[::2] *= -1
  x[1] = 1e-42
  assert bool(all_finite(x))


def test_flag_is_reduced_inside_shard_map():
  mesh = jax.make_mesh(
    (4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(P("x", "y"), P()), out_specs=P("x", "y")
  )
  def flags(a, b):
    flag = gradients.all_finite({"a": a, "b": b})
    # An agreed flag varies over no axis: a cond may hold collectives then.
    assert not jax.typeof(flag).manual_axis_type.varying
    return jnp.full((1, 1), flag)

  ones = np.ones((4, 2), np.float32)
  bad = ones.copy()
  bad[2, 1] = np.inf
  assert np.asarray(flags(ones, ones)).all()
  assert not np.asarray(flags(bad, ones)).any()
  assert not np.asarray(flags(ones, bad)).any()


def test_nonfinite_leaves_in_tree_order():
  grads = {
    "Dense_0": {"bias": jnp.ones(2), "kernel": jnp.full((2, 2), jnp.inf)},
    "Dense_1": [jnp.ones(1), jnp.array([1.0, jnp.nan])],
    "count": jnp.array(3),
    "none": None,
    "scalar": -np.inf,
  }
  assert fs.nonfinite_leaves(grads) == ["Dense_0/kernel", "Dense_1/1", "scalar"]


# -- IndexedSlices among the gradients.


def rows(indices, values, dtype=jnp.float32):
  values = jnp.asarray(values, dtype)[:, None] * jnp.ones((1, 2), dtype)
  return fs.IndexedSlices(indices, values, (5, 2))


def test_all_finite_of_rows():
  for bad in BAD:
    assert not all_finite({"a": rows([1, 3], [1.0, bad]), "b": jnp.ones(2)})
  # Padding does not count.
  assert all_finite(rows([1, 5, -1], [1.0, np.nan, np.inf]))


# -- Gradients in 16 bits, where that is exact, and nowhere else.

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def half(w, dtype=F16):
  return (w.astype(dtype) ** 2).sum().astype(F32)


def reused(w):
  return half(w) + half(2 * w)


def reshaped(w):
  return half(w.reshape(3, 2).T)


def looped(w):
  # The gradient is collected over the turns of a loop.
  turn = lambda total, row: (total + half(row), None)
  return jax.lax.scan(turn, jnp.float32(0), w)[0]


LOSSES = {
  "float16": (half, F16),
  "bfloat16": (lambda w: half(w, BF16), BF16),
  "float32": (lambda w: (w**2).sum(), F32),
  "moved": (reshaped, F16),
  "in jit": (jax.jit(half), F16),
  "in remat": (jax.checkpoint(half), F16),
  # A sum of two 16-bit gradients is computed in float32.
  "used twice": (reused, F32),
  # XLA would collect float32 gradients and cast them after the loop.
  "in scan": (looped, F32),
  "also in float32": (lambda w: half(w) + w.sum(), F32),
  "unused": (lambda w: jnp.float32(0), F32),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_narrow_only_if_its_last_operation_widens_it(name):
  loss, dtype = LOSSES[name]
  w = jnp.linspace(0.1, 3, 6).reshape(2, 3)
  (value, _), grad = jax.jit(
    lambda w: gradients.narrow_value_and_grad(lambda w: (loss(w), None), w)
  )(w)
  wanted, wanted_grad = jax.jit(jax.value_and_grad(loss))(w)
  assert grad.dtype == dtype
  np.testing.assert_array_equal(value, wanted)
  np.testing.assert_array_equal(grad.astype(F32), wanted_grad)


def test_aux_may_hold_anything_and_the_function_is_called_once():
  calls = []
  stored = {}

  def step(params, x):
    def loss_fn(params):
      calls.append(1)
      stored["twice"] = 2 * x
      aux = {"n": 3, "x": x, "host": np.ones(2)}
      # The product with x in float32 is differentiated after the cast.
      return half(params["w"] * x), aux

    (loss, aux), grads = gradients.narrow_value_and_grad(loss_fn, params)
    assert aux["n"] == 3 and aux["x"].shape == aux["host"].shape == (2,)
    assert grads["w"].dtype == F32 and grads["i"].dtype == jax.dtypes.float0
    return loss, grads["w"], aux["x"], stored["twice"]

  x = jnp.arange(2.0)
  params = {"w": jnp.ones(2), "i": jnp.ones(2, int)}
  loss, grad, same, twice = jax.jit(step)(params, x)
  assert float(loss) == 1 and grad.tolist() == [0, 2]
  assert same.tolist() == [0, 1] and twice.tolist() == [0, 2]
  assert len(calls) == 1


def test_no_tracer_is_left_behind():
  fn = lambda params: (half(params["w"]), None)
  step = lambda params: gradients.narrow_value_and_grad(fn, params)[1]["w"]
  with jax.checking_leaks():
    grad = jax.jit(step)({"w": jnp.ones(2), "i": jnp.ones(2, int)})
  assert grad.dtype == F16
