"""Sums of `IndexedSlices` over the replicas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flaxshard as fs
from flaxshard.replicas import context as replica_context
from flaxshard.replicas import rows

P = jax.sharding.PartitionSpec

EIGHT = fs.Strategy()
ONE = fs.Strategy(devices=jax.devices()[:1])
# Rows of the table: with 3 ids on each of 8 replicas it takes fewer bytes to
# gather rows of the larger one, and to sum the smaller one as an array.
LARGE, SMALL = 40, 8
SIZES = [LARGE, pytest.param(SMALL, marks=pytest.mark.slow)]


def make_slices(replicas: int, size: int, dtype=jnp.float32):
  """Returns ids `[replicas, 3]` and rows `[replicas, 3, 2]`, with padding."""
  ids = np.random.default_rng(0).integers(0, size, (replicas, 3))
  ids[0] = [1, 1, size]
  ids[-1] = [-1, 1, 0]
  values = np.random.default_rng(1).normal(size=(replicas, 3, 2))
  return ids, np.asarray(values, dtype)


def dense_of(ids, values, size):
  dense = np.zeros((size, 2))
  keep = (ids >= 0) & (ids < size)
  np.add.at(dense, ids[keep], np.asarray(values, float)[keep])
  return dense


def reduce_all(strategy, op, ids, values, size, groups=None):
  """Returns the slices that each replica has after the reduction."""

  def reduce(ids, values):
    slices = fs.IndexedSlices(ids[0], values[0], (size, 2))
    return replica_context.reduce_gradients(op, {"t": slices}, groups)["t"]

  return strategy.run(reduce, args=strategy.shard_batch((ids, values)))


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_integers_wrap_around_as_those_of_arrays_do(size):
  ids, values = np.zeros((8, 1), int), np.full((8, 1, 2), 100, np.int8)
  out = reduce_all(EIGHT, "sum", ids, values, size)
  assert out.values.value.dtype == np.int8
  assert np.asarray(out.values.value)[:, 0].tolist() == [[32, 32]] * 8


@pytest.mark.parametrize("size", [LARGE, SMALL])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sum_has_the_rows_of_all_replicas(op, size):
  ids, values = make_slices(8, size)
  one = fs.IndexedSlices(ids[0], values[0], (size, 2))
  assert rows.gather_is_smaller(one, 8) == (size == LARGE)
  out = reduce_all(EIGHT, op, ids, values, size)
  numbers, new = np.asarray(out.indices.value), np.asarray(out.values.value)
  wanted = dense_of(ids, values, size) / (8 if op == "mean" else 1)
  touched = sorted({*ids.ravel()} - {-1, size})
  count = min(24, size)
  for i in range(8):
    assert numbers[i].tolist() == touched + [size] * (count - len(touched))
    np.testing.assert_allclose(
      new[i, : len(touched)], wanted[touched], rtol=1e-6, atol=1e-6
    )
    assert not new[i, len(touched) :].any()
    np.testing.assert_array_equal(new[i], new[0])


@pytest.mark.parametrize("size", SIZES)
def test_sum_within_groups(size):
  ids, values = make_slices(8, size)
  groups = ((0, 2), (1, 3), (4, 6), (5, 7))
  one = fs.IndexedSlices(ids[0], values[0], (size, 2))
  assert rows.gather_is_smaller(one, 2)
  out = reduce_all(EIGHT, "mean", ids, values, size, groups)
  for group in groups:
    wanted = dense_of(ids[[*group]], values[[*group]], size) / 2
    for i in group:
      new = fs.IndexedSlices(
        out.indices.value[i], out.values.value[i], (size, 2)
      )
      np.testing.assert_allclose(new.to_dense(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_float16_is_summed_in_float32(size):
  ids = np.full((8, 3), 1)
  values = np.full((8, 3, 2), 6e4, np.float16)
  out = reduce_all(EIGHT, "mean", ids, values / 3, size)
  assert out.values.value.dtype == np.float16
  # The sum is 480,000; float16 ends at 65,504.
  assert np.asarray(out.values.value)[:, 0] == pytest.approx(6e4, rel=1e-3)
  # In float16, 2048 + 1 is 2048.
  ones = np.ones((8, 3, 2), np.float16)
  ones[0, 0] = 2048
  total = reduce_all(EIGHT, "sum", ids, ones, size)
  assert (np.asarray(total.values.value)[:, 0] == 2048 + 22 + 1).all()


def test_one_replica_keeps_its_rows():
  ids, values = make_slices(1, LARGE)
  out = reduce_all(ONE, "mean", ids, values, LARGE)
  np.testing.assert_array_equal(out.indices.value, ids)
  np.testing.assert_array_equal(out.values.value, values)


def collectives(strategy, size):
  ids, values = make_slices(strategy.num_replicas_in_sync, size)

  def reduce(ids, values):
    slices = fs.IndexedSlices(ids[0], values[0], (size, 2))
    grads = {"t": slices, "u": slices * 2.0, "b": values[0]}
    return replica_context.reduce_gradients("mean", grads)

  lowered = strategy.jit(reduce).lower(*strategy.shard_batch((ids, values)))
  text = lowered.as_text()
  return {
    kind: text.count(f"stablehlo.{kind}")
    for kind in ("all_gather", "all_reduce")
  }


def test_collectives():
  # Ids and rows of two tables; a sum for the other array.
  assert collectives(EIGHT, LARGE) == {"all_gather": 4, "all_reduce": 1}
  # Ids of two tables; a sum for each table, and one for the other array.
  assert collectives(EIGHT, SMALL) == {"all_gather": 2, "all_reduce": 3}


@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_and_all_gather_of_the_context(size):
  ids, values = make_slices(8, size)

  def reduce(op, ids, values):
    context = fs.get_replica_context()
    slices = fs.IndexedSlices(ids[0], values[0], (size, 2), is_unique=True)
    if op == "gather":
      out = context.all_gather(slices, 0)
      assert not out.is_unique
    else:
      slices.is_unique = False
      out = context.all_reduce(op, {"t": slices, "n": ids.size})["t"]
    return out.to_dense()

  args = EIGHT.shard_batch((ids, values))
  wanted = dense_of(ids, values, size)
  for op, factor in (("sum", 1), ("mean", 1 / 8), ("gather", 1)):
    out = EIGHT.run(functools.partial(reduce, op), args=args)
    np.testing.assert_allclose(out.value[0], wanted * factor, atol=1e-6)


def test_reduce_outside_of_run_names_rows():
  ids, values = make_slices(8, LARGE)
  out = reduce_all(EIGHT, "mean", ids, values, LARGE)
  with pytest.raises(ValueError, match="IndexedSlices"):
    EIGHT.reduce("mean", {"table": out})
