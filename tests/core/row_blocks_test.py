"""Rows in blocks, one for each part of a table that is split by rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs

ROWS = 12
TABLE = np.arange(2.0 * ROWS, dtype=np.float32).reshape(ROWS, 2)


def make_slices(indices, dtype=np.int32):
  indices = np.asarray(indices, dtype)
  values = np.random.default_rng(0).normal(size=(len(indices), 2))
  return fs.IndexedSlices(indices, values.astype(np.float32), TABLE.shape)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 12])
def test_blocks_hold_the_rows_of_their_part(parts):
  slices = make_slices([11, 3, 0, 3, 12, 5])
  split = slices.split(parts)
  split.check()
  assert split.parts == parts and split.is_unique
  blocks = np.asarray(split.indices).reshape(parts, -1)
  for i, block in enumerate(blocks):
    part = range(i * ROWS // parts, (i + 1) * ROWS // parts)
    wanted = [n for n in (0, 3, 5, 11) if n in part]
    assert [n for n in block if n != ROWS] == wanted
  np.testing.assert_array_equal(split.to_dense(), slices.to_dense())
  np.testing.assert_array_equal(TABLE + split, TABLE + slices)
  assert split.norm() == pytest.approx(float(slices.norm()))
  assert split.split(parts) is split and split.deduplicated() is split
  assert (split * 2.0).parts == parts


@pytest.mark.parametrize("parts", [1, 3])
def test_take_and_put_rows(parts):
  split = make_slices([7, 2, 2, 12, -1]).split(parts)
  taken = np.asarray(split.take_rows(jnp.asarray(TABLE)))
  is_row = np.asarray(split.indices) < ROWS
  assert sorted(taken[is_row].tolist()) == TABLE[[2, 7]].tolist()
  new = split.put_rows(jnp.asarray(TABLE), -taken)
  wanted = TABLE.copy()
  wanted[[2, 7]] *= -1
  np.testing.assert_array_equal(new, wanted)


def test_rows_stay_whole_if_the_parts_do_not_divide_them():
  assert make_slices([1, 2]).split(5).parts == 1


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_row_numbers_of_any_integer_dtype(dtype):
  # A table with as many rows as the dtype has numbers: padding needs one more.
  values = np.ones((3, 1), np.float32)
  indices = np.asarray([127, 1, 127], dtype)
  slices = fs.IndexedSlices(indices, values, (256, 1))
  assert slices.deduplicated().indices.tolist() == [1, 127, 256]
  assert slices.to_dense()[jnp.array([1, 127]), 0].tolist() == [1, 2]
  table = np.zeros((256, 1), np.float32)
  assert (table + slices)[127, 0] == 2


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

  def program(parts):
    add = jax.jit(lambda table, slices: table + slices.split(parts))
    np.testing.assert_array_equal(add(*args), table + slices)
    return add.lower(*args).compile().as_text()

  assert "all-reduce" in program(1)
  split = program(4)
  assert "all-reduce" not in split and "all-gather" not in split
