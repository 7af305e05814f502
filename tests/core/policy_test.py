"""Precision policies."""

import jax.numpy as jnp

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
