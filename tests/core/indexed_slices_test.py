"""`IndexedSlices` behaves as the array that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs

SHAPE = (5, 2)
INDICES = [3, 0, 3, 5, -1]
VALUES = jnp.arange(1.0, 11.0).reshape(5, 2)
DENSE = np.array([[3, 4], [0, 0], [0, 0], [6, 8], [0, 0]], np.float32)
SLICES = fs.IndexedSlices(INDICES, VALUES, SHAPE)


def test_to_dense_adds_equal_rows_and_drops_padding():
  np.testing.assert_array_equal(SLICES.to_dense(), DENSE)
  assert SLICES.shape == SHAPE and SLICES.ndim == 2 and SLICES.size == 10


def test_deduplicated_is_sorted_unique_and_padded():
  rows = jax.jit(lambda s: s.deduplicated())(SLICES)
  assert rows.indices.tolist() == [0, 3, 5, 5, 5]
  assert rows.values.tolist() == [[3, 4], [6, 8], *[[0, 0]] * 3]
  assert rows.is_unique and rows.deduplicated() is rows


@jax.jit
def denses(slices, x):
  """Returns whole arrays that must be equal, and a norm."""
  rows = slices.deduplicated()
  return (
    slices.to_dense(),
    rows.to_dense(),
    x + slices - x,
    fs.sparse.global_norm(slices),
  )


def test_rows_of_any_integer_dtype():
  for dtype in ("int8", "uint32"):
    indices = np.array([3, 0, 3], dtype)
    slices = fs.IndexedSlices(indices, VALUES[:3], SHAPE)
    *arrays, _ = denses(slices, DENSE)
    for x in arrays:
      np.testing.assert_array_equal(x, DENSE)
  # The row number of padding does not fit into int8.
  large = fs.IndexedSlices(indices.astype("int8"), VALUES[:3], (300, 2))
  rows = jax.jit(lambda s: s.deduplicated())(large)
  assert rows.indices.tolist() == [0, 3, 300]


def test_arithmetic_is_that_of_the_array():
  results, sums = jax.jit(
    lambda s, x: (
      {
        "times": (2 * s, 2 * DENSE),
        "half": (s * jnp.float32(0.5), DENSE / 2),
        "divided": (s / 4, DENSE / 4),
        "negative": (-s, -DENSE),
        "twice": (s + s, 2 * DENSE),
        "cast": (s.astype(jnp.bfloat16), DENSE),
      },
      (x + s, s + x, np.ones(SHAPE, np.float32) + s),
    )
  )(SLICES, jnp.ones(SHAPE))
  for got, want in results.values():
    assert fs.is_indexed_slices(got)
    dense = np.zeros(SHAPE, np.float32)
    kept = np.isin(got.indices, range(5))
    np.add.at(dense, got.indices[kept], got.values[kept])
    np.testing.assert_array_equal(dense, want)
  for got in sums:
    np.testing.assert_array_equal(got, 1 + DENSE)


@pytest.mark.parametrize(
  ("indices", "values", "shape", "error", "match"),
  [
    ([0.5], VALUES[:1], SHAPE, TypeError, "must be integers, got float"),
    ([True], VALUES[:1], SHAPE, TypeError, "must be integers, got bool"),
    ([[0]], VALUES[:1], SHAPE, ValueError, r"\[1, 1\] and \[1, 2\]"),
    ([0, 1], VALUES[:1], SHAPE, ValueError, r"\[2\] and \[1, 2\]"),
    ([0], jnp.ones((1, 3)), SHAPE, ValueError, r"\(5, 2\) with .* \[1, 3\]"),
    ([0], jnp.ones(1), (), ValueError, r"at least one dimension, got \(\)"),
  ],
)
def test_invalid_arguments_raise(indices, values, shape, error, match):
  with pytest.raises(error, match=match):
    fs.IndexedSlices(indices, values, shape)


def test_tree_map_without_is_leaf_is_found():
  halves = jax.tree.map(lambda x: x * 0.5, SLICES)
  with pytest.raises(TypeError, match=r"is_leaf=flaxshard\.is_indexed"):
    halves.check()
  halves = jax.tree.map(
    lambda x: x * 0.5, {"t": SLICES}, is_leaf=fs.is_indexed_slices
  )
  np.testing.assert_array_equal(halves["t"].to_dense(), DENSE / 2)


def test_passes_through_vmap_scan_and_grad():
  assert "rows" in repr(SLICES)

  def loss(values):
    slices = fs.IndexedSlices(INDICES, values, SHAPE)
    return (slices.to_dense() ** 2).sum() / 2, fs.sparse.global_norm(
      slices
    ) ** 2 / 2

  @jax.jit
  def run(batch):
    dense = jax.vmap(lambda s: s.to_dense())(batch)
    _, stacked = jax.lax.scan(lambda c, s: (c, s.to_dense()), 0, batch)
    return dense, stacked, jax.jacrev(loss)(VALUES)

  batch = jax.tree.map(lambda x: np.stack([x, x]), SLICES)
  dense, stacked, grads = run(batch)
  np.testing.assert_array_equal(dense, [DENSE, DENSE])
  np.testing.assert_array_equal(stacked, dense)
  for grad in grads:
    want = np.concatenate([DENSE[[3, 0, 3]], np.zeros((2, 2))])
    np.testing.assert_allclose(grad, want, rtol=1e-6)


def test_addition_to_a_donated_array_needs_no_second_array():
  rows = 100_000
  slices = fs.IndexedSlices([1, 1, 7], jnp.ones((3, 8)), (rows, 8))
  program = (
    jax.jit(lambda p, s: optax.apply_updates(p, s), donate_argnums=0)
    .lower(jax.ShapeDtypeStruct((rows, 8), jnp.float32), slices)
    .compile()
  )
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes == rows * 8 * 4
  assert memory.temp_size_in_bytes < 100_000
  new = program(jnp.zeros((rows, 8)), slices)
  assert new[1].tolist() == [2.0] * 8 and float(new.sum()) == 24
