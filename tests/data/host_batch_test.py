"""Host batches: which leaves are refused, and what becomes of the others."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from flaxshard.data import host_batch

RAGGED = np.empty(2, object)
RAGGED[:] = [[1, 2], [3]]


@pytest.mark.parametrize(
  ("leaf", "error", "message"),
  [
    (RAGGED, ValueError, r"batch\[a/b\] is an array of objects, shape \(2,\)"),
    (np.array(["x", "y"]), TypeError, r"a/b\] must be numbers .* got <U1"),
    (np.array([b"x", b"y"]), TypeError, r"a/b\] must be numbers .* got \|S1"),
    (np.zeros(2, "datetime64[s]"), TypeError, "got datetime64"),
    (np.zeros(2, [("x", "f4")]), TypeError, r"a/b\] must be numbers"),
    (np.ma.masked_array([1, 2], [0, 1]), TypeError, r"a/b\] is a masked array"),
    (jax.random.split(jax.random.key(0)), TypeError, r"a/b\] must be numbers"),
    (3, ValueError, r"batch\[a/b\] is a single number"),
    (np.float32(3), ValueError, r"batch\[a/b\] is a single number"),
    ("text", TypeError, r"batch\[a/b\] must be numbers or booleans, got <U4"),
    ([np.ones(2), np.ones(3)], ValueError, r"a/b/0\] has 2 examples"),
    ([[1, 2], [3]], ValueError, r"batch\[a/b/0/0\] is a single number"),
    (np.ones(3), ValueError, r"batch\[x\] has 2 examples, batch\[a/b\] has 3"),
    (
      np.array([1, 2**31]),
      ValueError,
      "int64, from 1 to 2147483648, and would",
    ),
    (np.array([-(2**31) - 1, 0]), ValueError, "would wrap around in int32"),
    (np.array([0, 2**32], np.uint64), ValueError, "wrap around in uint32"),
  ],
)
def test_leaves_that_are_refused(leaf, error, message):
  if not isinstance(leaf, list) or not isinstance(leaf[0], np.ndarray):
    batch = {"a": {"b": leaf}, "x": np.ones(2)}
  else:
    batch = {"a": {"b": leaf}, "x": np.ones(3)}
    message = r"batch\[a/b/1\] has 3 examples, batch\[a/b/0\] has 2"
  with pytest.raises(error, match=message):
    host_batch.flatten(batch)


@pytest.mark.parametrize("batch", [{}, None, (), {"a": None}])
def test_a_batch_without_arrays(batch):
  with pytest.raises(ValueError, match="a batch must have arrays, got"):
    host_batch.flatten(batch)


def test_numbers_that_overflow_are_refused():
  x = np.array([1.0, 1e300])
  for shape in ((2,), (4,)):
    with pytest.raises(ValueError, match=r"batch\[x\] has finite .* float32"):
      host_batch.join("x", [x], shape)
  # Infinity is none that overflows.
  x = np.array([np.inf, -np.inf, np.nan, 1 / 3])
  np.testing.assert_array_equal(
    host_batch.join("x", [x], (4,)), x.astype(np.float32)
  )


@pytest.mark.parametrize(
  "dtype",
  [
    *("bool", "int8", "uint16", "int64", "uint64", "float16", "float64"),
    *(">f4", ">i8", "complex128", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
  ],
)
def test_values_and_dtypes_are_those_of_jax(dtype):
  x = np.array([0, 1, 2, 3]).astype(dtype)
  out = host_batch.join("x", [x], (4,))
  native = x.astype(x.dtype.newbyteorder("="))
  wanted = jnp.asarray(native)
  assert out.dtype == wanted.dtype == host_batch.dtype_of(x)
  np.testing.assert_array_equal(out, wanted)
  assert not np.shares_memory(out, x)


def test_what_is_joined_and_padded():
  a = np.arange(6).reshape(2, 3)
  b = np.arange(10, 14).reshape(1, 4)
  np.testing.assert_array_equal(
    host_batch.join("x", [a, b], (5, 5)),
    [
      [0, 1, 2, 0, 0],
      [3, 4, 5, 0, 0],
      [10, 11, 12, 13, 0],
      [0, 1, 2, 0, 0],
      [0, 1, 2, 0, 0],
    ],
  )
  empty = np.ones((0, 3))
  np.testing.assert_array_equal(
    host_batch.join("x", [empty], (2, 3)), np.zeros((2, 3))
  )


def test_device_arrays_stay_on_the_device():
  x = jnp.arange(4)
  assert host_batch.join("x", [x], (4,)) is x
  np.testing.assert_array_equal(
    host_batch.join("x", [x], (6,)), [0, 1, 2, 3, 0, 0]
  )
