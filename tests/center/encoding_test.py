"""Trees of arrays as bytes, and arrays in fewer bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from tree_equality import assert_trees_equal

from flaxshard.center import encoding

TREE = {
  "step": 3,
  "name": "a b",
  "scale": 0.1,
  "shape": [2, 3],
  "nothing": None,
  "arrays": {
    "w/a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "half": np.asarray(jnp.ones(3, jnp.bfloat16)),
    "numbers": np.arange(-3, 3, dtype=np.int8),
    "pairs": np.array([15, 240], np.uint8),
    "flag": np.array(True),
    "z": np.array([1 + 2j], np.complex64),
    "empty": np.zeros((0, 2), np.float32),
    "scalar": np.float32(2.5),
  },
}
LARGEST = {"int8": 127, "int4": 7}
RNG = np.random.default_rng(0)


def test_a_tree_is_the_same_after_it_was_bytes():
  found = encoding.unpack("key", encoding.pack(TREE))
  assert {**found, "arrays": 0} == {**TREE, "arrays": 0}
  assert_trees_equal(found["arrays"], TREE["arrays"])


def test_every_damage_is_found():
  content = encoding.pack(TREE)
  damaged = [content[:n] for n in range(0, len(content), 7)]
  for n in range(0, len(content), 5):
    damaged.append(content[:n] + bytes([content[n] ^ 4]) + content[n + 1 :])
  damaged += [content + b"\0", bytes(4), bytes(12), bytes(100), b"{}"]
  for found in damaged:
    with pytest.raises(encoding.DamagedError, match="a/key"):
      encoding.unpack("a/key", found)


def round_trip(x, dtype):
  return encoding.decode(encoding.encode(x, dtype))


def test_known_values():
  x = np.array([[254, -254, 2], [3, 0, -1]], np.float32)
  encoded = encoding.encode(x, "int8")
  assert encoded["numbers"].tolist() == [127, -127, 1, 2, 0, 0]
  assert encoded["scales"].tolist() == [2.0]
  assert round_trip(x, "int8").tolist() == [[254, -254, 2], [4, 0, 0]]
  x = np.array([7, -7, 0.6], np.float32)
  encoded = encoding.encode(x, "int4")
  # Two numbers plus eight in a byte, the first one in the low bits.
  assert encoded["numbers"].tolist() == [15 + (1 << 4), 9 + (8 << 4)]
  assert round_trip(x, "int4").tolist() == [7, -7, 1]
  x = np.array([1 + 2**-7, 1 + 2**-9], np.float32)
  assert round_trip(x, "bfloat16").tolist() == [1 + 2**-7, 1.0]


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_errors_are_at_most_half_a_scale(dtype, size, kind):
  x = RNG.normal(size=size) * 10 ** RNG.uniform(-3, 3, size)
  # A block of zeros, or of numbers whose scale would be zero.
  x[256:512] = 1e-45 if size > 257 else 0
  x = np.asarray(jnp.asarray(x, kind))
  found = round_trip(x, dtype)
  assert found.dtype == np.float32
  wide = x.astype(np.float32)
  for start in range(0, size, 256):
    block = slice(start, start + 256)
    scale = np.abs(wide[block]).max() / LARGEST[dtype]
    assert np.abs(found[block] - wide[block]).max() <= 0.5001 * scale + 1e-45
  # What is exact stays so.
  np.testing.assert_allclose(round_trip(found, dtype), found, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4", None])
def test_other_arrays_stay(dtype):
  for name in ("numbers", "z", "empty", "scalar"):
    x = TREE["arrays"][name]
    assert_trees_equal(round_trip(x, dtype), np.asarray(x))
