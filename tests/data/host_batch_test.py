"""Host batches: invalid leaves raise, values are those of JAX."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flaxshard.data import host_batch

RAGGED = np.empty(2, object)
RAGGED[:] = [[1, 2], [3]]


@pytest.mark.parametrize(
  ("leaf", "error", "facts"),
  [
    (RAGGED, ValueError, ["[a/b]", "objects", "(2,)"]),
    (np.array(["x", "y"]), TypeError, ["[a/b]", "<U1"]),
    (np.ma.masked_array([1, 2], [0, 1]), TypeError, ["[a/b]", "masked"]),
    (jax.random.split(jax.random.key(0)), TypeError, ["[a/b]", "key"]),
    (np.float32(3), ValueError, ["[a/b]", "scalar"]),
    ([np.ones(2), np.ones(3)], ValueError, ["[a/b/1] has 3", "[a/b/0] has 2"]),
    (np.ones(3), ValueError, ["[x] has 2", "[a/b] has 3"]),
    (np.array([1, 2**31]), ValueError, ["[a/b]", "int64", "2147483648"]),
  ],
)
def test_an_invalid_leaf_raises_with_its_path(leaf, error, facts):
  with pytest.raises(error) as e:
    host_batch.flatten({"a": {"b": leaf}, "x": np.ones(2)})
  assert type(e.value) is error
  for fact in facts:
    assert fact in str(e.value)


def test_a_batch_without_arrays_raises():
  for batch in ({}, None, {"a": None}):
    with pytest.raises(ValueError, match="must have arrays"):
      host_batch.flatten(batch)


def test_only_finite_numbers_that_overflow_raise():
  for shape in ((2,), (4,)):  # without and with padding
    with pytest.raises(ValueError, match=r"batch\[x\].*float32"):
      host_batch.join("x", [np.array([1.0, 1e300])], shape)
  x = np.array([np.inf, -np.inf, np.nan, 1 / 3])
  np.testing.assert_array_equal(
    host_batch.join("x", [x], (4,)), x.astype(np.float32)
  )


@pytest.mark.parametrize(
  "dtype",
  [
    *("bool", "float64", ">i8", "complex128"),
    ml_dtypes.bfloat16,
  ],
)
def test_values_and_dtypes_are_those_of_jax_in_new_memory(dtype):
  x = np.array([0, 1, 2, 3]).astype(dtype)
  out = host_batch.join("x", [x], (4,))
  wanted = jnp.asarray(x.astype(x.dtype.newbyteorder("=")))
  assert out.dtype == wanted.dtype == host_batch.dtype_of(x)
  np.testing.assert_array_equal(out, wanted)
  assert not np.shares_memory(out, x)
