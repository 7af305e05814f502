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


# -- Rows in blocks, one for each part of a table that is split by rows.

ROWS = 12
TABLE = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)


def make_slices(indices):
  indices = np.asarray(indices, np.int32)
  values = np.random.default_rng(0).normal(size=(len(indices), 2))
  return fs.IndexedSlices(indices, values.astype(np.float32), TABLE.shape)


@pytest.mark.parametrize("parts", [1, 3, 12])
def test_blocks_hold_the_rows_of_their_part(parts):
  slices = make_slices([11, 3, 0, 3, 12, 5, -1])
  wanted = np.zeros_like(TABLE)
  used = [11, 3, 0, 3, 5]
  np.add.at(wanted, used, np.delete(slices.values, [4, 6], 0))

  @jax.jit
  def compute(slices, table):
    split = slices.split(parts)
    split.check()
    assert split.parts == (split * 2.0).parts == parts and split.is_unique
    assert split.split(parts) is split and split.deduplicated() is split
    taken = split.take_rows(table)
    new = split.put_rows(table, -taken)
    return (
      split,
      split.to_dense(),
      table + split,
      fs.sparse.global_norm(split),
      taken,
      new,
    )

  split, dense, total, norm, taken, new = jax.device_get(compute(slices, TABLE))
  for i, block in enumerate(split.indices.reshape(parts, -1)):
    part = range(i * ROWS // parts, (i + 1) * ROWS // parts)
    own = [n for n in (0, 3, 5, 11) if n in part]
    assert [n for n in block if n != ROWS] == own
  np.testing.assert_allclose(dense, wanted, rtol=1e-6)
  np.testing.assert_allclose(total, TABLE + wanted, rtol=1e-6)
  assert norm == pytest.approx(np.linalg.norm(wanted))
  is_row = split.indices < ROWS
  np.testing.assert_array_equal(taken[is_row], TABLE[[0, 3, 5, 11]])
  # Padding takes rows that exist.
  assert set(map(tuple, taken)) <= set(map(tuple, TABLE))
  negated = TABLE.copy()
  negated[used] *= -1
  np.testing.assert_array_equal(new, negated)


def test_blocks_in_a_program_without_communication():
  strategy = fs.Strategy(mesh_shape={"replica": 2, "model": 4})
  specs = (jax.sharding.PartitionSpec("model", None), None)
  table = np.random.default_rng(0).normal(size=(4096, 2)).astype(np.float32)
  slices = fs.IndexedSlices(np.arange(16) * 200, table[:16], table.shape)
  place = lambda x, spec: jax.device_put(
    x,
    jax.sharding.NamedSharding(
      strategy.mesh, spec or jax.sharding.PartitionSpec()
    ),
  )
  args = [
    place(x, spec) for x, spec in zip((table, slices), specs, strict=True)
  ]

  wanted = table.copy()
  wanted[slices.indices] += table[:16]

  def program(parts):
    add = jax.jit(lambda table, slices: table + slices.split(parts))
    compiled = add.lower(*args).compile()
    np.testing.assert_array_equal(compiled(*args), wanted)
    return compiled.as_text()

  assert "all-reduce" in program(1)
  split = program(4)
  assert "all-reduce" not in split and "all-gather" not in split
