"""Precision policies."""

import jax.numpy as jnp
import pytest

import flaxshard as fs


def test_dtypes():
  for name, compute_dtype in (
    ("float32", jnp.float32),
    ("mixed_float16", jnp.float16),
    ("mixed_bfloat16", jnp.bfloat16),
  ):
    policy = fs.Policy(name)
    assert policy.compute_dtype == compute_dtype
    assert policy.param_dtype == jnp.float32
    assert policy.output_dtype == jnp.float32


def test_default_is_float32():
  assert fs.Policy() == fs.Policy("float32")
  assert hash(fs.Policy()) == hash(fs.Policy("float32"))
  assert fs.Policy() != fs.Policy("mixed_float16")


def test_policy_is_frozen():
  with pytest.raises(AttributeError):
    fs.Policy().name = "mixed_float16"


def test_invalid_name_raises():
  with pytest.raises(ValueError, match=r"name .*mixed_float16"):
    fs.Policy("float16")
  with pytest.raises(TypeError, match=r"name .*mixed_float16"):
    fs.Policy(jnp.float16)
