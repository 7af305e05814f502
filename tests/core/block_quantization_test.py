import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flaxshard.core import block_quantization

RNG = np.random.default_rng(0)
LARGEST = {"int8": 127, "int4": 7}
ENCODE = jax.jit(block_quantization.encode, static_argnums=1)
DECODE = jax.jit(block_quantization.decode, static_argnums=(1, 2))


def round_trip(rows, fmt):
  data = ENCODE(jnp.asarray(rows), fmt)
  width = rows.shape[-1]
  assert data.dtype == jnp.uint8
  assert data.shape == (
    *rows.shape[:-1],
    block_quantization.num_bytes(width, fmt),
  )
  return np.asarray(DECODE(data, width, fmt))


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("width", [1, 256, 257])
def test_integers_have_a_scale_for_each_256_numbers(fmt, width):
  rows = RNG.normal(size=(3, width)).astype(np.float32)
  rows *= 10.0 ** RNG.integers(-6, 6, size=rows.shape)
  decoded = round_trip(rows, fmt)
  for start in range(0, width, 256):
    block = rows[:, start : start + 256]
    scale = np.abs(block).max(-1, keepdims=True) / np.float32(LARGEST[fmt])
    wanted = np.round(block / scale) * scale
    np.testing.assert_allclose(
      decoded[:, start : start + 256], wanted, rtol=1e-6
    )


def test_bfloat16_has_no_scale():
  rows = RNG.normal(size=(2, 7)).astype(np.float32)
  wanted = np.asarray(jnp.asarray(rows).astype(jnp.bfloat16), np.float32)
  np.testing.assert_array_equal(round_trip(rows, "bfloat16"), wanted)


@pytest.mark.parametrize("fmt", block_quantization.FORMATS)
def test_zeros_stay_zeros(fmt):
  np.testing.assert_array_equal(round_trip(np.zeros((2, 9)), fmt), 0)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("value", [1e-45, 1e-38, 3e38])
def test_extreme_numbers_stay_finite(fmt, value):
  rows = np.full((1, 4), value, np.float32)
  assert np.isfinite(round_trip(rows, fmt)).all()


@pytest.mark.parametrize("fmt", ["int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_with_a_nonfinite_number_becomes_nan(fmt, value):
  rows = np.ones((1, 512), np.float32)
  rows[0, 300] = value
  decoded = round_trip(rows, fmt)
  assert np.isnan(decoded[0, 256:]).all()
  np.testing.assert_array_equal(decoded[0, :256], 1)


@pytest.mark.parametrize(
  ("fmt", "share"), [("bfloat16", 0.5), ("int8", 0.254), ("int4", 0.129)]
)
def test_bytes_relative_to_float32(fmt, share):
  size = block_quantization.num_bytes(4096, fmt)
  assert size / (4 * 4096) == pytest.approx(share, abs=1e-3)
