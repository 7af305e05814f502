"""Sums of `IndexedSlices` over the replicas."""

import numpy as np
import pytest

import flaxshard as fs
from flaxshard.replicas import context as replica_context

EIGHT = fs.Strategy()
# Rows of the table: with 3 ids on each of 8 replicas it takes fewer bytes to
# gather rows of the larger one, and to sum the smaller one as an array.
LARGE, SMALL = 40, 8
PAIRS = ((0, 2), (1, 3), (4, 6), (5, 7))


def make_slices(size):
  """Returns ids `[8, 3]` and rows `[8, 3, 2]`, with padding."""
  rng = np.random.default_rng(0)
  ids = rng.integers(0, size, (8, 3))
  ids[0] = [1, 1, size]
  ids[-1] = [-1, 1, 0]
  return ids, rng.normal(size=(8, 3, 2)).astype(np.float32)


def dense_of(ids, values, size):
  dense = np.zeros((size, 2))
  keep = (ids >= 0) & (ids < size)
  np.add.at(dense, ids[keep], np.asarray(values, float)[keep])
  return dense


def reduce_all(op, ids, values, size, groups=None):
  """Returns the slices that each replica has after the reduction."""

  def reduce(ids, values):
    slices = fs.IndexedSlices(ids[0], values[0], (size, 2))
    return replica_context.reduce_over_replicas(op, slices, groups)

  return EIGHT.run(reduce, args=EIGHT.shard_batch((ids, values)))


@pytest.mark.parametrize("groups", [None, PAIRS])
@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_mean_has_the_rows_of_all_replicas(size, groups):
  ids, values = make_slices(size)
  out = reduce_all("mean", ids, values, size, groups)
  numbers, rows = np.asarray(out.indices), np.asarray(out.values)
  for group in groups or (range(8),):
    mine = ids[list(group)]
    wanted = dense_of(mine, values[list(group)], size) / len(group)
    touched = sorted({*mine.ravel()} - {-1, size})
    count = min(mine.size, size)
    for i in group:
      # Each row once, and then padding.
      padding = [size] * (count - len(touched))
      assert numbers[i].tolist() == touched + padding
      assert not rows[i, len(touched) :].any()
      np.testing.assert_allclose(
        rows[i, : len(touched)], wanted[touched], rtol=1e-6, atol=1e-6
      )
      np.testing.assert_array_equal(rows[i], rows[group[0]])


@pytest.mark.parametrize("size", [LARGE, SMALL])
def test_narrow_sums(size):
  ids = np.full((8, 3), 1)
  ones = np.ones((8, 3, 2), np.float16)
  # The sum is 480,000; float16 ends at 65,504.
  out = reduce_all("mean", ids, np.float16(2e4) * ones, size)
  assert out.values.value.dtype == np.float16
  assert np.asarray(out.values)[:, 0] == pytest.approx(6e4, rel=1e-3)
  # In float16, 2048 + 1 is 2048.
  ones[0, 0] = 2048
  total = reduce_all("sum", ids, ones, size)
  assert (np.asarray(total.values)[:, 0] == 2048 + 22 + 1).all()


@pytest.mark.parametrize(
  ("size", "wanted"),
  [
    # Ids and rows of two tables; a sum for the other array.
    (LARGE, {"all_gather": 4, "all_reduce": 1}),
    # Ids of two tables; a sum for each table, and one for the other array.
    (SMALL, {"all_gather": 2, "all_reduce": 3}),
  ],
)
def test_collectives(size, wanted):
  def reduce(ids, values):
    slices = fs.IndexedSlices(ids[0], values[0], (size, 2))
    grads = {"t": slices, "u": slices * 2.0, "b": values[0]}
    return fs.get_replica_context().all_reduce("mean", grads)

  lowered = EIGHT.jit(reduce).lower(*EIGHT.shard_batch(make_slices(size)))
  text = lowered.as_text()
  assert wanted == {kind: text.count(f"stablehlo.{kind}") for kind in wanted}


def test_all_gather():
  def gather(ids, values):
    slices = fs.IndexedSlices(ids[0], values[0], (LARGE, 2), is_unique=True)
    gathered = fs.get_replica_context().all_gather(slices, 0)
    assert not gathered.is_unique
    return gathered.to_dense()

  ids, values = make_slices(LARGE)
  out = EIGHT.run(gather, args=EIGHT.shard_batch((ids, values)))
  np.testing.assert_allclose(out[0], dense_of(ids, values, LARGE), atol=1e-6)
