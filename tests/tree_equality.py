"""Compares trees of arrays."""

import functools

import jax
import numpy as np


def assert_trees_equal(a, b):
  """Asserts that two trees have equal structures, shapes, dtypes and values."""
  _compare(np.testing.assert_array_equal, a, b)


def assert_trees_close(a, b, rtol=1e-5, atol=1e-6):
  """Asserts that two trees differ in rounded values alone."""
  compare = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
  _compare(compare, a, b)


def _compare(compare, a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    compare(np.asarray(x), np.asarray(y))
