"""Sums of gradients by rows."""

import jax
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.sparse import row_accumulator

pytestmark = pytest.mark.slow

SHAPE = (6, 2)
PARAMS = {
  "table": np.zeros(SHAPE, np.float32),
  "w": np.zeros(2, np.float32),
}
TX = fs.sparse_rows(optax.sgd(0.1), ["table"])
# Compiled once for all tests, which use as few shapes as they can.
add = jax.jit(row_accumulator.add)
take = jax.jit(row_accumulator.take, static_argnums=3)
clear = jax.jit(row_accumulator.clear)


def slices(*numbers):
  """Returns a row of n + 1 for each row number n."""
  rows = np.repeat(np.array(numbers, np.float32)[:, None] + 1, 2, 1)
  return fs.IndexedSlices(np.array(numbers, np.int32), rows, SHAPE)


def first():
  return PARAMS, row_accumulator.init_touched(TX, PARAMS)


def grads(table):
  return {"table": table, "w": np.ones(2, np.float32)}


def test_only_tables_that_are_trained_have_touched_rows():
  params, touched = first()
  assert touched["w"] is None and touched["table"].shape == (6,)
  assert row_accumulator.init_touched(optax.sgd(0.1), params) == {}
  frozen = fs.sparse_rows(fs.freeze(optax.sgd(0.1), ["table"]), ["table"])
  assert jax.tree.leaves(row_accumulator.init_touched(frozen, params)) == []


def test_sums_have_the_rows_of_all_gradients():
  sums, touched = first()
  for table in (slices(2, 2), slices(5, 0)):
    sums, touched = add(sums, touched, grads(table))
  np.testing.assert_array_equal(sums["table"][:, 0], [1, 0, 6, 0, 0, 6])
  assert np.flatnonzero(touched["table"]).tolist() == [0, 2, 5]
  assert row_accumulator.count_touched(touched) == 3
  taken = take(sums, touched, grads(slices(5, 0)), 2)
  # Two gradients of two rows: four rows, of which one is padding.
  assert taken["table"].indices.tolist() == [0, 2, 5, 6]
  assert taken["table"].values[:, 0].tolist() == [1, 6, 6, 0]
  assert taken["table"].is_unique
  np.testing.assert_array_equal(taken["w"], [2, 2])
  sums, touched = clear(sums, touched, taken)
  assert not any(np.any(x) for x in jax.tree.leaves((sums, touched)))


def test_a_gradient_that_is_not_applied_changes_nothing():
  sums, touched = first()
  bad = grads(slices(1).map_values(lambda x: np.full_like(x, np.inf)))
  new = add(sums, touched, bad, np.bool_(False))
  for x, y in zip(
    jax.tree.leaves(new), jax.tree.leaves((sums, touched)), strict=True
  ):
    np.testing.assert_array_equal(x, y)


def test_rows_beyond_the_size_stay_in_the_sum():
  sums, touched = first()
  for table in (slices(0, 1, 3, 4), slices(5, 6)):
    sums, touched = add(sums, touched, grads(table))
  taken = take(sums, touched, grads(slices(5, 6)), 2)
  assert taken["table"].indices.tolist() == [0, 1, 3, 4]
  sums, touched = clear(sums, touched, taken)
  assert sums["table"][:, 0].tolist() == [0, 0, 0, 0, 0, 6]
  assert np.flatnonzero(touched["table"]).tolist() == [5]


def test_without_a_gradient_in_this_step_all_rows_may_be_taken():
  sums, touched = first()
  sums, touched = add(sums, touched, grads(slices(0, 4)))
  taken = take(sums, touched, grads(None), 1)
  assert taken["table"].indices.tolist() == [0, 4, 6, 6, 6, 6]


def test_a_whole_gradient_touches_all_rows():
  sums, touched = first()
  sums, touched = add(sums, touched, grads(slices(0, 6)))
  whole = grads(np.ones(SHAPE, np.float32))
  sums, touched = add(sums, touched, whole)
  assert np.all(touched["table"])
  taken = take(sums, touched, whole, 2)["table"]
  assert taken.tolist() == [[2, 2]] + [[1, 1]] * 5


@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0])
def test_cleared_rows_are_zero(value):
  sums, touched = first()
  is_touched = np.arange(6) == 3
  sums = {
    **sums,
    "table": np.where(is_touched[:, None], value, PARAMS["table"]),
  }
  touched = {**touched, "table": is_touched}
  taken = take(sums, touched, grads(slices(3, 6)), 2)
  sums, touched = clear(sums, touched, taken)
  assert not np.any(sums["table"]) and not np.any(touched["table"])
