"""Tests of the data position in a checkpoint."""

import json
import shutil

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


def test_global_position_of_several_processes_is_restored(tmp_path):
  whole = take(make_iterator(), 6)
  iterator = make_iterator()
  take(iterator, 4)
  with fs.Checkpointer(tmp_path, digests=False) as checkpointer:
    checkpointer.save(4, create(), data=iterator)
  item = tmp_path / "4" / "input_iterator"
  (file,) = item.glob("*.json")
  assert json.loads(file.read_text()) == iterator.get_state()  # as Grain does
  # The files that Grain writes in as many processes.
  for i in range(3):
    shutil.copy(file, item / f"process_{i}-of-3.json")
  with fs.Checkpointer(tmp_path) as checkpointer:
    iterator = make_iterator()
    checkpointer.restore(create(), data=iterator)
    assert take(iterator, 2) == whole[4:]
    (item / "process_1-of-3.json").unlink()
    with pytest.raises(ValueError, match=r"process_1-of-3.json is missing"):
      checkpointer.restore(create(), 4, data=make_iterator())
