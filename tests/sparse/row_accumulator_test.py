"""Sums of gradients by rows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard.sparse import row_accumulator

SHAPE = (6, 2)
PARAMS = {"table": jnp.zeros(SHAPE), "w": jnp.zeros(2)}
TX = fs.sparse_rows(optax.sgd(0.1), ["table"])


def slices(*numbers):
  """Returns a row of n + 1 for each row number n."""
  rows = np.repeat(np.array(numbers, np.float32)[:, None] + 1, 2, 1)
  return fs.IndexedSlices(np.array(numbers, np.int32), rows, SHAPE)


def first():

  return PARAMS, row_accumulator.init_touched(TX, PARAMS)


def grads(table):
  return {"table": table, "w": jnp.ones(2)}


def test_only_tables_that_are_trained_have_touched_rows():
  params, touched = first()
  assert touched["w"] is None and touched["table"].shape == (6,)
  assert row_accumulator.init_touched(optax.sgd(0.1), params) == {}
  frozen = fs.sparse_rows(fs.freeze(optax.sgd(0.1), ["table"]), ["table"])
  assert jax.tree.leaves(row_accumulator.init_touched(frozen, params)) == []


def test_sums_have_the_rows_of_all_gradients():
  sums, touched = first()
  for table in (slices(2, 0, 2), slices(5, 0)):
    sums, touched = row_accumulator.add(sums, touched, grads(table))
  np.testing.assert_array_equal(sums["table"][:, 0], [2, 0, 6, 0, 0, 6])
  assert np.flatnonzero(touched["table"]).tolist() == [0, 2, 5]
  assert row_accumulator.count_touched(touched) == 3
  taken = row_accumulator.take(sums, touched, grads(slices(5, 0)), 2)
  # Two gradients of two rows: four rows, of which one is padding.
  assert taken["table"].indices.tolist() == [0, 2, 5, 6]
  assert taken["table"].values[:, 0].tolist() == [2, 6, 6, 0]
  assert taken["table"].is_unique
  np.testing.assert_array_equal(taken["w"], [2, 2])
  sums, touched = row_accumulator.clear(sums, touched, taken)
  assert not any(np.any(x) for x in jax.tree.leaves((sums, touched)))


def test_a_gradient_that_is_not_applied_changes_nothing():
  sums, touched = first()
  bad = grads(slices(1) * jnp.float32(np.inf))
  new = row_accumulator.add(sums, touched, bad, jnp.array(False))
  for x, y in zip(
    jax.tree.leaves(new), jax.tree.leaves((sums, touched)), strict=True
  ):
    np.testing.assert_array_equal(x, y)


def test_rows_beyond_the_size_stay_in_the_sum():
  sums, touched = first()
  for table in (slices(0, 1, 3, 4), slices(5)):
    sums, touched = row_accumulator.add(sums, touched, grads(table))
  taken = row_accumulator.take(sums, touched, grads(slices(5)), 2)
  assert taken["table"].indices.tolist() == [0, 1]
  sums, touched = row_accumulator.clear(sums, touched, taken)
  assert sums["table"][:, 0].tolist() == [0, 0, 0, 4, 5, 6]
  assert np.flatnonzero(touched["table"]).tolist() == [3, 4, 5]


def test_without_a_gradient_in_this_step_all_rows_may_be_taken():
  sums, touched = first()
  sums, touched = row_accumulator.add(sums, touched, grads(slices(0, 4)))
  taken = row_accumulator.take(sums, touched, grads(None), 1)
  assert taken["table"].indices.tolist() == [0, 4, 6, 6, 6, 6]


def test_a_whole_gradient_touches_all_rows():
  sums, touched = first()
  sums, touched = row_accumulator.add(sums, touched, grads(slices(0)))
  whole = grads(jnp.ones(SHAPE))
  sums, touched = row_accumulator.add(sums, touched, whole)
  assert bool(touched["table"].all())
  taken = row_accumulator.take(sums, touched, whole, 2)["table"]
  assert taken.tolist() == [[2, 2]] + [[1, 1]] * 5


@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0])
def test_cleared_rows_are_zero(value):
  sums, touched = first()
  sums = {**sums, "table": sums["table"].at[3].set(value)}
  touched = {**touched, "table": touched["table"].at[3].set(True)}
  taken = row_accumulator.take(sums, touched, grads(slices(3)), 1)
  sums, touched = row_accumulator.clear(sums, touched, taken)
  assert not np.any(sums["table"]) and not np.any(touched["table"])
