"""Gradient trees: which leaves are gradients, and whether all are finite."""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

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
