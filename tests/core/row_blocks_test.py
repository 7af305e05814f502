"""Rows in blocks, one for each part of a table that is split by rows."""

import jax
import numpy as np
import pytest

import flaxshard as fs

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
    return split, split.to_dense(), table + split, split.norm(), taken, new

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
