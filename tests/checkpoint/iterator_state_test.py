"""Tests of the data position in a checkpoint."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import data

TX = optax.adam(0.125)


def create(value=1.0):
  return fs.TrainState.create(
    apply_fn=None,
    params={"w": jnp.full(3, value)},
    tx=TX,
    wrappers=[fs.LossScale("dynamic")],
  )


def assert_equal(state, wanted):
  jax.tree.map(np.testing.assert_array_equal, state, wanted)


def make_splits():
  numbers = np.arange(12)
  source = data.Arrays(numbers * 2.0, numbers)
  return data.Splits(source, source, num_classes=12)


def take(iterator, count):
  return [next(iterator)["labels"].tolist() for _ in range(count)]


def make_iterator(seed=0):
  return data.train_iterator(make_splits(), batch_size=5, seed=seed)


def test_data_continues_from_the_saved_position(tmp_path):
  whole = take(make_iterator(), 9)
  iterator = make_iterator()
  iterator.start_prefetch()
  assert take(iterator, 4) == whole[:4]
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(4, create(), data=iterator)
    # The save is asynchronous, its position that of the call.
    assert take(iterator, 2) == whole[4:6]
  fresh = make_iterator()
  with fs.Checkpointer(tmp_path) as checkpointer:
    assert_equal(checkpointer.restore(create(0.0), data=fresh), create())
    assert take(fresh, 5) == whole[4:]
    # The state alone, too.
    assert_equal(checkpointer.restore(create(0.0)), create())


def test_checkpoint_without_a_position_raises(tmp_path):
  iterator = make_iterator()
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(3, create())
    with pytest.raises(ValueError, match=r"/3 has no input_iterator"):
      checkpointer.restore(create(), data=iterator)
  # The iterator has not moved.
  assert take(iterator, 2) == take(make_iterator(), 2)


class Counter:
  """A custom iterator that has only a position."""

  def __init__(self, state):
    self.state = state

  def get_state(self):
    return self.state

  def set_state(self, state):
    self.state = state


@pytest.mark.parametrize("position", [{"next": [1, 2]}, b"\x00 bytes"])
def test_custom_iterator_is_restored(tmp_path, position):
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(1, create(), data=Counter(position))
    counter = Counter(b"" if isinstance(position, bytes) else None)
    checkpointer.restore(create(), data=counter)
  assert counter.state == position


@pytest.mark.parametrize(
  "given, message",
  [
    (iter([1]), "data must be .*list_iterator object .* has no get_state"),
    (Counter({1}), "get_state.. must return bytes or a value for JSON: Obj"),
  ],
)
def test_data_without_a_position_raises(tmp_path, given, message):
  with fs.Checkpointer(tmp_path) as checkpointer:
    with pytest.raises(TypeError, match=message):
      checkpointer.save(1, create(), data=given)
    assert checkpointer.all_steps() == []
    checkpointer.save(1, create(), data=Counter(1))
    if not isinstance(given, Counter):
      with pytest.raises(TypeError, match=message):
        checkpointer.restore(create(), data=given)


def test_position_is_saved_as_grain_does(tmp_path):
  iterator = make_iterator()
  take(iterator, 4)
  with fs.Checkpointer(tmp_path) as checkpointer:
    checkpointer.save(4, create(), data=iterator)
  (file,) = (tmp_path / "4" / "input_iterator").glob("*.json")
  assert json.loads(file.read_text()) == iterator.get_state()
