"""`IndexedSlices` behaves as the array that it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sparse_states import dense

import flaxshard as fs

P = jax.sharding.PartitionSpec
ROWS = 12
TABLE = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)
VALUES = np.arange(1.0, 15.0, dtype=np.float32).reshape(7, 2)
# Row 3 twice; padding in the last two places.
INDICES = np.array([11, 3, 0, 3, 5, 12, -1])
USED = [0, 3, 5, 11]
SLICES = fs.IndexedSlices(INDICES, VALUES, TABLE.shape)


DENSE = dense(SLICES)


def test_deduplicated_is_sorted_unique_and_padded():
  rows = jax.jit(lambda s: s.deduplicated())(SLICES)
  assert rows.indices.tolist() == [*USED, 12, 12, 12]
  np.testing.assert_array_equal(rows.values[:4], DENSE[USED])
  assert not rows.values[4:].any()
  assert rows.is_unique and rows.deduplicated() is rows
  # The row number of padding does not fit into int8.
  large = fs.IndexedSlices(np.int8([3, 0, 3]), VALUES[:3], (300, 2))
  rows = jax.jit(lambda s: s.deduplicated())(large)
  assert rows.indices.tolist() == [0, 3, 300]
  # In bfloat16 256 + 1 is 256; in float16 300 * 300 is infinite.
  rows = fs.IndexedSlices([0] * 300, np.ones((300, 1), jnp.bfloat16), (2, 1))
  sums = jax.jit(lambda s: (s.deduplicated().values, s.to_dense()))(rows)
  assert [np.asarray(x)[0, 0] for x in sums] == [300, 300]
  assert fs.sparse.global_norm(rows.astype(jnp.float16)) == 300


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint32"])
def test_arithmetic_is_that_of_the_array(dtype):
  slices = fs.IndexedSlices(INDICES.astype(dtype), VALUES, TABLE.shape)
  rows, arrays, norm = jax.jit(
    lambda s, x: (
      {1: s, 2: 2 * s, 0.5: s * jnp.float32(0.5), 0.25: s / 4, -1: -s},
      (s.to_dense(), x + s - x, s + x - x, TABLE + s - x),
      fs.sparse.global_norm(s),
    )
  )(slices, TABLE)
  for factor, got in rows.items():
    assert (got.shape, got.ndim, got.size) == (TABLE.shape, 2, TABLE.size)
    np.testing.assert_array_equal(dense(got), factor * DENSE)
  for got in arrays:
    np.testing.assert_array_equal(got, DENSE)
  assert norm == pytest.approx(np.linalg.norm(DENSE))
  np.testing.assert_array_equal(dense(SLICES + SLICES), 2 * DENSE)
  assert SLICES.astype(jnp.bfloat16).dtype == jnp.bfloat16


def test_tree_map_without_is_leaf_is_found():
  halves = jax.tree.map(lambda x: x * 0.5, SLICES)
  with pytest.raises(TypeError, match=r"is_leaf=flaxshard\.is_indexed"):
    halves.check()


def test_passes_through_vmap_scan_and_grad():
  def loss(values):
    slices = fs.IndexedSlices(INDICES, values, TABLE.shape)
    norm = fs.sparse.global_norm(slices)
    return (slices.to_dense() ** 2).sum() / 2, norm**2 / 2

  @jax.jit
  def run(batch):
    whole = jax.vmap(lambda s: s.to_dense())(batch)
    _, stacked = jax.lax.scan(lambda c, s: (c, s.to_dense()), 0, batch)
    return whole, stacked, jax.jacrev(loss)(VALUES)

  whole, stacked, grads = run(jax.tree.map(lambda x: np.stack([x, x]), SLICES))
  np.testing.assert_array_equal(whole, [DENSE, DENSE])
  np.testing.assert_array_equal(stacked, whole)
  wanted = np.concatenate([DENSE[INDICES[:5]], np.zeros((2, 2))])
  for grad in grads:
    np.testing.assert_allclose(grad, wanted, rtol=1e-6)


def test_addition_to_a_donated_array_needs_no_second_array():
  rows = 100_000
  slices = fs.IndexedSlices([1, 1, 7], jnp.ones((3, 8)), (rows, 8))
  jitted = jax.jit(optax.apply_updates, donate_argnums=0)
  x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
  program = jitted.lower(x, slices).compile()
  memory = program.memory_analysis()
  assert memory.alias_size_in_bytes == rows * 8 * 4
  assert memory.temp_size_in_bytes < 100_000
  new = program(jnp.zeros((rows, 8)), slices)
  assert new[1].tolist() == [2.0] * 8 and float(new.sum()) == 24


# Rows in blocks, one for each part of a table that is split by rows.


@pytest.mark.parametrize("parts", [1, 3, 12])
def test_blocks_hold_the_rows_of_their_part(parts):
  @jax.jit
  def compute(slices, table):
    split = slices.split(parts)
    assert split.parts == (split * 2.0).parts == parts and split.is_unique
    assert split.split(parts) is split and split.deduplicated() is split
    taken = split.take_rows(table)
    arrays = split.to_dense(), table + split - table
    norm = fs.sparse.global_norm(split)
    return split, arrays, norm, taken, split.put_rows(table, -taken)

  split, arrays, norm, taken, new = jax.device_get(compute(SLICES, TABLE))
  for i, block in enumerate(split.indices.reshape(parts, -1)):
    part = range(i * ROWS // parts, (i + 1) * ROWS // parts)
    assert [n for n in block if n != ROWS] == [n for n in USED if n in part]
  for got in arrays:
    np.testing.assert_array_equal(got, DENSE)
  assert norm == pytest.approx(np.linalg.norm(DENSE))
  np.testing.assert_array_equal(taken[split.indices < ROWS], TABLE[USED])
  # Padding takes rows that exist.
  assert set(map(tuple, taken)) <= set(map(tuple, TABLE))
  negated = TABLE.copy()
  negated[USED] *= -1
  np.testing.assert_array_equal(new, negated)


@pytest.mark.parametrize(("parts", "communicates"), [(1, True), (4, False)])
def test_blocks_in_a_program_without_communication(parts, communicates):
  mesh = fs.Strategy(mesh_shape={"replica": 2, "model": 4}).mesh
  x = jax.device_put(TABLE, jax.sharding.NamedSharding(mesh, P("model", None)))
  slices = jax.device_put(SLICES, jax.sharding.NamedSharding(mesh, P()))
  add = jax.jit(lambda x, slices: x + slices.split(parts))
  program = add.lower(x, slices).compile()
  np.testing.assert_array_equal(program(x, slices), TABLE + DENSE)
  kinds = ("all-reduce", "all-gather")
  assert any(kind in program.as_text() for kind in kinds) == communicates
