"""Tests of the data position in a checkpoint."""

import json
import pathlib
import re

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import flaxshard as fs
from flaxshard import data
from flaxshard.checkpoint import digests
from flaxshard.checkpoint import iterator_state

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


# The number of processes.


def be_process(monkeypatch, index, count):
  monkeypatch.setattr(jax, "process_index", lambda: index)
  monkeypatch.setattr(jax, "process_count", lambda: count)


def write_positions(step_dir, positions):
  """Writes the files that Grain writes in as many processes."""
  item_dir = step_dir / iterator_state.ITEM
  item_dir.mkdir(parents=True)
  for i, position in enumerate(positions):
    file = item_dir / f"process_{i}-of-{len(positions)}.json"
    file.write_text(json.dumps(position, indent=4))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_global_position_of_any_number_of_processes_is_restored(
  tmp_path, monkeypatch, count
):
  whole = take(make_iterator(), 6)
  # As the versions before saved it: one file for each of four processes.
  write_positions(tmp_path, [{"next_index": 4}] * 4)
  be_process(monkeypatch, count - 1, count)
  iterator = make_iterator()
  position = iterator_state.Position(iterator)
  position.read(tmp_path)
  position.apply()
  assert take(iterator, 2) == whole[4:]


@pytest.mark.parametrize("saving", [1, 2, 4])
def test_global_position_is_saved_once(tmp_path, monkeypatch, saving):
  iterator = make_iterator()
  take(iterator, 3)
  position = iterator_state.Position(iterator)
  for index in range(saving):
    be_process(monkeypatch, index, saving)
    iterator_state.Handler().save(tmp_path, iterator_state.Save(position))
  monkeypatch.undo()
  assert [file.name for file in tmp_path.iterdir()] == ["process_0-of-1.json"]
  # A program of one process reads it with Grain alone.
  restored = make_iterator()
  grain.checkpoint.CheckpointHandler().restore(tmp_path, item=restored)
  assert restored.get_state() == iterator.get_state()


def test_position_of_a_process_stays_with_that_process(tmp_path, monkeypatch):
  item_dir = tmp_path / iterator_state.ITEM
  item_dir.mkdir()
  for index in range(2):
    be_process(monkeypatch, index, 2)
    position = iterator_state.Position(Counter(10 * index))
    iterator_state.Handler().save(item_dir, iterator_state.Save(position))
  for index in range(2):
    be_process(monkeypatch, index, 2)
    counter = Counter(None)
    position = iterator_state.Position(counter)
    position.read(tmp_path)
    position.apply()
    assert counter.state == 10 * index
  be_process(monkeypatch, 0, 3)
  with pytest.raises(ValueError, match=r"2 processes.*3 processes.*Counter"):
    iterator_state.Position(Counter(0)).read(tmp_path)
  counter = Counter(0)
  counter.position_is_global = True
  with pytest.raises(ValueError, match=r"different positions of 2 processes"):
    iterator_state.Position(counter).read(tmp_path)


def test_missing_position_of_a_process_is_damage(tmp_path):
  write_positions(tmp_path, [{"next_index": 4}] * 3)
  (tmp_path / iterator_state.ITEM / "process_1-of-3.json").unlink()
  position = iterator_state.Position(make_iterator())
  with pytest.raises(digests.Damaged, match=r"process_1-of-3.json is missing"):
    position.read(tmp_path)


def test_position_is_global_must_be_a_boolean():
  counter = Counter(0)
  counter.position_is_global = "yes"
  with pytest.raises(TypeError, match=r"position_is_global .*'yes'"):
    iterator_state.Position(counter)


def test_descriptions_show_the_positions(tmp_path):
  write_positions(tmp_path / "1", [{"next_index": 4}])
  write_positions(tmp_path / "2", [[1], [2]])
  assert iterator_state.describe(tmp_path / "1") == [
    'input_iterator: {"next_index": 4}'
  ]
  assert iterator_state.describe(tmp_path / "2") == [
    "input_iterator, process 0 of 2: [1]",
    "input_iterator, process 1 of 2: [2]",
  ]
  assert iterator_state.describe(tmp_path) == []


def test_snippet_of_the_documentation_runs(tmp_path):
  root = pathlib.Path(__file__).parents[2]
  text = (root / "docs" / "guides" / "processes.md").read_text()
  section = text.partition("\n### Custom iterators\n")[2].partition("\n## ")[0]
  (snippet,) = re.findall(r"```python\n(.*?)```", section, re.S)
  names = {}
  exec(snippet.replace("/tmp/positions", str(tmp_path)), names)
  (file,) = (tmp_path / "1" / "input_iterator").glob("*.json")
  assert file.name == "process_0-of-1.json"
  assert names["iterator"].get_state() == {"next_index": 1}
