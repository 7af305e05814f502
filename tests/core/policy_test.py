"""Precision policies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs


@pytest.mark.parametrize(
  ("name", "compute"),
  [
    ("float32", "float32"),
    ("mixed_float16", "float16"),
    ("mixed_bfloat16", "bfloat16"),
  ],
)
def test_dtypes(name, compute):
  policy = fs.Policy(name)
  assert policy.compute_dtype == jnp.dtype(compute)
  # What is stored and what the loss is taken of stays float32 in each.
  assert policy.param_dtype == policy.output_dtype == jnp.dtype("float32")


def test_default_is_float32():
  assert fs.Policy() == fs.Policy("float32")
  assert fs.Policy().compute_dtype == jnp.float32


def test_casts_touch_floating_leaves_only():
  tree = {
    "x": np.array([1.0, 1.0 + 2.0**-12], np.float32),
    "i": np.array([3], np.int32),
    "b": np.array([True]),
    "c": np.array([1j], np.complex64),
    "none": None,
  }
  half = fs.Policy("mixed_float16").cast_to_compute(tree)
  dtypes = {k: v.dtype.name for k, v in half.items() if v is not None}
  assert dtypes == {
    "x": "float16",
    "i": "int32",
    "b": "bool",
    "c": "complex64",
  }
  # 1 + 2**-12 is between two float16 numbers.
  assert half["x"].tolist() == [1.0, 1.0]
  back = fs.Policy("mixed_float16").cast_to_output(half)
  assert back["x"].dtype == jnp.float32
  assert back["i"].dtype == jnp.int32
  assert back["none"] is None


def test_float32_casts_change_nothing():
  x = jnp.array([0.1, 0.2])
  np.testing.assert_array_equal(fs.Policy().cast_to_compute(x), x)
  assert fs.Policy().cast_to_compute(1.5).dtype == jnp.float32


def test_casts_work_under_jit_and_grad():
  policy = fs.Policy("mixed_bfloat16")
  f = lambda w: policy.cast_to_output(policy.cast_to_compute(w) * 3).sum()
  grad = jax.jit(jax.grad(f))(jnp.ones(2))
  assert grad.dtype == jnp.float32
  np.testing.assert_array_equal(grad, [3.0, 3.0])


def test_policies_are_values():
  assert hash(fs.Policy("float32")) == hash(fs.Policy())
  assert fs.Policy("mixed_float16") != fs.Policy()
  with pytest.raises(AttributeError):
    fs.Policy().name = "mixed_float16"


def test_unknown_names_list_what_exists():
  with pytest.raises(
    ValueError,
    match="unknown name 'float16'; allowed: 'float32', 'mixed_float16', "
    "'mixed_bfloat16'",
  ):
    fs.Policy("float16")


@pytest.mark.parametrize("name", [None, jnp.float16, 16])
def test_names_are_strings(name):
  with pytest.raises(TypeError, match="name must be a string"):
    fs.Policy(name)
